"""Fields of a config.json that several families have in common, in both directions."""

from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.config.validation import describe_value
from tinylm.formats.families.rope_fields import write_rope
from tinylm.formats.foreign_config import ForeignConfig

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
