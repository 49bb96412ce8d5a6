"""Settings of generation: the options of `tinylm sample` and `chat`.

In the Python API, the default `seed` is 0 and not random.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from tinylm.config.training import SEEDS
from tinylm.config.validation import FRACTION, Panel, Range, Setting, check_fields, require

DEFAULT_TEMPERATURE = 0.8  # of a decoder
MAX_TOKENS = Range(1, 2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How a token is sampled from logits, without a default temperature. Raises UsageError for a value out of range."""

    temperature: Annotated[
        float | None,
        Setting(
            "Softmax temperature: lower is more conservative, 0 is greedy (default: 0.8; pairs: beam search).",
            Panel.SAMPLING,
            Range(0, 100),  # above 100, sampling is almost uniform
            flags=("--temperature", "-t"),
        ),
    ] = None
    top_k: Annotated[
        int,
        Setting(
            "Sample from the K most likely tokens only; 0: all.",
            Panel.SAMPLING,
            Range(0, 2**31 - 1),
            metavar="K",
            flags=("--top-k", "-k"),
        ),
    ] = 0
    top_p: Annotated[
        float,
        Setting(
            "Nucleus sampling: the most likely tokens with total probability P.",
            Panel.SAMPLING,
            Range(0, 1, open_low=True),
            metavar="P",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Setting(
            "Drop tokens less than P times as likely as the most likely one.", Panel.SAMPLING, FRACTION, metavar="P"
        ),
    ] = 0.0
    repeat_penalty: Annotated[
        float, Setting("Above 1, tokens already in the context become less likely.", Panel.SAMPLING, Range(0.001, 1000))
    ] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SamplingConfig(SamplingSettings):
    """How a token is sampled from logits. Raises UsageError for a value out of range.

    temperature: softmax temperature; 0 is greedy.
    top_k: keep the k most likely tokens; 0 is off.
    top_p: keep the smallest set of most likely tokens of at least this total probability (nucleus sampling); 1 is off.
    min_p: keep tokens with at least this fraction of the most likely token's probability; 0 is off.
    repeat_penalty: above 1, tokens that occur in the context window become less likely; 1 is off.
    """

    temperature: float = DEFAULT_TEMPERATURE


@dataclass(frozen=True, kw_only=True)
class BeamSearchConfig:
    """Settings of beam search. Raises UsageError for a value out of range.

    beams: beam width. length_penalty: exponent of the length normalisation; higher prefers longer targets.
    """

    beams: Annotated[int, Setting("Beam width.", Panel.ENCODER_DECODER, Range(1, 256), jobs="pairs")] = 5
    length_penalty: Annotated[
        float,
        Setting(
            "Exponent of the length normalisation; higher favours longer targets.",
            Panel.ENCODER_DECODER,
            Range(-10, 10),
            jobs="pairs",
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The inference engine. Raises UsageError for another value.

    engine: auto, torch or llama.cpp. auto uses llama.cpp on a CPU if it is installed and can run the model. Both
        engines have their own random streams.
    """

    engine: Annotated[
        str,
        Setting(
            "Inference engine; auto: llama.cpp on a CPU wherever it can run the model, else torch.",
            Panel.MACHINE,
            ("auto", "torch", "llama.cpp"),
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class SpeedConfig(EngineSettings):
    """Settings that change the speed of generation and not the text, except for rounding.

    engine: see EngineSettings. cache: use the KV cache.
    """

    cache: Annotated[bool, Setting("Use the KV cache; --no-cache is slow, for comparison.", Panel.MACHINE)] = True


@dataclass(frozen=True, kw_only=True)
class PromptPolicy:
    """How to treat characters that are not in the vocabulary, and prompts longer than the context.

    unknown: for characters that are not in the vocabulary: error, or skip, which drops them.
    strict: raise an error for a prompt longer than the context, instead of cutting it with a warning.

    Raises UsageError for another value of `unknown`.
    """

    unknown: Annotated[
        str, Setting("Characters outside the vocabulary: an error, or skipped.", Panel.PROMPT, ("error", "skip"))
    ] = "error"
    strict: Annotated[
        bool,
        Setting("Fail if a prompt is longer than the context (default: truncate it, with a warning).", Panel.PROMPT),
    ] = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class GenerationConfig(PromptPolicy, SpeedConfig, BeamSearchConfig, SamplingSettings):
    """How text is generated for one prompt. Raises UsageError for a value out of range, for an empty `stop`, for
    `stop` with `json_schema`, and as `json_grammar`.

    max_tokens: maximum number of generated tokens per sample.
    num_samples: samples per prompt, generated as one batch.
    temperature: softmax temperature; 0 is greedy. Default: 0.8 for a decoder. An encoder-decoder uses beam search
        if the temperature is 0 or not given.
    top_k, top_p, min_p, repeat_penalty: see SamplingConfig. beams, length_penalty: see BeamSearchConfig.
    unknown, strict: see PromptPolicy. cache, engine: see SpeedConfig.
    stop: stop sequences; the text ends before the first one that occurs.
    logprobs: number of the likeliest tokens per position whose log-probabilities are recorded; 0 is off.
    json_schema: a JSON Schema. The text is JSON that it admits; see `JSONSampler`.
    seed: random seed. Each sample has its own random stream; see `Sampler`.
    """

    max_tokens: Annotated[
        int,
        Setting(
            "Length of each sample: at most N tokens; -N is the number of samples.",
            Panel.TEXT,
            MAX_TOKENS,
            flags=("--max-tokens", "-n"),
        ),
    ] = 256
    num_samples: Annotated[
        int,
        Setting(
            "Samples per prompt, generated as one batch.", Panel.TEXT, Range(1, 1 << 16), flags=("--num-samples", "-N")
        ),
    ] = 1
    stop: tuple[str, ...] = ()
    logprobs: Annotated[
        int,
        Setting(
            "With --json, record each token's log-probability and those of the N likeliest; 0: none.",
            Panel.TEXT,
            Range(0, 100),
        ),
    ] = 0
    json_schema: Mapping[str, Any] | None = None
    seed: Annotated[int, SEEDS] = 0

    def __post_init__(self) -> None:
        check_fields(self, without=("stop",))
        require("" not in self.stop, "`stop` is empty; give the text to stop at, or leave it out.")
        require(not self.stop or self.json_schema is None, "`stop` would cut the JSON of `json_schema`; leave it out.")
        if self.json_schema is not None:
            from tinylm.generation.json_schema import json_grammar

            json_grammar(self.json_schema)

    @property
    def speed(self) -> SpeedConfig:
        """The engine and the cache. Torch generates JSON of a schema: raises UsageError if llama.cpp is required."""
        require(self.json_schema is None or self.engine != "llama.cpp", '`json_schema` needs `engine="torch"`.')
        return SpeedConfig(engine=self.engine if self.json_schema is None else "torch", cache=self.cache)

    def sampling(self, default_temperature: float) -> SamplingConfig:
        """The settings of the sampler, with `default_temperature` if no temperature is given."""
        temperature = default_temperature if self.temperature is None else self.temperature
        settings = {field.name: getattr(self, field.name) for field in fields(SamplingSettings)}
        return SamplingConfig(**settings | {"temperature": temperature})


def is_sampled(config: GenerationConfig) -> bool:
    """Whether an encoder-decoder samples its targets, instead of finding them by beam search."""
    return config.temperature is not None and config.temperature > 0


def settings_without_effect(architecture: str, sampled: bool) -> Sequence[tuple[tuple[str, ...], str]]:
    """Groups of settings that an architecture ignores, each with the reason as a clause for error messages.

    sampled: as `is_sampled` returns it.
    """
    beam_search, of_decoders = ("beams", "length_penalty"), ("cache", "engine", "logprobs", "json_schema")
    match architecture:
        case "decoder":
            return [(beam_search, "Beam search is for encoder-decoder models, and this model continues a prompt")]
        case "encoder":
            sampling = ("temperature", "top_p", "min_p", "repeat_penalty", "max_tokens", "num_samples", "stop")
            reason = "An encoder fills all masks at once, each with its most likely token"
            return [((*sampling, *beam_search, *of_decoders), reason)]
        case _:
            reason = "A target is generated by torch with the cache, and printed when it is complete"
            always = (of_decoders, reason)
            if sampled:
                return [always, (beam_search, "With a `temperature` above 0, targets are sampled, without beam search")]
            search_ignores = ("top_k", "top_p", "min_p", "repeat_penalty", "num_samples")
            reason = "With no `temperature` above 0, targets are found by beam search, without sampling"
            return [always, (search_ignores, reason)]
