"""Whether one decoder is better than another on a text: a paired bootstrap of the difference in bits per byte.

Both models are scored on the same parts of the text, so that the difficulty of a part cancels out. Tokenizers may
differ: parts begin at token boundaries of both tokenizers.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinylm.errors import UsageError
from tinylm.evaluation.bootstrap import ratio_interval
from tinylm.evaluation.units import choose_units
from tinylm.text.token_positions import PositionedTokens


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models, a and b, on the same text.

    bits_per_byte_a, bits_per_byte_b: mean losses, where a boundary between documents counts as no byte.
    loss_a, loss_b: the same losses in nats per token of the model's own tokenizer.
    difference: bits_per_byte_b - bits_per_byte_a; negative if b is better. difference_low, difference_high: its 95 %
        confidence interval; `None` for a text too short for one.
    better: "a" or "b" if the interval excludes 0, else `None`.
    bytes: size of the scored text. resampled: the units of the bootstrap, as a phrase.
    """

    a: str
    b: str
    bits_per_byte_a: float
    bits_per_byte_b: float
    loss_a: float
    loss_b: float
    difference: float
    difference_low: float | None
    difference_high: float | None
    better: str | None
    bytes: int
    resampled: str

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return dataclasses.asdict(self)

    @property
    def verdict(self) -> str:
        """The result as a sentence."""
        if self.difference_low is None:
            return "The text is too short to compare the models."
        if self.better is None:
            return "No difference can be shown with this text."
        return f"{self.better.upper()} is better by {abs(self.difference):.4f} bits per byte."


@dataclass(frozen=True)
class ComparedParts:
    """The parts of a text that two models are compared on.

    bytes: (U,), their sizes without boundaries between documents. edges_a, edges_b: (U + 1,), the beginning of each
    part and the end of the last one, as indices of the tokens of each model. resampled: the parts as a phrase.
    """

    bytes: np.ndarray
    edges_a: np.ndarray
    edges_b: np.ndarray
    resampled: str


def compared_parts(a: PositionedTokens, b: PositionedTokens) -> ComparedParts:
    """The parts of a text, encoded by two tokenizers: its documents or blocks of it (see `choose_units`).

    Parts begin at token boundaries of both tokenizers. The first token of each tokenizer is not scored, so it is in no
    part. Raises UsageError if the tokenizers have no common token boundary.
    """
    end = a.documents[-1]
    shared = np.append(np.intersect1d(a.boundaries(), b.boundaries()), end)
    if len(shared) < 2:
        raise UsageError("The text is too short to compare the models; give more text.")
    documents = np.unique(np.append(shared[0], a.documents[a.documents >= shared[0]]))
    units = choose_units(documents)
    places = np.unique(shared[np.searchsorted(shared, units.edges)])
    separators = np.searchsorted(a.documents[1:-1] - 1, places)  # number of separators before each place
    return ComparedParts(
        np.diff(places) - np.diff(separators) - (places[1:] == end),  # `end` counts a separator after the last document
        a.first_tokens(places),
        b.first_tokens(places),
        units.describe(len(a.documents) - 1, "bytes"),
    )


def compare_losses(names: tuple[str, str], parts: ComparedParts, nats_a: np.ndarray, nats_b: np.ndarray) -> Comparison:
    """Compare models by their losses in nats on the parts, (U,) each."""
    n_bytes = int(parts.bytes.sum())
    tokens_a, tokens_b = (int(edges[-1] - edges[0]) for edges in (parts.edges_a, parts.edges_b))
    bits_a, bits_b = nats_a / math.log(2), nats_b / math.log(2)
    interval = ratio_interval(bits_b - bits_a, parts.bytes)
    better = None
    if interval is not None:
        better = "b" if interval.high < 0 else "a" if interval.low > 0 else None
    return Comparison(
        a=names[0],
        b=names[1],
        bits_per_byte_a=float(bits_a.sum()) / n_bytes,
        bits_per_byte_b=float(bits_b.sum()) / n_bytes,
        loss_a=float(nats_a.sum()) / tokens_a,
        loss_b=float(nats_b.sum()) / tokens_b,
        difference=float((bits_b - bits_a).sum()) / n_bytes,
        difference_low=None if interval is None else interval.low,
        difference_high=None if interval is None else interval.high,
        better=better,
        bytes=n_bytes,
        resampled=parts.resampled,
    )
