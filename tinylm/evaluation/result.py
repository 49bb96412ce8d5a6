"""The result of an evaluation."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from tinylm.errors import TinyLMError


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of a model on a text; those that do not exist for the architecture are `None`.

    Raises TinyLMError if the loss is not a finite number.

    loss: mean negative log-likelihood in nats per token. perplexity: exp(loss).
    bits_per_character, bits_per_byte: the same loss in bits per character and per byte of the text. Decoders only, and
        only if the scored tokens encode any text.
    accuracy: fraction of the masked tokens that have the largest logit. Encoders only.
    exact_match, bleu, chrf: agreement of the targets found by beam search with the references: fraction of equal ones,
        and sacrebleu's BLEU and chrF (`None` without sacrebleu). Encoder-decoders only.
    tokens: number of scored tokens. characters, bytes, pairs: size of the text.
    baselines: bits per byte of other models, by name. Decoders only.
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

    def __post_init__(self) -> None:
        if not math.isfinite(self.loss):
            raise TinyLMError(
                "The loss is not a finite number: some weights are too large for the number format of the computation. "
                "Try `dtype` fp32."
            )

    def to_json(self) -> dict[str, Any]:
        """The metrics that are not `None`, by name, in the order of the fields."""
        return {
            field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name)) is not None
        }
