"""How much of a model's text occurs verbatim in its training text, with held-out text as a control."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tinylm.evaluation.bootstrap import ratio_interval
from tinylm.evaluation.verbatim import Documents, Match, find_matches
from tinylm.text.compression import Progress, no_progress
from tinylm.validation import check_numbers, require

REPORTED_MATCHES = 3
SAMPLES, AFTER_TRAINING, AFTER_HELD_OUT, HELD_OUT = (
    "samples",
    "continuations of training text",
    "continuations of held-out text",
    "held-out text",
)


@dataclass(frozen=True)
class MemorisationConfig:
    """Settings of a memorisation test. Lengths are in characters, so that they mean the same with any tokenizer.

    num_samples: number of samples, and of passages of the training text and of held-out text to continue.
    sample_length: length of each sample and continuation.
    prefix_length: length of the text before a continuation.
    min_match: least length of a verbatim match.
    temperature: softmax temperature; 1 samples from the distribution that the model was trained for.
    seed: random seed of the samples and of the choice of passages.

    Raises UsageError for a value out of range, and for matches longer than the samples.
    """

    num_samples: int = 50
    sample_length: int = 500
    prefix_length: int = 100
    min_match: int = 50
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(vars(self))
        require(
            self.min_match <= self.sample_length,
            f"`min_match` is {self.min_match}; it must be at most `sample_length`, {self.sample_length}.",
        )


@dataclass(frozen=True, kw_only=True)
class CopiedText:
    """The copied part of the texts of one source.

    source: SAMPLES, AFTER_TRAINING, AFTER_HELD_OUT or HELD_OUT. samples, characters: number and length of its texts.
    copied: share of the characters in verbatim matches with the training text. copied_low, copied_high: its 95 %
        confidence interval by bootstrap of the texts; `None` for fewer than 10 texts.
    longest: length of the longest match in characters; 0 for none.
    matches: the longest match of each text, the longest REPORTED_MATCHES of them.
    """

    source: str
    samples: int
    characters: int
    copied: float
    copied_low: float | None
    copied_high: float | None
    longest: int
    matches: tuple[Match, ...]


@dataclass(frozen=True, kw_only=True)
class Memorisation:
    """min_match: least length of a match in characters. sources: the texts compared with the training text."""

    min_match: int
    sources: tuple[CopiedText, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """One object per source, with `min_match`."""
        return [{**dataclasses.asdict(source), "min_match": self.min_match} for source in self.sources]


class Passage(NamedTuple):
    """A passage of a text: a prompt for the model, and the text that follows the prompt."""

    prefix: str
    continuation: str


def draw_passages(documents: Documents, config: MemorisationConfig, progress: Progress = no_progress) -> list[Passage]:
    """Up to `num_samples` passages, drawn without replacement, in the order of the text.

    Each document is divided into passages of `prefix_length` + `sample_length` characters that do not overlap. The
    last may be shorter, but not below `prefix_length` + `min_match`. Text is read once
    (reservoir sampling, Vitter 1985).
    """
    size, least = config.prefix_length + config.sample_length, config.prefix_length + config.min_match
    rng = random.Random(config.seed)
    drawn: dict[int, tuple[int, str]] = {}  # by slot: number of the passage, and its text
    count = 0
    rest = ""
    for chunk in _with_end(documents.open(progress)):
        rest += chunk or ""
        stop = len(rest) - (len(rest) % size if chunk is not None else 0)
        for at in range(0, stop, size):
            if min(size, len(rest) - at) < least:
                break
            slot = count if count < config.num_samples else rng.randrange(count + 1)
            if slot < config.num_samples:
                drawn[slot] = count, rest[at : at + size]
            count += 1
        rest = rest[stop:]
    passages = [text for _, text in sorted(drawn.values())]
    return [Passage(text[: config.prefix_length], text[config.prefix_length :]) for text in passages]


def _with_end(stream: Any) -> Any:
    """The stream with `None` at its end, so that `None` ends each document."""
    yield from stream
    yield None


def measure_copied(
    texts: Mapping[str, Sequence[str]], training: Documents, min_match: int, progress: Progress = no_progress
) -> Memorisation:
    """Measure the share of texts, by source, that is in verbatim matches with the training text."""
    matches = find_matches([text for group in texts.values() for text in group], training, min_match, progress)
    sources = []
    first = 0
    for source, group in texts.items():
        stop = first + len(group)
        sizes, copied = np.array([len(text) for text in group], dtype=np.int64), matches.copied[first:stop]
        longest = [
            dataclasses.replace(match, sample=match.sample - first)
            for match in matches.longest
            if first <= match.sample < stop
        ]
        interval = ratio_interval(copied, sizes)
        sources.append(
            CopiedText(
                source=source,
                samples=len(group),
                characters=int(sizes.sum()),
                copied=float(copied.sum() / max(sizes.sum(), 1)),
                copied_low=None if interval is None else interval.low,
                copied_high=None if interval is None else interval.high,
                longest=longest[0].characters if longest else 0,
                matches=tuple(longest[:REPORTED_MATCHES]),
            )
        )
        first = stop
    return Memorisation(min_match=min_match, sources=tuple(sources))
