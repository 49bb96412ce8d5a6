"""Settings of an evaluation, with the names and defaults of `tinylm eval`."""

from dataclasses import dataclass

from tinylm.config.validation import check_choice, check_numbers
from tinylm.errors import UsageError

BLEU_TOKENIZERS = ("13a", "none", "intl", "char", "zh")
# The settings that only one architecture uses.
SETTINGS_BY_ARCHITECTURE = {
    "decoder": ("sequence_length", "stride", "baselines", "by_document"),
    "encoder": (),
    "encoder-decoder": ("beams", "length_penalty", "bleu_tokenize"),
}


@dataclass(frozen=True)
class EvaluationConfig:
    """How a model is evaluated. Raises UsageError for a value out of range.

    batch_size: windows, conversations or pairs per forward pass. Default: 8,192 // tokens of a window, at least 1.
    sequence_length: tokens of a window. Default: the context.
    stride: tokens by which the window advances, at most its length. Default: its length.
    baselines: also report the bits per byte of gzip, xz and an order-5 character model.
    by_document: also report the loss of each document.
    beams, length_penalty: see BeamSearchConfig.
    bleu_tokenize: tokenizer of sacrebleu's BLEU. Default: 13a.

    `sequence_length`, `stride`, `baselines` and `by_document` are for decoders on plain text, `beams`, `length_penalty`
    and `bleu_tokenize` for encoder-decoders.
    """

    batch_size: int | None = None
    stride: int | None = None
    baselines: bool = False
    beams: int = 5
    length_penalty: float = 1.0
    bleu_tokenize: str | None = None
    sequence_length: int | None = None
    by_document: bool = False

    def __post_init__(self) -> None:
        check_numbers(vars(self))
        if self.bleu_tokenize is not None:
            check_choice("bleu_tokenize", self.bleu_tokenize, BLEU_TOKENIZERS)

    def check_architecture(self, architecture: str) -> None:
        """Raise UsageError for a setting that differs from its default and has no effect on the architecture."""
        for other, names in SETTINGS_BY_ARCHITECTURE.items():
            given = [f"`{name}`" for name in names if getattr(self, name) != getattr(EvaluationConfig, name)]
            if given and other != architecture:
                raise UsageError(f"{', '.join(given)} is for {other} models; leave it out.")
