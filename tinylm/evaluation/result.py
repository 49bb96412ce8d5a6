"""The result of an evaluation, the excerpt of a text that a quick one takes, and bootstrap confidence intervals.

An interval is that of a ratio of sums, such as a loss: nats over tokens. Its units are documents or blocks of tokens.
"""

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from tinylm.errors import TinyLMError
from tinylm.reporter import counted
from tinylm.system.html import html_table
from tinylm.text.token_files import Tokens
from tinylm.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """Metrics of a model on a text; those that do not exist for the architecture are `None`.

    Raises TinyLMError if the loss is not a finite number.

    loss: mean negative log-likelihood in nats per token, of classifiers per text. perplexity: exp(loss); not of
        classifiers.
    bits_per_character, bits_per_byte: the same loss in bits per character and per byte of the text. Decoders only, and
        only if the scored tokens encode any text.
    overlapping_loss, overlapping_bits_per_byte: the same two figures with `stride`, in windows that overlap. Each token
        has more context than in training, so they are compared only with those of the same stride.
    accuracy: of encoders, the fraction of the masked tokens whose logit is the largest; on preferences, that of the
        preferences whose chosen answer is likelier than the rejected one; of classifiers, that of the texts whose label
        is found.
    macro_f1: of classifiers, the mean of the F1 scores of the labels. confusion: the number of texts with each label
        (rows) that were given each label (columns), in the order of `labels`.
    margin: on preferences, the mean of log p(chosen) - log p(rejected) in nats.
    exact_match, bleu, chrf: agreement of the targets found by beam search with the references: fraction of equal ones,
        and sacrebleu's BLEU and chrF (`None` without sacrebleu). Encoder-decoders only.
    tokens: number of scored tokens; of classifiers, of read ones. characters, bytes: size of their text, in which the
        end of a document that is a line counts as its line break, and that of others as nothing; decoders only. pairs:
        number of pairs, including those left out of the loss, of encoder-decoders; or number of preferences. texts:
        number of texts with a label.
    baselines: bits per byte of other models, by name. Decoders only.
    scores: further metrics of the job, by name.
    loss_low, loss_high: 95 % confidence interval of the loss on text like this one, by bootstrap, and the same of the
        accuracy and of the margin on preferences; `None` for a text too
        short for one.
    resampled: the units of the bootstrap, as a phrase.
    unit: of the loss.
    """

    loss: float
    perplexity: float | None = None
    bits_per_character: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    margin: float | None = None
    margin_low: float | None = None
    margin_high: float | None = None
    macro_f1: float | None = None
    macro_f1_low: float | None = None
    macro_f1_high: float | None = None
    exact_match: float | None = None
    bleu: float | None = None
    chrf: float | None = None
    tokens: int
    characters: int | None = None
    bytes: int | None = None
    overlapping_loss: float | None = None
    overlapping_bits_per_byte: float | None = None
    pairs: int | None = None
    texts: int | None = None
    baselines: dict[str, float] | None = None
    scores: dict[str, float] | None = None
    loss_low: float | None = None
    loss_high: float | None = None
    resampled: str | None = None
    labels: tuple[str, ...] | None = None
    confusion: tuple[tuple[int, ...], ...] | None = None
    unit: str = "nats per token"

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise TinyLMError(
                "The loss is not a finite number: some weights are too large for the number format of the computation. "
                "Try `dtype` fp32."
            )

    def __repr__(self) -> str:
        return "Evaluation(" + ", ".join(f"{name} {value}" for name, value in self._rows().items()) + ")"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table(self._rows())

    def _rows(self) -> dict[str, str]:
        """The metrics that have a value, as texts, without the ends of intervals and the table of labels."""
        shown: dict[str, str] = {}
        for name, value in self.to_json().items():
            low, high = (getattr(self, f"{name}_{end}", None) for end in ("low", "high"))
            interval = "" if low is None else f" ({low:.4f} to {high:.4f})"
            if isinstance(value, float) and not name.endswith(("_low", "_high")):
                shown[name.replace("_", " ")] = f"{value:.4f}{interval}" + (f" {self.unit}" if name == "loss" else "")
            elif isinstance(value, int):
                shown[name] = f"{value:,}"
            elif isinstance(value, dict):
                shown |= {f"{other} ({name})": f"{score:.4f}" for other, score in value.items()}
        return shown

    def mistakes(self, limit: int = 15) -> list[tuple[int, str, str]]:
        """How many texts with a label were given which other label, the most frequent first."""
        labels = self.labels or ()
        found = [
            (count, label, given)
            for label, row in zip(labels, self.confusion or (), strict=True)
            for given, count in zip(labels, row, strict=True)
            if count and label != given
        ]
        return sorted(found, key=lambda mistake: -mistake[0])[:limit]

    def to_json(self) -> dict[str, Any]:
        """The metrics that are not `None`, by name, in the order of the fields, without `unit`."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None and field.name != "unit"
        }


MAX_FLOPS, MIN_TOKENS = 1e12, 1000
MAX_TOKENS = 50_000


def token_excerpt(tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
    """The first tokens of a text, (N,): as many as a model with this number of parameters scores with about MAX_FLOPS
    operations, from MIN_TOKENS to MAX_TOKENS.
    """
    return np.asarray(tokens[: int(min(MAX_TOKENS, max(MIN_TOKENS, MAX_FLOPS / (2 * parameters))))])


MIN_DOCUMENTS = 20  # from this number on, documents are the units
MAX_UNITS = 1000  # more documents are grouped, which bounds the time of the bootstrap
MAX_BLOCKS = 200  # longer blocks include dependence over longer distances; 200 estimate a spread to about 5 %
MIN_BLOCK = 64  # tokens, or bytes


@dataclass(frozen=True)
class Units:
    """Consecutive parts of a text. Unit i is from edges[i] up to edges[i + 1], in tokens or in bytes.

    kind: "documents", "groups of documents" or "blocks".
    """

    edges: np.ndarray
    kind: str

    def __len__(self) -> int:
        return len(self.edges) - 1

    def describe(self, documents: int, size: str) -> str:
        """The units as a phrase. documents: their number in the text. size: plural noun for what the edges count."""
        if self.kind == "documents":
            return counted(len(self), "document")
        if self.kind == "groups of documents":
            return f"{len(self):,} groups of consecutive documents"
        length = (self.edges[-1] - self.edges[0]) / max(len(self), 1)
        number = counted(documents, "document")
        return f"{counted(len(self), 'block')} of about {length:,.0f} {size}, as the text has only {number}"


def choose_units(document_edges: np.ndarray) -> Units:
    """The units of a text. document_edges: (D + 1,), the beginning of each document and the end of the last.

    If there are at least MIN_DOCUMENTS documents, the units are the documents, or MAX_UNITS groups of equal numbers of
    documents. Otherwise they are at most MAX_BLOCKS blocks of equal length, at least MIN_BLOCK tokens or bytes unless
    the text is shorter.
    """
    documents = len(document_edges) - 1
    if documents >= MIN_DOCUMENTS:
        if documents <= MAX_UNITS:
            return Units(document_edges, "documents")
        chosen = np.linspace(0, documents, MAX_UNITS + 1).astype(np.int64)
        return Units(document_edges[chosen], "groups of documents")
    first, last = int(document_edges[0]), int(document_edges[-1])
    blocks = max(1, min(MAX_BLOCKS, (last - first) // MIN_BLOCK))
    return Units(np.linspace(first, last, blocks + 1).astype(np.int64), "blocks")


RESAMPLES = 10_000
CONFIDENCE = 0.95
MIN_UNITS = 10  # with fewer, no interval is given: resamples of so few values differ too little
SEED = 20_261_123
RESAMPLES_AT_ONCE = 500  # limits the memory of the drawn indices, (RESAMPLES_AT_ONCE, units)


class Interval(NamedTuple):
    """A confidence interval. A width of 0 means that all units agree, not that the estimate is exact."""

    low: float
    high: float


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> Interval | None:
    """The 95 % confidence interval of sum(numerators) / sum(denominators); `None` for fewer than MIN_UNITS units.

    numerators, denominators: (U,), one value per unit. Units are assumed to be independent; those with the denominator
        0 are left out.

    The units are resampled with replacement 10,000 times, from a fixed seed. The ends of the interval are quantiles of
    the resampled ratios, at levels that correct for the number of units: the expanded percentile interval (Hesterberg
    2015, "What teachers should know about the bootstrap", The American Statistician 69).
    """
    used = denominators != 0
    x, y = numerators[used].astype(np.float64), denominators[used].astype(np.float64)
    if len(x) < MIN_UNITS:
        return None
    rng = np.random.Generator(np.random.PCG64(SEED))
    ratios = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        drawn = rng.integers(0, len(x), (RESAMPLES_AT_ONCE, len(x)))
        ratios[start : start + RESAMPLES_AT_ONCE] = x[drawn].sum(axis=1) / y[drawn].sum(axis=1)
    return percentile_interval(ratios, len(x))


def percentile_interval(resampled: np.ndarray, units: int) -> Interval:
    """The expanded percentile interval of the resampled values of a statistic of this number of units."""
    tail = NormalDist().cdf(-((units / (units - 1)) ** 0.5) * t_quantile((1 + CONFIDENCE) / 2, units - 1))
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(low), float(high))


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, to three decimals from 9 degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
