"""`ForeignConfig` reads the fields of a foreign config file, checks type and range, and records which were read.

`check_all_read` and `check_others` report fields that were not read and may have an effect, so that no part of a model
is ignored silently. All errors are ValueErrors with a reason that completes a sentence such as "Cannot import PATH: ".
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from tinylm.config.model import LAYERS, VOCABULARY
from tinylm.config.validation import MAX_COUNT, Range, describe_value
from tinylm.errors import UsageError

T = TypeVar("T")
_REQUIRED: Final = object()
MAX_NAMED = 3  # unknown fields in a message
MAX_INTEGER = int(VOCABULARY.high)  # the largest size in ModelConfig, which has a limit for each size
FINITE = Range(-MAX_COUNT, MAX_COUNT)  # also excludes larger numbers, which no config has

# Fields of any family that do not change the logits of a given text: bookkeeping, training, and defaults of generation.
WITHOUT_EFFECT = frozenset(
    {
        # Bookkeeping. The ids of BOS, EOS and padding are read with the tokenizer.
        *("model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "name_or_path"),
        "_commit_hash",
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("tokenizer_class", "task_specific_params", "finetuning_task", "transformers.js_config", "is_llama_config"),
        *("unsloth_version", "unsloth_fixed", "prefix", "id2label", "label2id", "num_labels", "_num_labels"),
        "problem_type",
        # Outputs and implementation of the forward pass.
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward", "pretraining_tp", "is_decoder"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "cache_implementation"),
        "_flash_attn_2_enabled",
        *("_experts_implementation", "experts_implementation", "gradient_checkpointing"),
        # Training.
        *("initializer_range", "attention_dropout", "hidden_dropout", "classifier_dropout", "attn_pdrop"),
        *("embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise"),
        # Generation.
        *("do_sample", "max_length", "max_new_tokens", "min_length", "temperature", "top_k", "top_p", "typical_p"),
        *("repetition_penalty", "length_penalty", "diversity_penalty", "num_beams", "num_beam_groups"),
        *("num_return_sequences", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "early_stopping"),
        *("exponential_decay_length_penalty", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id"),
        *("begin_suppress_tokens", "suppress_tokens", "remove_invalid_values", "output_scores"),
        "return_dict_in_generate",
    }
)
# Fields of any family that are accepted with these values only.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False, None),
    "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
}


@contextlib.contextmanager
def refused(reason: str) -> Iterator[None]:
    """Context manager that turns a UsageError into a ValueError, which begins with the reason."""
    try:
        yield
    except UsageError as error:
        raise ValueError(f"{reason}: {error}".replace("`", "").rstrip(".")) from error


class ForeignConfig:
    """The values of a config file. Unless noted at a method, the default replaces a missing or null field.

    A field that is missing or null and has no default is a ValueError. file: the name of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = values
        self.file = file
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """The value of a field, not checked; `None` for a missing field. Records the field as read."""
        self._read.add(name)
        return self._values.get(name)

    def mark_read(self, name: str) -> None:
        """Record a field as read, whose value does not change the logits of this model."""
        self._read.add(name)

    def has(self, name: str) -> bool:
        """Whether there is a field of this name, null or not."""
        return name in self._values

    def integer(self, name: str, default: Any = _REQUIRED, low: int = 1, high: int = MAX_INTEGER) -> int:
        """An integer from `low` to `high`. Raises ValueError for any other value. The default is checked as well."""
        value = self._given(name, default)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(self._wrong(name, value, f"an integer from {low} to {high}"))
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        """An integer from 1, or `None` for null; the default replaces a missing field only. Raises ValueError."""
        if not self.has(name):
            return default
        return None if self.value(name) is None else self.integer(name)

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number of magnitude up to 2^53. Raises ValueError for any other value."""
        return as_number(name, self._given(name, default), self.file)

    def layers(self, name: str = "num_hidden_layers") -> int:
        """The number of layers, at most ModelConfig's limit: readers make lists of this length. Raises ValueError."""
        return self.integer(name, high=int(LAYERS.high))

    def flag(self, name: str, default: bool) -> bool:
        """A boolean. Raises ValueError for any other value."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise ValueError(self._wrong(name, value, "true or false"))
        return value

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """The entry of `choices` for the value. Raises ValueError for a value that is not a key of `choices`."""
        value = self._given(name, default)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(self._wrong(name, value, f"one of {', '.join(choices)}"))
        return choices[value]

    def require(self, name: str, *allowed: Any) -> None:
        """Raise ValueError if the field exists and no `allowed` value has the same type and is equal."""
        if self.has(name):
            value = self.value(name)
            if not any(type(value) is type(other) and value == other for other in allowed):
                raise ValueError(self._wrong(name, value, " or ".join(map(json.dumps, allowed))))

    def check_all_read(self, without_effect: frozenset[str]) -> None:
        """Raise ValueError for `auto_map`, values that NEUTRAL_VALUES does not allow, and other fields not read so far.

        Fields in `without_effect` and in WITHOUT_EFFECT need not be read.
        """
        if self.has("auto_map"):
            raise ValueError(f"its {self.file} asks for Python code of its own (auto_map), which tinylm never runs")
        for name, allowed in NEUTRAL_VALUES.items():
            self.require(name, *allowed)
        self.check_others(without_effect | WITHOUT_EFFECT)

    def check_others(self, without_effect: frozenset[str]) -> None:
        """Raise ValueError for a field that was not read and is not in `without_effect`."""
        unknown = sorted(self._values.keys() - self._read - without_effect)
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            names = ", ".join(repr(name[:60]) for name in unknown[:MAX_NAMED])
            raise ValueError(f"its {self.file} has fields that tinylm does not know: {names}{more}")

    def _given(self, name: str, default: Any) -> Any:
        value = self.value(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"its {self.file} lacks {name}")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> str:
        return f"{name} of its {self.file} is {describe_value(value)}; tinylm supports {expected}"


def as_number(name: str, value: Any, file: str, limits: Range = FINITE) -> float:
    """The value as a float within `limits`. Raises ValueError, naming the field and the file, for anything else."""
    if type(value) not in (int, float) or not limits.contains(value):
        expected = "a finite number of magnitude up to 2^53" if limits == FINITE else f"a number {limits}"
        raise ValueError(f"{name} of its {file} is {describe_value(value)}; it must be {expected}")
    return float(value)
