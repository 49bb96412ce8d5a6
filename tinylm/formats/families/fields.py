"""Fields of a config.json that several families have in common, in both directions.

RoPE is in `rope_parameters` of transformers 5, or in `rope_theta` and `rope_scaling` of transformers 4.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tinylm.config.model import FACTOR, ModelConfig, RopeScaling
from tinylm.config.validation import Range, describe_value
from tinylm.formats.foreign_config import FINITE, ForeignConfig, as_number

DEFAULT_THETA = 10_000.0
_TWO_TYPES = "must contain the objects full_attention and sliding_attention, and nothing else"
_SHARE, _MSCALE = Range(0, 1, open_low=True), Range(0, 1000)
BETA_FAST, BETA_SLOW = 32.0, 1.0  # YaRN's defaults (Peng et al. 2023)


def read_rope(config: ForeignConfig, default_theta: float = DEFAULT_THETA) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of ModelConfig. Raises ValueError, and UsageError from RopeScaling."""
    return _fields(_Parameters(_merged(config), config.file), config, default_theta, "rope_theta")


def read_partial_rope(config: ForeignConfig, head_dim: int, theta_field: str, share_field: str) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rotary_dim` of ModelConfig. Raises as `read_rope`.

    The rotated fraction of each head is `partial_rotary_factor`, else `share_field`, else 0.25. theta_field: the field
    with the RoPE base.
    """
    parameters = _Parameters(_merged(config), config.file)
    share = parameters.number("partial_rotary_factor", config.number(share_field, 0.25), _SHARE)
    fields = _fields(parameters, config, DEFAULT_THETA, theta_field)
    rotary_dim = int(head_dim * share)
    return {**fields, "rotary_dim": None if rotary_dim == head_dim else rotary_dim}


def read_rope_by_layer_type(config: ForeignConfig) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `local_rope_theta` of Gemma 3's two RoPE bases. Raises as `read_rope`."""
    merged = config.value("rope_parameters") or {}
    if not isinstance(merged, dict) or merged.keys() - {"full_attention", "sliding_attention", *_OLD_GEMMA3_FIELDS}:
        raise ValueError(f"rope_parameters of its {config.file} {_TWO_TYPES}")
    scaling = {name: value for name, value in merged.items() if name in _OLD_GEMMA3_FIELDS} | _object(
        config, "rope_scaling"
    )
    full_values, local_values = (merged.get(name) or {} for name in ("full_attention", "sliding_attention"))
    if not isinstance(full_values, dict) or not isinstance(local_values, dict):
        raise ValueError(f"rope_parameters of its {config.file} {_TWO_TYPES}")
    full, local = (_Parameters(values, config.file) for values in ({**full_values, **scaling}, local_values))
    fields = _fields(full, config, 1_000_000.0, "rope_theta")
    local_fields = _fields(local, config, DEFAULT_THETA, "rope_local_base_freq")
    if local_fields["rope_scaling"] is not None:
        raise ValueError(f"rope_parameters of its {config.file} scales the RoPE of layers with a sliding window")
    return {**fields, "local_rope_theta": local_fields["rope_theta"]}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The RoPE fields for transformers 4 and for transformers 5."""
    scaling = _write_scaling(config.rope_scaling)
    fields: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": config.rope_theta},
    }
    return {**fields, "rope_scaling": scaling} if scaling else fields


def write_rope_by_layer_type(config: ModelConfig) -> dict[str, Any]:
    """Gemma 3's RoPE fields for transformers 4 and for transformers 5: the inverse of `read_rope_by_layer_type`."""
    scaling = _write_scaling(config.rope_scaling)
    local = DEFAULT_THETA if config.local_rope_theta is None else config.local_rope_theta
    fields: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": local,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **scaling, "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }
    return {**fields, "rope_scaling": scaling} if scaling else fields


class _Parameters:
    """The values of `rope_parameters` and `rope_scaling`, merged, or of one layer type. Reading a value removes it."""

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self._values = dict(values)
        self.file = file
        kinds = [self._values.pop(name) for name in ("rope_type", "type") if name in self._values]
        self.kind = kinds[0] if kinds else "default"

    def number(self, name: str, default: float | None = None, limits: Range = FINITE) -> float:
        value = self._values.pop(name, None)
        if value is None and default is None:
            raise ValueError(f"the RoPE scaling in its {self.file} lacks {name}")
        return as_number(f"{name} of the RoPE scaling", default if value is None else value, self.file, limits)

    def reject_unless(self, name: str, allowed: Any) -> None:
        value = self._values.pop(name, None)
        if value is not None and value != allowed:
            raise ValueError(
                f"{name} of the RoPE scaling in its {self.file} is {str(value)[:60]}, which is not supported"
            )

    def check_all_read(self) -> None:
        self.reject_unless("partial_rotary_factor", 1)
        if self._values:
            raise ValueError(f"the RoPE scaling in its {self.file} has the unknown field {min(self._values)[:60]!r}")


def _object(config: ForeignConfig, name: str) -> dict[str, Any]:
    value = config.value(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} of its {config.file} is not an object")
    return value or {}


def _merged(config: ForeignConfig) -> dict[str, Any]:
    """`rope_parameters` and `rope_scaling`, merged. Raises ValueError if they differ in a key that both have."""
    new, old = _object(config, "rope_parameters"), _object(config, "rope_scaling")
    for name in new.keys() & old.keys():
        if new[name] != old[name]:
            raise ValueError(f"rope_parameters and rope_scaling of its {config.file} differ in {name[:60]!r}")
    return {**new, **old}


def _fields(parameters: _Parameters, config: ForeignConfig, default_theta: float, theta_field: str) -> dict[str, Any]:
    outer = config.number(theta_field, default_theta)
    theta = parameters.number("rope_theta", outer)
    if config.has(theta_field) and theta != outer:
        raise ValueError(f"{theta_field} of its {config.file} is {outer}, but its RoPE scaling has {theta}")
    if not isinstance(parameters.kind, str) or parameters.kind not in _SCALINGS:
        raise ValueError(
            f"its RoPE is of the type {str(parameters.kind)[:60]!r}; tinylm supports {', '.join(_SCALINGS)}"
        )
    scaling = _SCALINGS[parameters.kind](parameters, config.integer("max_position_embeddings"))
    parameters.check_all_read()
    return {"rope_theta": theta, "rope_scaling": scaling}


def _linear(parameters: _Parameters, context: int) -> RopeScaling:
    parameters.number("original_max_position_embeddings", context)  # checked only; linear scaling does not use it
    return RopeScaling(kind="linear", factor=parameters.number("factor"))


def _llama3(parameters: _Parameters, context: int) -> RopeScaling:
    return RopeScaling(
        kind="llama3",
        factor=parameters.number("factor"),
        original_context=_original_context(parameters, context),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
    )


def _yarn(parameters: _Parameters, context: int) -> RopeScaling:
    parameters.reject_unless("truncate", True)
    original = _original_context(parameters, context)
    factor = parameters.number("factor", limits=FACTOR)
    scale, scale_all = (parameters.number(name, 0.0, _MSCALE) for name in ("mscale", "mscale_all_dim"))
    both = scale and scale_all
    default = _attention_factor(factor, scale) / _attention_factor(factor, scale_all) if both else None
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_context=original,
        beta_fast=parameters.number("beta_fast", BETA_FAST),
        beta_slow=parameters.number("beta_slow", BETA_SLOW),
        attention_factor=parameters.number("attention_factor", default or _attention_factor(factor, 1.0)),
    )


def _attention_factor(factor: float, scale: float) -> float:
    """Factor of the cosines and sines: 0.1 `scale` ln(`factor`) + 1, at least 1 (Peng et al. 2023, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original_context(parameters: _Parameters, context: int) -> int:
    value = parameters.number("original_max_position_embeddings", context)
    if value != int(value) or value < 1:
        raise ValueError(
            f"original_max_position_embeddings of its {parameters.file} is {value}; it must be an integer above 0"
        )
    return int(value)


_SCALINGS: dict[str, Callable[[_Parameters, int], RopeScaling | None]] = {
    "default": lambda parameters, context: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
_ORIGINAL = "original_max_position_embeddings"  # `original_context` of RopeScaling, whose other fields have equal names
_NAMES = {  # of the scaling parameters of each kind in transformers
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
}
_OLD_GEMMA3_FIELDS = ("rope_type", "type", "factor")  # older Gemma 3 files have these next to the layer types


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {}
    fields = {
        name: getattr(scaling, "original_context" if name == _ORIGINAL else name) for name in _NAMES[scaling.kind]
    }
    return {"rope_type": scaling.kind, **fields}


# tinylm's activations by their names in transformers. All names in _TANH_GELU stand for the tanh approximation, which
# tinylm calls `gelu`; the `gelu` of transformers is exact, and tinylm calls it `gelu-exact`.
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu-exact", **dict.fromkeys(_TANH_GELU, "geglu")}
UNGATED = {"gelu": "gelu-exact", "relu": "relu", **dict.fromkeys(_TANH_GELU, "gelu")}
GATED_NAMES = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh", "geglu-exact": "gelu"}
UNGATED_NAMES = {"gelu": "gelu_new", "gelu-exact": "gelu", "relu": "relu"}

FULL, SLIDING = "full_attention", "sliding_attention"  # in `layer_types`
_DEFAULT_WINDOW = 4096  # tokens, in transformers' Qwen configs


def read_sizes(config: ForeignConfig, *, kv_heads: int | None = None, head_dim: int | None = None) -> dict[str, Any]:
    """The fields that Llama and the families derived from it share: sizes, RMSNorm epsilon, and `qk_norm` False.

    `norm` and `norm_placement` keep the defaults of ModelConfig: RMSNorm before each sublayer.

    kv_heads, head_dim: defaults of missing fields; `None` stands for the number of heads, and for width / heads. In
    every family, a null `num_key_value_heads` stands for the number of heads.

    Raises ValueError for a required field that is missing, and for invalid values.
    """
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    return {
        "vocab_size": config.integer("vocab_size"),
        "context": config.integer("max_position_embeddings"),
        "layers": config.layers(),
        "heads": heads,
        "kv_heads": config.optional_integer("num_key_value_heads", kv_heads) or heads,
        "head_dim": read_head_dim(config, width, heads, head_dim),
        "width": width,
        "ffn_width": config.integer("intermediate_size"),
        "norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "qk_norm": False,
    }


def read_head_dim(config: ForeignConfig, width: int, heads: int, default: int | None = None) -> int:
    """`head_dim` of the config, else `default`, else width / heads. Raises ValueError if that is not an integer."""
    if default is None and config.value("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size of its {config.file} is {width}; it must be a multiple of num_attention_heads")
    return config.integer("head_dim", width // heads if default is None else default)


def require_divisible_width(config: ForeignConfig) -> None:
    """Raise ValueError unless hidden_size is a multiple of the heads, as some classes of transformers require."""
    if config.integer("hidden_size") % config.integer("num_attention_heads"):
        raise ValueError(f"hidden_size of its {config.file} must be a multiple of num_attention_heads")


def write_sizes(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_sizes`, with `tie_word_embeddings`, activation and RoPE."""
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": GATED_NAMES.get(config.activation, "silu"),
        "tie_word_embeddings": config.tie,
        **write_rope(config),
    }


def read_window(config: ForeignConfig, default: int | None) -> dict[str, Any]:
    """A sliding window of `sliding_window` tokens in every layer; in none if it is null (Mistral, Mixtral)."""
    window = config.optional_integer("sliding_window", default)
    return windows(window, [SLIDING] * config.layers())


def read_optional_window(config: ForeignConfig) -> dict[str, Any]:
    """A sliding window in every layer if `use_sliding_window` is set (Qwen3-MoE)."""
    window = config.optional_integer("sliding_window", _DEFAULT_WINDOW)
    config.mark_read("max_window_layers")
    used = config.flag("use_sliding_window", False)
    return windows(window if used else None, [SLIDING] * config.layers())


def read_windows_by_layer(config: ForeignConfig) -> dict[str, Any]:
    """If `use_sliding_window` is set, a sliding window in some layers (Qwen2, Qwen3).

    The layers are those in `layer_types` or, without it, those from `max_window_layers` on.
    """
    layers = config.layers()
    window = config.optional_integer("sliding_window", _DEFAULT_WINDOW)
    if not config.flag("use_sliding_window", False):
        window = None
    first = config.integer("max_window_layers", 28, low=0)
    types = [SLIDING if window is not None and layer >= first else FULL for layer in range(layers)]
    return windows(window, read_layer_types(config, types))


def read_layer_types(config: ForeignConfig, default: list[str]) -> list[str]:
    """`layer_types`, else `default`. Raises ValueError unless it has full or sliding attention for each layer."""
    types = config.value("layer_types")
    if types is None:
        return default
    if not isinstance(types, list) or len(types) != len(default) or any(kind not in (FULL, SLIDING) for kind in types):
        raise ValueError(
            f"layer_types of its {config.file} is {describe_value(types)}; tinylm supports {FULL} and {SLIDING} for "
            "each of its layers"
        )
    return types


def windows(window: int | None, types: list[str]) -> dict[str, Any]:
    """`local_window` and `local_layers` of ModelConfig; empty if all layers have full attention.

    types: FULL or SLIDING for each layer. Without a `window`, all layers get full attention; raises ValueError if only
    some of the `types` are sliding.
    """
    local = tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)
    if window is None and len(local) not in (0, len(types)):
        raise ValueError(f"it has layers of the type {SLIDING}, but no sliding_window")
    return {"local_window": window, "local_layers": local} if window is not None and local else {}


def write_layer_types(config: ModelConfig) -> list[str]:
    """`layer_types` of a config.json."""
    return [SLIDING if layer in config.local_layers else FULL for layer in range(config.layers)]


def window_of_all_layers(config: ModelConfig) -> int | None:
    """The sliding window if all layers have it, else `None`."""
    return config.local_window if len(config.local_layers) == config.layers else None
