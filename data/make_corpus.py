"""Writes the sample corpus: an evening's reading from Tolver, a harbour town that does not exist.

    python data/make_corpus.py > data/corpus.txt

The same seed and size always give the same bytes. The words are all our own: see `vocabulary`, `phrases`,
`plots` and the other modules here for what is said, and `voice` for how.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dice import Dice
from lessons import LESSON_PHRASES, Teacher
from letters import LETTER_PHRASES, Correspondent
from papers import PAPER_PHRASES, Scribbler
from phrases import PHRASES
from plays import PLAY_PHRASES, Stage
from plots import PLOT_PHRASES
from recipes import RECIPE_PHRASES, Cook
from records import RECORD_PHRASES, Clerk
from sayings import SAYING_PHRASES, Sage
from tales import Teller
from verses import Poet
from vocabulary import WORDS
from voice import Voice

DEFAULT_SEED = 1
DEFAULT_BYTES = 1_050_000
BETWEEN_PIECES = "\n\n\n"

Maker = Callable[[], str]

RULES = (
    WORDS | PHRASES | PLOT_PHRASES | PLAY_PHRASES | LETTER_PHRASES | PAPER_PHRASES | RECORD_PHRASES
    | RECIPE_PHRASES | LESSON_PHRASES | SAYING_PHRASES
)  # fmt: skip


def genres(voice: Voice) -> list[tuple[int, Maker]]:
    """Every kind of piece, and how many of it there are in a round."""
    scribbler, clerk, sage, poet = Scribbler(voice), Clerk(voice), Sage(voice), Poet(voice.dice)
    return [
        (14, Teller(voice).tale),
        (7, Stage(voice).scene),
        (5, Correspondent(voice).letters),
        (4, scribbler.diary),
        (4, scribbler.notice),
        (5, scribbler.portrait),
        (4, clerk.ledger),
        (1, clerk.stock),
        (3, clerk.log),
        (4, clerk.weather),
        (1, clerk.tides),
        (4, Cook(voice).recipe),
        (3, Teacher(voice).lesson),
        (6, poet.song),
        (1, poet.countdown),
        (3, sage.proverbs),
        (3, sage.riddle),
    ]


def pieces(seed: int) -> Iterator[str]:
    """Pieces without end, round after round, each round shuffled."""
    dice = Dice(seed)
    makers = [maker for count, maker in genres(Voice(dice, RULES)) for _ in range(count)]
    while True:
        for maker in dice.several(makers, len(makers)):
            yield maker()


def corpus(seed: int = DEFAULT_SEED, size: int = DEFAULT_BYTES) -> str:
    """Whole pieces, as many as it takes to reach the size."""
    text: list[str] = []
    length = 0
    for piece in pieces(seed):
        text.append(piece)
        length += len(piece) + len(BETWEEN_PIECES)
        if length > size:
            break
    return BETWEEN_PIECES.join(text) + "\n"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write the sample corpus.")
    parser.add_argument("--out", type=Path, help="the file to write (default: standard output)")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="which corpus (default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=DEFAULT_BYTES, help="how much (default: %(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_arguments()
    text = corpus(options.seed, options.bytes).encode("ascii")
    if options.out:
        options.out.write_bytes(text)
    else:
        sys.stdout.buffer.write(text)


if __name__ == "__main__":
    main()
