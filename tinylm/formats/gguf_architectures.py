"""The architectures of GGUF files: how their metadata corresponds to Hugging Face's configs.

llama.cpp's code for each architecture: https://github.com/ggml-org/llama.cpp, src/models. All errors are ValueErrors
with a reason that completes the sentence "Cannot read PATH as GGUF: ".
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinylm.config.model import ModelConfig, RopeScaling
from tinylm.errors import UsageError
from tinylm.formats.gguf_file import Metadata, TensorInfo
from tinylm.formats.gguf_tensors import TENSOR_RULES, TensorRule

MAX_LAYERS = 1 << 14
DEFAULT_THETA = 10_000.0  # RoPE base of files without rope.freq_base
LOCAL_THETA = 10_000.0  # RoPE base of Gemma 3's layers with a sliding window
GEMMA3_PERIOD = 6  # every sixth layer has full attention, the others a sliding window
GEMMA3_LAYERS_OF_27B = 62  # the only size whose attention scores are not divided by sqrt(head_dim)
ROPE_FACTORS = "rope_freqs.weight"  # tensor with the divisors of Llama 3's RoPE frequencies
LLAMA3_CONTEXT = 8192  # tokens; original context of Llama 3, which RoPE scaling extends
ROPE_TOLERANCE = 1e-4  # relative, of RoPE divisors

# Keys that change nothing with these values. Unless the architecture reads the key, any other value is an error that
# names it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "tensor_data_layout": ("Meta AI original pth",),  # RoPE feature order of all llama files
}
_WITHOUT_EFFECT = ("vocab_size", "rope.scaling.finetuned")  # any value is accepted

Values = dict[str, Any]  # metadata by key: bool, int, float or str


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture of GGUF.

    name: value of general.architecture. families: the values of `model_type` (config.json) that it represents.
    read_config: converts the metadata to the fields of a Hugging Face config.json.
    extra_metadata: values for keys that not every architecture has.
    ignores_windows: llama.cpp computes full attention in all layers, even if the file has a sliding window.
    """

    name: str
    families: tuple[str, ...]
    read_config: Callable[["ConfigReader"], dict[str, Any]]
    extra_metadata: Callable[[ModelConfig], Values] = lambda config: {}
    ignores_windows: bool = False

    def write_metadata(self, config: ModelConfig) -> Values:
        """The metadata of a resolved configuration (`families.resolve`), by keys with this architecture's prefix.

        Settings that the metadata cannot represent are lost; gguf_model.py reads the metadata again to detect them.
        """
        values = _common_metadata(config) | self.extra_metadata(config)
        return {f"{self.name}.{key}": value for key, value in values.items()}

    def places(self, layers: int, experts: int) -> Iterator[TensorRule]:
        """Yield the rule of each tensor that a model with this number of layers and experts may have.

        experts: 0 for models without experts.
        """
        for rule in TENSOR_RULES[self.name]:
            indices = itertools.product(
                ("weight", "bias"),
                range(layers if "{layer}" in rule.foreign else 1),
                range(experts) if "{expert}" in rule.foreign else [None],
            )
            for kind, layer, expert in indices:
                stored, foreign = (f"{name.format(layer=layer, expert=expert)}.{kind}" for name in rule[:2])
                yield TensorRule(stored, foreign, rule.change, expert)


class ConfigReader(Metadata):
    """The metadata of one architecture, by keys without its prefix, and the tensors of the file.

    load: reads the tensor of a name in the file.
    """

    def __init__(
        self, metadata: Metadata, prefix: str, tensors: Mapping[str, TensorInfo], load: Callable[[str], Tensor]
    ) -> None:
        super().__init__(metadata.values, f"{prefix}.")
        self.tensors, self.load = tensors, load

    def any_tensor(self, *endings: str) -> bool:
        """Whether any layer has a tensor whose name ends with one of `endings`."""
        return any(name.startswith("blk.") and name.endswith(endings) for name in self.tensors)

    def check_all_read(self) -> None:
        """Raise ValueError for a key of this architecture that was not read and may change the logits."""
        for name, allowed in _NEUTRAL.items():
            if self.key(name) in self.unread():
                self.require(name, *allowed)
        self.ignore(*_WITHOUT_EFFECT)
        if unknown := self.unread():
            raise ValueError(f"its metadata has the key {unknown[0]!r}, which tinylm does not know")


# Metadata to config.


def _size(reader: ConfigReader) -> dict[str, int]:
    """The sizes that every architecture has, under tinylm's names: vocab_size, context, layers, width and heads.

    vocab_size is the number of rows of the embedding.
    """
    embedding = reader.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ValueError("it has no tensor token_embd.weight with two dimensions")
    width, heads = reader.integer("embedding_length"), reader.layers_integer("attention.head_count")
    if heads > width or (width % heads and "attention.key_length" not in reader):
        raise ValueError(f"its {reader.key('attention.head_count')} is {heads}, which does not divide {width}")
    return {
        "vocab_size": embedding.shape[0],
        "context": reader.integer("context_length"),
        "layers": reader.integer("block_count", high=MAX_LAYERS),
        "width": width,
        "heads": heads,
    }


def _decoder(reader: ConfigReader) -> dict[str, Any]:
    """The config.json fields that all architectures except gpt2 and gptneox share."""
    size = _size(reader)
    head_dim = reader.integer("attention.key_length", size["width"] // size["heads"])
    reader.require("attention.value_length", head_dim)
    reader.require("rope.dimension_count", head_dim)
    return {
        "vocab_size": size["vocab_size"],
        "max_position_embeddings": size["context"],
        "num_hidden_layers": size["layers"],
        "hidden_size": size["width"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": reader.layers_integer("attention.head_count_kv", size["heads"]),
        "head_dim": head_dim,
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.number("rope.freq_base", DEFAULT_THETA),
        "rope_scaling": _rope_scaling(reader, size["context"]),
        "tie_word_embeddings": "output.weight" not in reader.tensors,
    }


def _feedforward(reader: ConfigReader) -> dict[str, Any]:
    return {"intermediate_size": reader.layers_integer("feed_forward_length"), "hidden_act": "silu"}


def _llama(reader: ConfigReader) -> dict[str, Any]:
    config = _decoder(reader) | _feedforward(reader)
    config["rope_scaling"] = config["rope_scaling"] or _llama3_scaling(reader, config)
    experts = reader.integer("expert_count", 0, low=0)
    window = reader.integer("attention.sliding_window", 0, low=0) or None
    if experts:
        reader.require("expert_feed_forward_length", config["intermediate_size"])
        used = reader.integer("expert_used_count")
        return config | {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": used,
            "sliding_window": window,
        }
    if window:
        return config | {"model_type": "mistral", "sliding_window": window}
    return config | {
        "model_type": "llama",
        "attention_bias": reader.any_tensor(".attn_q.bias", ".attn_k.bias", ".attn_v.bias", ".attn_output.bias"),
        "mlp_bias": reader.any_tensor(".ffn_gate.bias", ".ffn_up.bias", ".ffn_down.bias"),
    }


def _qwen2(reader: ConfigReader) -> dict[str, Any]:
    config = _decoder(reader) | _feedforward(reader)
    reader.require("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    return config | {"model_type": "qwen2", "use_sliding_window": False}


def _qwen3(reader: ConfigReader) -> dict[str, Any]:
    fixed = {"model_type": "qwen3", "attention_bias": False, "use_sliding_window": False}
    return _decoder(reader) | _feedforward(reader) | fixed


def _qwen3moe(reader: ConfigReader) -> dict[str, Any]:
    used = reader.integer("expert_used_count")
    ffn_width = reader.layers_integer("feed_forward_length", used)  # only for dense layers; not in every file
    width_of_expert = reader.integer("expert_feed_forward_length", ffn_width // used)
    return _decoder(reader) | {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": used,
        "intermediate_size": ffn_width,
        "moe_intermediate_size": width_of_expert,
        "norm_topk_prob": reader.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(reader: ConfigReader) -> dict[str, Any]:
    config = _decoder(reader) | _feedforward(reader)
    del config["hidden_act"]
    return config | {
        "model_type": "gemma",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,  # llama.cpp reads no output layer
    }


def _gemma3(reader: ConfigReader) -> dict[str, Any]:
    config = _gemma(reader)
    window = reader.integer("attention.sliding_window", 0, low=0)
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    is_local = _local_layers(reader, layers) if window else [False] * layers
    is_27b = layers == GEMMA3_LAYERS_OF_27B
    return config | {
        "model_type": "gemma3_text",
        "tie_word_embeddings": "output.weight" not in reader.tensors,
        "layer_types": ["sliding_attention" if local else "full_attention" for local in is_local],
        "sliding_window": window or None,
        "rope_local_base_freq": reader.number("rope.freq_base_swa", LOCAL_THETA),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else head_dim,
    }


def _local_layers(reader: ConfigReader, layers: int) -> list[bool]:
    key = "attention.sliding_window_pattern"
    if key not in reader:
        return [layer % GEMMA3_PERIOD != GEMMA3_PERIOD - 1 for layer in range(layers)]
    pattern = reader.numbers(key)
    if len(pattern) != layers or pattern.dtype.kind == "f":
        raise ValueError(f"its {reader.key(key)} does not have a boolean for each of {layers} layers")
    return [bool(local) for local in pattern]


def _gpt2(reader: ConfigReader) -> dict[str, Any]:
    size = _size(reader)
    reader.require("attention.head_count_kv", size["heads"])
    return {
        "model_type": "gpt2",
        "vocab_size": size["vocab_size"],
        "n_positions": size["context"],
        "n_embd": size["width"],
        "n_layer": size["layers"],
        "n_head": size["heads"],
        "n_inner": reader.layers_integer("feed_forward_length"),
        "layer_norm_epsilon": reader.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
        "tie_word_embeddings": "output.weight" not in reader.tensors,
    }


def _gptneox(reader: ConfigReader) -> dict[str, Any]:
    size = _size(reader)
    heads, head_dim = size["heads"], size["width"] // size["heads"]
    reader.require("attention.head_count_kv", heads)
    reader.require("attention.key_length", head_dim)
    reader.require("attention.value_length", head_dim)
    rotated = reader.integer("rope.dimension_count", head_dim, high=head_dim)
    return {
        "model_type": "gpt_neox",
        "vocab_size": size["vocab_size"],
        "max_position_embeddings": size["context"],
        "hidden_size": size["width"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": heads,
        "intermediate_size": reader.layers_integer("feed_forward_length"),
        "layer_norm_eps": reader.number("attention.layer_norm_epsilon"),
        # Published models use the exact GELU, llama.cpp the tanh approximation. The metadata has no key for it.
        "hidden_act": "gelu",
        "rotary_pct": rotated / head_dim,
        "rotary_emb_base": reader.number("rope.freq_base", DEFAULT_THETA),
        "rope_scaling": _rope_scaling(reader, size["context"]),
        "use_parallel_residual": reader.flag("use_parallel_residual"),
        "attention_bias": True,
        "tie_word_embeddings": False,  # llama.cpp needs an output layer
    }


# RoPE scaling.


def _rope_scaling(reader: ConfigReader, context: int) -> dict[str, Any] | None:
    kind = reader.text("rope.scaling.type", "linear")  # llama.cpp's default
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"its {reader.key('rope.scaling.type')} is {kind!r}; tinylm supports none, linear and yarn")
    for name, neutral in {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0}.items():
        reader.require(f"rope.scaling.{name}", neutral)
    reader.require("rope.scaling.yarn_log_multiplier", 0.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": reader.integer("rope.scaling.original_context_length", context),
        "beta_fast": reader.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": reader.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def llama3_factors(scaling: RopeScaling, theta: float, head_dim: int) -> Tensor:
    """Llama 3's divisors of the RoPE frequencies, as in llama.cpp's converter: float32, (head_dim / 2,).

    The formula: Llama 3.1's `apply_scaling`, https://github.com/meta-llama/llama-models.
    """
    assert scaling.original_context is not None
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).float()


def _llama3_scaling(reader: ConfigReader, config: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling parameters, reconstructed from the divisors in the file; `None` if all are 1 or there are none.

    Raises ValueError for a tensor of another shape, and for divisors that do not follow Llama 3's formula.
    """
    if ROPE_FACTORS not in reader.tensors:
        return None
    theta, head_dim = config["rope_theta"], config["head_dim"]
    if head_dim % 2 or reader.tensors[ROPE_FACTORS].shape != (head_dim // 2,):
        raise ValueError(f"its tensor {ROPE_FACTORS} does not have the {head_dim // 2} numbers that RoPE needs")
    divisors = reader.load(ROPE_FACTORS).double()
    if bool((divisors == 1).all()):
        return None
    if bool((divisors > 0).all()) and math.isfinite(largest := float(divisors.max())):
        factor = round(largest, 4)  # stored as float32
        with contextlib.suppress(UsageError):  # parameters that are out of range
            for scaling in _llama3_candidates(divisors, factor, theta, head_dim):
                if torch.allclose(llama3_factors(scaling, theta, head_dim).double(), divisors, rtol=ROPE_TOLERANCE):
                    return {
                        "rope_type": "llama3",
                        "factor": scaling.factor,
                        "low_freq_factor": scaling.low_freq_factor,
                        "high_freq_factor": scaling.high_freq_factor,
                        "original_max_position_embeddings": scaling.original_context,
                    }
    raise ValueError(f"its tensor {ROPE_FACTORS} has other RoPE divisors than Llama 3's formula gives")


def _llama3_candidates(divisors: Tensor, factor: float, theta: float, head_dim: int) -> Iterator[RopeScaling]:
    """Yield `factor` with Llama 3's other parameters and, given two divisors between 1 and it, a fit to those.

    divisors: float64, (head_dim / 2,). Raises UsageError for parameters that are out of range.
    """
    yield RopeScaling(kind="llama3", factor=factor, original_context=LLAMA3_CONTEXT)
    # For divisors between 1 and factor, smooth = (context / wavelength - low) / (high - low), which is linear in
    # 1 / wavelength. Only the ratios of context, low and high matter, so low is set to 1.
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    between = (divisors > 1 + ROPE_TOLERANCE) & (divisors < factor * (1 - ROPE_TOLERANCE))
    if int(between.sum()) < 2:
        return
    smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    periods = 1 / wavelengths[between]  # per token
    slope = float((smooth[0] - smooth[-1]) / (periods[0] - periods[-1]))  # context / (high - low)
    intercept = float(slope * periods[0] - smooth[0])  # low / (high - low)
    if slope > 0 and intercept > 0 and math.isfinite(slope / intercept) and slope / intercept < 1 << 40:
        high = round(1 + 1 / intercept, 3)
        if high > 1 and round(slope / intercept):
            yield RopeScaling(
                kind="llama3", factor=factor, high_freq_factor=high, original_context=round(slope / intercept)
            )


# Config to metadata.


def _common_metadata(config: ModelConfig) -> Values:
    epsilon = "attention.layer_norm_rms_epsilon" if config.norm == "rmsnorm" else "attention.layer_norm_epsilon"
    metadata: Values = {
        "vocab_size": config.vocab_size,
        "context_length": config.context,
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.ffn_width,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        epsilon: config.norm_epsilon,
    }
    if config.position == "rope":
        metadata |= {
            "rope.freq_base": config.rope_theta,
            "rope.dimension_count": config.rotary_dim or config.head_dim,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        } | _scaling_metadata(config.rope_scaling)
    if config.local_window:
        metadata["attention.sliding_window"] = config.local_window
    if config.experts > 1:
        metadata |= {"expert_count": config.experts, "expert_used_count": config.experts_per_token}
        metadata["expert_feed_forward_length"] = config.ffn_width
    return metadata


def _scaling_metadata(scaling: RopeScaling | None) -> Values:
    if scaling is None or scaling.kind == "llama3":  # llama3 scaling is stored as the tensor ROPE_FACTORS
        return {}
    metadata: Values = {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
    if scaling.original_context is not None:
        metadata["rope.scaling.original_context_length"] = scaling.original_context
    if scaling.kind == "yarn":
        metadata["rope.scaling.yarn_beta_fast"] = scaling.beta_fast
        metadata["rope.scaling.yarn_beta_slow"] = scaling.beta_slow
    return metadata


_TABLE = (
    Architecture(name="llama", families=("llama", "mistral", "mixtral"), read_config=_llama, ignores_windows=True),
    Architecture(name="qwen2", families=("qwen2",), read_config=_qwen2),
    Architecture(name="qwen3", families=("qwen3",), read_config=_qwen3),
    Architecture(name="qwen3moe", families=("qwen3_moe",), read_config=_qwen3moe),
    Architecture(name="gpt2", families=("gpt2",), read_config=_gpt2),
    Architecture(
        name="gptneox",
        families=("gpt_neox",),
        read_config=_gptneox,
        extra_metadata=lambda config: {"use_parallel_residual": config.parallel_residual},
    ),
    Architecture(name="gemma", families=("gemma",), read_config=_gemma),
    Architecture(name="gemma3", families=("gemma3_text",), read_config=_gemma3),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _TABLE}
BY_FAMILY = {family: architecture for architecture in _TABLE for family in architecture.families}
