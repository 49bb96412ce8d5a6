"""A decoder as one HTML file, which generates text in any browser, without a network.

The file has the weights, the tokenizer and `page/decoder.js`, a decoder that is written to be read. Matrices have 8
bits per number, with a scale for each row, or are halves or floats.
"""

import base64
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinylm import __version__
from tinylm.config.model import GATED_ACTIVATIONS, ModelConfig
from tinylm.config.run import DataConfig
from tinylm.config.validation import require
from tinylm.errors import UsageError
from tinylm.generation.prompts import encode_conversation, start_tokens
from tinylm.system.html import encode_json, security_policy
from tinylm.text.chat import Conversation
from tinylm.text.chat_format import ChatFormat, without_marks
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.build import rope_rotation

FOLDER = Path(__file__).parent / "page"
DTYPES = ("int8", "f16", "f32")
MAX_BYTES = 300 << 20  # of the weights: the longest string of a browser has 512 MB
ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "geglu-exact": "gelu-exact"}  # others have the same name
MARK = b'<meta name="generator" content="tinylm">'  # near the beginning of every page


def require_representable(config: ModelConfig, tokenizer: Tokenizer, name: str) -> None:
    """Raise UsageError for a model that the page cannot run."""
    refused = {
        f"is an {config.architecture}": config.architecture != "decoder",
        "is a classifier": bool(config.labels),
        "has relative positions": config.position == "relative",
        "has merged experts": config.experts > 1 and config.expert_mode == "merge",
        "has a tokenizer of another kind than characters and byte-level BPE": tokenizer.kind == "other",
    }
    reasons = [reason for reason, applies in refused.items() if applies]
    require(not reasons, f"{name} {reasons[0] if reasons else ''}, which the page cannot run; choose another `to`.")


def round_weights(tensors: Mapping[str, Tensor], config: ModelConfig, dtype: str) -> "dict[str, Encoded]":
    """The tensors of the page by name: matrices in this number format, and vectors in fp32.

    Raises UsageError for more than MAX_BYTES.
    """
    encoded = {}
    for name, tensor in tensors.items():
        is_gain = config.norm_unit_offset and name.endswith("norm.weight")
        encoded[name] = Encoded(tensor.float() + 1 if is_gain else tensor.float(), dtype if tensor.dim() > 1 else "f32")
    size = sum(len(tensor.data) for tensor in encoded.values())
    is_small = size <= MAX_BYTES
    require(is_small, f"The page would have {size / 1e6:,.0f} MB of weights; choose a smaller `dtype`, or `to` gguf.")
    return encoded


def rounded_tensors(weights: "Mapping[str, Encoded]", config: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a model that computes with the numbers of the page."""
    offset = 1 if config.norm_unit_offset else 0
    return {name: encoded.tensor - (offset if name.endswith("norm.weight") else 0) for name, encoded in weights.items()}


class Encoded:
    """A tensor of the page. Of 8-bit rows, its bytes are the scales in fp32 and then the integers."""

    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self.shape, self.dtype = list(tensor.shape), dtype
        if dtype == "int8":
            self.scale = tensor.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127  # (R, 1)
            self.numbers = (tensor / self.scale).round().to(torch.int8)
        else:
            self.scale, self.numbers = torch.ones(()), tensor.to({"f16": torch.float16, "f32": torch.float32}[dtype])

    @functools.cached_property
    def data(self) -> bytes:
        """The bytes of the tensor."""
        scale = self.scale.numpy().astype("<f4").tobytes() if self.dtype == "int8" else b""
        return scale + self.numbers.numpy().tobytes()

    @property
    def tensor(self) -> Tensor:
        """The tensor that the page computes with, in fp32."""
        return self.numbers.float() * self.scale


def model_values(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The sizes and the kinds of layers of the model, by their names in decoder.js. config: as in `render_web_page`"""
    rope = None
    if config.position == "rope":
        rotated = config.rotary_dim or config.head_dim
        usual = rope_rotation(rotated, config.rope_theta, config.rope_scaling)
        local = usual if config.local_rope_theta is None else rope_rotation(rotated, config.local_rope_theta)
        of_layers = [local if layer in config.local_layers else usual for layer in range(config.layers)]
        rope = [{"frequencies": r.frequencies.tolist(), "magnitude": r.magnitude} for r in of_layers]
    return {
        "context": config.context,
        "tokens": tokenizer.vocab_size,
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "kvHeads": config.kv_heads,
        "headDim": config.head_dim,
        "scale": config.attention_multiplier,
        "windows": [config.local_window if layer in config.local_layers else None for layer in range(config.layers)],
        "position": config.position,
        "rope": rope,
        "norm": config.norm,
        "epsilon": config.norm_epsilon,
        "placement": config.norm_placement,
        "qkNorm": config.qk_norm,
        "residual": config.residual,
        "parallel": config.parallel_residual,
        "activation": ACTIVATIONS.get(config.activation, config.activation),
        "gated": config.activation in GATED_ACTIVATIONS,
        "experts": config.experts,
        "expertsPerToken": config.experts_per_token,
        "normaliseShares": config.normalise_top_k,
        "embeddingScale": config.embedding_scale,
    }


def tokenizer_values(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokens by id, the merges of BPE, and the ids of special tokens."""
    spec = json.loads(tokenizer.to_str())
    tokens = [""] * tokenizer.vocab_size
    for token, i in spec["model"]["vocab"].items():
        tokens[i] = token
    special = []
    for added in spec["added_tokens"]:
        tokens[added["id"]] = added["content"]
        special.append(added["id"])
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in spec["model"]["merges"]]
    return {"tokens": tokens, "merges": merges if tokenizer.kind == "bpe" else None, "special": special}


def chat_values(format: ChatFormat, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the chat template writes around the messages of a user, in the first turn and in later ones, and what ends
    an answer. Raises UsageError for a template whose turns are not written one after the other.
    """
    names = ["\ue000question\ue000", "\ue000answer\ue000", "\ue000next\ue000", "\ue000reply\ue000", "\ue000last\ue000"]
    messages = [{"role": ("user", "assistant")[i % 2], "content": name} for i, name in enumerate(names)]
    whole = without_marks(format.prompt(Conversation(tuple(messages))))
    pieces, rest = [], whole
    for name in names:
        before, found, rest = rest.partition(name)
        if not found:
            break
        pieces.append(before)
    one = without_marks(format.prompt(Conversation(tuple(messages[:1]))))
    is_regular = len(pieces) == len(names) and pieces[2] == pieces[4] and pieces[1] == pieces[3] == rest
    if not is_regular or one != pieces[0] + names[0] + pieces[1]:
        raise UsageError("The chat template does not write its turns one after the other; choose another `to`.")
    encoded = encode_conversation(Conversation(({"role": "user", "content": "a"},)), format, tokenizer)
    return {
        "first": [pieces[0], pieces[1]],
        "next": [pieces[2], pieces[3]],
        "stops": sorted(encoded.end_ids),
        "end": encoded.end_texts[0] if encoded.end_texts else None,
    }


def render_web_page(
    name: str,
    config: ModelConfig,
    tokenizer: Tokenizer,
    data: DataConfig | None,
    weights: "Mapping[str, Encoded]",
    format: ChatFormat | None,
) -> str:
    """The HTML of the page.

    config: with all defaults filled in (`tinylm.formats.families.resolve`). data: the training text, if it is recorded.
    format: of a chat model
    """
    tensors, blob = {}, bytearray()
    for key, tensor in weights.items():
        tensors[key] = {"shape": tensor.shape, "format": tensor.dtype, "offset": len(blob)}
        blob += tensor.data
    parameters = sum(torch.Size(tensor.shape).numel() for tensor in weights.values())
    values = {
        "name": name,
        "about": f"A language model of {parameters:,} parameters, trained with tinylm {__version__}. "
        "It is in this file, and computes on this device.",
        "config": model_values(config, tokenizer),
        "tokenizer": tokenizer_values(tokenizer),
        "tensors": tensors,
        "stops": sorted(tokenizer.stop_ids),
        "before": [] if tokenizer.bos_id is None else [tokenizer.bos_id],
        "start": start_tokens(tokenizer, data, [], config.context),
        "kept": tokenizer.start_id,
        "chat": None if format is None else chat_values(format, tokenizer),
    }
    style, decoder, page = ((FOLDER / file).read_text("utf-8") for file in ("page.css", "decoder.js", "page.js"))
    return (
        (FOLDER / "page.html")
        .read_text("utf-8")
        .format(
            policy=security_policy([style], [decoder, page]),
            style=style,
            data=encode_json(values),
            weights=base64.b64encode(blob).decode(),
            decoder=decoder,
            page=page,
        )
    )
