"""Settings of generation. Names and defaults are those of `tinylm sample`, except that its default `seed` is random."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinylm.config.validation import check_choice, check_numbers, require
from tinylm.errors import UsageError

DEFAULT_TEMPERATURE = 0.8  # of a decoder
JSON_WHITESPACE = r"[ \n]{1,20}"  # between the parts of the JSON; an untrained model would go on with it without end


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is sampled from logits. Raises UsageError for a value out of range.

    temperature: softmax temperature; 0 is greedy.
    top_k: keep the k most likely tokens; 0 is off.
    top_p: keep the smallest set of most likely tokens of at least this total probability (nucleus sampling); 1 is off.
    min_p: keep tokens with at least this fraction of the most likely token's probability; 0 is off.
    repeat_penalty: above 1, tokens that occur in the prompt or the generated text become less likely; 1 is off.
    """

    temperature: float = DEFAULT_TEMPERATURE
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(vars(self))


@dataclass(frozen=True)
class GenerationConfig:
    """How text is generated for one prompt. Raises UsageError for a value out of range, for an empty `stop`, for
    `stop` with `json_schema`, and as `json_grammar`.

    max_tokens: maximum number of generated tokens per sample.
    num_samples: samples per prompt, generated as one batch.
    temperature: softmax temperature; 0 is greedy. Default: 0.8 for a decoder. An encoder-decoder uses beam search
        if the temperature is 0 or not given.
    top_k, top_p, min_p, repeat_penalty: see SamplingConfig.
    stop: stop sequences; the text ends before the first one that occurs.
    logprobs: number of the likeliest tokens per position whose log-probabilities are recorded; 0 is off.
    json_schema: a JSON Schema. The text is JSON that it admits; see `JSONSampler`.
    seed: random seed. Each sample has its own random stream; see `Sampler`.
    """

    max_tokens: int = 256
    num_samples: int = 1
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    logprobs: int = 0
    json_schema: Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(vars(self))
        require("" not in self.stop, "`stop` is empty; give the text to stop at, or leave it out.")
        require(not self.stop or self.json_schema is None, "`stop` would cut the JSON of `json_schema`; leave it out.")
        if self.json_schema is not None:
            json_grammar(self.json_schema)

    def sampling(self, default_temperature: float) -> SamplingConfig:
        """The settings of the sampler, with `default_temperature` if no temperature is given."""
        temperature = default_temperature if self.temperature is None else self.temperature
        return SamplingConfig(temperature, self.top_k, self.top_p, self.min_p, self.repeat_penalty)


@dataclass(frozen=True)
class BeamSearchConfig:
    """Settings of beam search. Raises UsageError for a value out of range.

    beams: beam width. length_penalty: exponent of the length normalisation; higher prefers longer targets.
    """

    beams: int = 5
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_numbers(vars(self))


@dataclass(frozen=True)
class SpeedConfig:
    """Settings that change the speed of generation and not the text, except for rounding.

    engine: auto, torch or llama.cpp. auto uses llama.cpp on a CPU if it is installed and can run the model. Both
        engines have their own random streams.
    cache: use the KV cache.

    Raises UsageError for another value.
    """

    cache: bool = True
    engine: str = "auto"

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ("auto", "torch", "llama.cpp"))

    def for_json(self) -> "SpeedConfig":
        """The settings with which JSON of a schema is generated. Raises UsageError if llama.cpp is required."""
        require(self.engine != "llama.cpp", '`json_schema` needs `engine="torch"`.')
        return replace(self, engine="torch")


@dataclass(frozen=True)
class PromptPolicy:
    """How to treat characters that are not in the vocabulary, and prompts longer than the context.

    unknown: for characters that are not in the vocabulary: error, or skip, which drops them.
    strict: raise an error for a prompt longer than the context, instead of cutting it with a warning.

    Raises UsageError for another value of `unknown`.
    """

    unknown: str = "error"
    strict: bool = False

    def __post_init__(self) -> None:
        check_choice("unknown", self.unknown, ("error", "skip"))


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of llguidance for a JSON Schema.

    Raises UsageError for a schema that is invalid, admits nothing, or has what llguidance does not support.
    """
    import llguidance

    messages: Sequence[str]
    try:
        text = json.dumps({**schema, "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}})
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    except (ValueError, RecursionError) as error:
        is_wrong, messages = True, [str(error)]
    if is_wrong:
        raise UsageError(f"`json_schema` cannot be used: {' '.join(messages[0].split())}.")
    return grammar


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
