"""Encoding a corpus, MB/s: tinylm on all cores against the `tokenizers` library, by characters and by byte-level BPE.

    python benchmarks/encoding.py tinyshakespeare.txt

The text is repeated until it has --megabytes, and is in memory; both give the same ids, which is checked first. The
library encodes the text as one string, and as a batch of pieces of 64 KB on all cores, whose ids may differ at the ends
of pieces. tinylm's BPE remembers the words that it has met, so it begins anew each time, as a command does; and a text
of its own that is as long as --megabytes, and not repeated, tells what it does without. On one core tinylm encodes
pieces of a million characters one after another. They take turns; ratios are to the faster way of the library.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from measure import describe_machine, speedup, table, take_turns

from tinylm.text.token_files import encode_stream
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

PIECE = 1 << 16
READ_AT_ONCE = 1 << 20  # characters, as a corpus is read from disk


def contestants(text: str, tokenizer: Tokenizer) -> dict[str, Callable[[], object]]:
    """Raises AssertionError when tinylm's ids are not the library's."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    library.encode_special_tokens = True
    read = [text[start : start + READ_AT_ONCE] for start in range(0, len(text), READ_AT_ONCE)]
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    sample = text[: 4 * READ_AT_ONCE]
    assert np.array_equal(encode_stream(iter([sample]), tokenizer), library.encode(sample).ids)

    def anew() -> Tokenizer:
        return Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_str()))

    def on_one_core() -> None:
        encoder = anew()
        for piece in read:
            encoder.encode(piece)

    return {
        "tokenizers, one string": lambda: library.encode(text),
        "tokenizers, pieces of 64 KB": lambda: library.encode_batch_fast(pieces),
        "tinylm, one core": on_one_core,
        "tinylm": lambda: encode_stream(iter(read), anew()),
    }


def rows(text: str, name: str, tokenizer: Tokenizer, rounds: int) -> list[list[str]]:
    times = take_turns(contestants(text, tokenizer), rounds)
    peers = [name for name in times if name.startswith("tokenizers")]
    library = min(peers, key=lambda name: statistics.median(times[name]))
    megabytes = len(text.encode()) / 1e6
    return [
        [
            name,
            way,
            f"{megabytes / statistics.median(seconds):.1f}",
            "1" if way == library else str(speedup(times, way, library)),
        ]
        for way, seconds in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=float, default=20, help="default: 20")
    parser.add_argument("--vocab-size", type=int, default=4096, help="of the BPE (default: 4096)")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args(arguments)
    once = options.text.read_text(encoding="utf-8")
    text = once * max(1, round(options.megabytes * 1e6 / len(once.encode())))
    by_characters = train_char("".join(sorted(set(once))))
    by_pairs = train_bpe([once], options.vocab_size)
    found = rows(text, "characters", by_characters, options.rounds)
    found += rows(text, f"BPE, {by_pairs.vocab_size:,} ids", by_pairs, options.rounds)
    print(f"{describe_machine(['tokenizers', 'gigatoken', 'numpy'])}; {os.cpu_count()} workers\n")
    print(table(["tokens", "encoder", "MB/s", "times tokenizers"], found))


if __name__ == "__main__":
    main()
