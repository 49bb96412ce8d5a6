"""The result of an evaluation."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tinylm.errors import TinyLMError


@dataclass(frozen=True, kw_only=True)
class DocumentLoss:
    """The loss of one document, including the end-of-text token after it.

    document: its number in the text, from 1. name: its file, with the line or element if the file has several
        documents; "" if that is not known.
    loss, bits_per_byte, tokens, characters, bytes: as in Evaluation.
    """

    document: int
    name: str
    loss: float
    bits_per_byte: float | None
    tokens: int
    characters: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of a model on a text; those that do not exist for the architecture are `None`.

    Raises TinyLMError if the loss is not a finite number.

    loss: mean negative log-likelihood in nats per token. perplexity: exp(loss).
    bits_per_character, bits_per_byte: the same loss in bits per character and per byte of the text. Decoders only, and
        only if the scored tokens encode any text.
    accuracy: fraction of the masked tokens whose logit is the largest. Encoders only.
    exact_match, bleu, chrf: agreement of the targets found by beam search with the references: fraction of equal ones,
        and sacrebleu's BLEU and chrF (`None` without sacrebleu). Encoder-decoders only.
    tokens: number of scored tokens. characters, bytes: size of their text, in which the end of a document that is a
        line counts as its line break, and that of others as nothing; decoders only. pairs: number of pairs,
        including those left out of the loss; encoder-decoders only.
    baselines: bits per byte of other models, by name. Decoders only.
    loss_low, loss_high: 95 % confidence interval of the loss on text like this one, by bootstrap; `None` for a text too
        short for one.
    resampled: the units of the bootstrap, as a phrase.
    documents: the loss of each document with a scored token, in order; only if asked for. Decoders on plain text only.
    """

    loss: float
    perplexity: float
    bits_per_character: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    exact_match: float | None = None
    bleu: float | None = None
    chrf: float | None = None
    tokens: int
    characters: int | None = None
    bytes: int | None = None
    pairs: int | None = None
    baselines: dict[str, float] | None = None
    loss_low: float | None = None
    loss_high: float | None = None
    resampled: str | None = None
    documents: tuple[DocumentLoss, ...] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise TinyLMError(
                "The loss is not a finite number: some weights are too large for the number format of the computation. "
                "Try `dtype` fp32."
            )

    def to_json(self) -> dict[str, Any]:
        """The metrics that are not `None`, by name, in the order of the fields, without `documents`."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None and field.name != "documents"
        }
