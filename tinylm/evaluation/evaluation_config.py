"""Settings of evaluations: the options of `tinylm eval`."""

from dataclasses import dataclass
from typing import Annotated

from tinylm.config.training import BATCH, SEEDS
from tinylm.config.validation import Panel, Range, Setting, check_fields
from tinylm.generation.generation_config import BeamSearchConfig

BLEU_TOKENIZERS = ("13a", "none", "intl", "char", "zh")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(BeamSearchConfig):
    """How a model is evaluated. Raises UsageError for a value out of range.

    batch_size: windows, conversations or pairs per forward pass. Default: 8,192 // tokens of a window, at least 1.
    sequence_length: tokens of a window. Default: the context.
    stride: also report the loss in windows that overlap, and advance by this number of tokens, at most their length.
        Default: only the usual loss, in windows that do not overlap.
    baselines: also report the bits per byte of gzip, xz and PPMd.
    beams, length_penalty: see BeamSearchConfig.
    bleu_tokenize: tokenizer of sacrebleu's BLEU. Default: 13a.

    `sequence_length`, `stride` and `baselines` are for decoders on plain text, `beams`, `length_penalty`
    and `bleu_tokenize` for encoder-decoders.
    """

    batch_size: Annotated[
        int | None,
        Setting("Windows, conversations or pairs per forward pass; affects speed and memory only.", None, BATCH),
    ] = None
    sequence_length: Annotated[
        int | None,
        Setting(
            "Tokens per window (default: the context of the model).", None, Range(1, 1 << 24), jobs="text distillation"
        ),
    ] = None
    stride: Annotated[
        int | None,
        Setting(
            "Also the loss in overlapping windows that advance by N tokens, with more context per token.",
            None,
            Range(1, 1 << 20),
            jobs="text distillation",
        ),
    ] = None
    baselines: Annotated[bool, Setting("Compare with gzip, xz and PPMd.", None, jobs="text distillation")] = False
    bleu_tokenize: Annotated[
        str | None,
        Setting(
            "sacrebleu tokenizer (default: 13a); none if the text is already tokenised.",
            Panel.ENCODER_DECODER,
            BLEU_TOKENIZERS,
            jobs="pairs",
        ),
    ] = None


@dataclass(frozen=True)
class MemorisationConfig:
    """Settings of a memorisation test. Lengths are in characters, so that they mean the same with any tokenizer.

    num_samples: number of samples, and largest number of passages of the training text and of held-out text to
        continue.
    sample_length: length of each sample and continuation.
    prefix_length: length of the text before a continuation.
    min_match: least length of a verbatim match.
    temperature: softmax temperature; 1 samples from the distribution that the model was trained for.
    seed: random seed of the samples and of the choice of passages.

    Raises UsageError for a value out of range, and for matches longer than the samples.
    """

    num_samples: Annotated[
        int,
        Setting(
            "Number of samples, and of passages to continue from each text.",
            Panel.MEMORISATION,
            Range(1, 1 << 16),
        ),
    ] = 50
    sample_length: Annotated[
        int,
        Setting("Characters of each sample and continuation.", Panel.MEMORISATION, Range(10, 1 << 20)),
    ] = 500
    prefix_length: Annotated[int, Range(1, 1 << 20)] = 100
    min_match: Annotated[
        int,
        Setting("Minimum length of a verbatim match in characters.", Panel.MEMORISATION, Range(5, 1 << 20)),
    ] = 50
    temperature: Annotated[
        float,
        Setting("Softmax temperature of the samples; 0 is greedy.", Panel.MEMORISATION, Range(0, 100)),
    ] = 1.0
    seed: Annotated[int, Setting("Random seed of samples and passages.", Panel.MEMORISATION, SEEDS)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
