"""The decoding step of one sequence (one token per forward pass), compiled ahead of time and saved (decision 017).

A file contains code and no weights: it takes them from the model, and fits every model of the same shape.
"""

import copy
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tinylm
from tinylm.adapters.inject import replace_modules
from tinylm.generation.quantize import Int8Linear
from tinylm.kernels import aot_inductor, cpu_features
from tinylm.model.attention import DotProduct
from tinylm.model.decoder import Decoder
from tinylm.model.kv_cache import Cache, KVCache
from tinylm.model.linear import Linear
from tinylm.model.moe import RoutedExperts
from tinylm.model_config import ModelConfig

PACKAGE = Path(tinylm.__file__).parent
SOURCES = ("model", "kernels", "generation", "adapters/inject.py")  # modules that make or trace the compiled step
EXAMPLE_SLOTS = 5  # filled cache slots of the example input for tracing
# Independent partial sums of a dot product, which hide the latency of dependent additions, and floats per vector.
PARTIAL_SUMS, VECTOR = 4, 16


class CompiledDecoder:
    """Runs the single-token steps of one sequence through compiled code. Prefill and the first and last cache slot use
    the eager decoder.

    Implements `NextTokenModel`. `run` is the compiled step. It takes a list: ids (1, 1), a tensor (S,) whose length is
    the number of filled slots, and the keys and then the values of each layer, (1, K, L, W). It writes the token's keys
    and values into slot S - 1, and returns the logits (1, 1, V) in a list.
    """

    def __init__(self, decoder: Decoder, run: Callable[[list[Tensor]], list[Tensor]]) -> None:
        self._decoder = decoder
        self._run = run
        self._slots = torch.empty(decoder.context)  # only the length of a slice of it is read

    @property
    def context(self) -> int:
        """Context length in tokens."""
        return self._decoder.context

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._decoder.device

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[Cache]:
        """See `NextTokenModel.make_cache`. The compiled step takes a cache of the whole context."""
        return self._decoder.make_cache(batch, self.context, starts)

    def last_logits(self, ids: Tensor, cache: Sequence[Cache] | None, count: int) -> Tensor:
        """See `NextTokenModel.last_logits`: (B, T) -> (B, count, V)."""
        if ids.numel() != 1 or not cache or not 0 < cache[0].offset < self.context - 1:
            return self._decoder.last_logits(ids, cache, count)
        keys, values = _tensors(cache)
        slots = self._slots[: cache[0].offset + 1]
        (logits,) = self._run([ids, slots, *keys, *values])
        for layer in cache:
            layer.offset += 1
        return logits


def obstacle(decoder: Decoder) -> str | None:
    """Why a decoder's step cannot be compiled, or `None` if it can."""
    if decoder.device.type != "cpu":
        return f"it is for a CPU, and the model is on {decoder.device.type}"
    if decoder.embedding.weight.dtype != torch.float32:
        return 'it is for fp32 and `quantize="int8"`'
    if any(window is not None for window in decoder.windows):
        return "the model has layers with a `local_window`"
    if any(isinstance(module, RoutedExperts) for module in decoder.modules()):
        return "the model has experts, and each token uses different ones"
    if decoder.context <= EXAMPLE_SLOTS + 1:
        return f"the context of {decoder.context} tokens is too short"
    if not cpu_features.capabilities():
        return "this version of torch does not report the processor's capabilities"
    if not aot_inductor.is_available():
        return "this version of torch cannot load compiled code"
    return None


def code_file(folder: Path, config: ModelConfig, int8: bool) -> Path:
    """Where the code for models of this shape is saved.

    The name is a digest of everything the code depends on: tinylm's source, torch's version, the platform, the
    processor's capabilities, the shape, and whether the weights are int8.
    """
    shape = asdict(replace(config, dropout=0.0, attention_dropout=0.0, initialisation="modern"))
    identity = [source_digest(), torch.__version__, platform.platform(), dict(cpu_features.capabilities()), shape, int8]
    return folder / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.pt2"


def source_digest(package: Path = PACKAGE) -> str:
    """SHA-256, in hexadecimal, of the source files of the modules in `SOURCES`."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = package / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_bytes() if file.exists() else b""
            digest.update(f"{file.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def compile_decoder(decoder: Decoder, file: Path) -> None:
    """Compile the step of a decoder that was fused with `prepack=False`; see `aot_inductor.compile_package`.

    Raises TinyLMError if compiling fails.
    """
    aot_inductor.compile_package(lambda: trace(decoder), file)


def trace(decoder: Decoder) -> torch.export.ExportedProgram:
    """Export a decoder's step with a dynamic number of filled cache slots: from 2 to one less than the context."""
    keys, values = _tensors(decoder.make_cache(1, decoder.context))
    example = (torch.zeros(1, 1, dtype=torch.long), torch.empty(EXAMPLE_SLOTS), keys, values)
    slots = torch.export.Dim("slots", min=2, max=decoder.context - 1)
    static = [None] * len(keys)
    with torch.no_grad():
        return torch.export.export(_Step(decoder), example, dynamic_shapes=(None, {0: slots}, static, static))


def load_compiled(decoder: Decoder, file: Path) -> CompiledDecoder:
    """The decoder, with its step from a file that was compiled for its shape.

    Raises TinyLMError for a damaged file, after deleting it.
    """
    step = _Step(decoder)
    named = (*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False))
    return CompiledDecoder(decoder, aot_inductor.load_package(file, {name: tensor.detach() for name, tensor in named}))


class _Step(nn.Module):
    """The module that is exported: a copy of the decoder that shares its weights, with layers written for one row."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        shared = [*decoder.parameters(), *decoder.buffers()]
        self.decoder = copy.deepcopy(decoder, {id(tensor): tensor for tensor in shared})
        if self.decoder.output is None:
            self.decoder.output = Linear(1, 1, bias=False)
            self.decoder.output.weight = self.decoder.embedding.weight
        replace_modules(self.decoder, _is_linear, lambda _, module: GemvLinear(module))
        replace_modules(self.decoder, _is_core, lambda _, module: GemvAttention(module))

    def forward(self, ids: Tensor, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """ids (1, 1), slots (S,), keys and values of each layer (1, K, L, W) -> logits (1, 1, V)"""
        cache = [_Slots(*layer, slots.shape[0]) for layer in zip(keys, values, strict=True)]
        return self.decoder.logits(self.decoder(ids, cache).hidden)


class _Slots:
    """A view of one layer's cache for one step: `filled` slots, the last of them for the token of this step.

    Implements `Cache`, except for `reorder` and `rewind`, which a step does not call.
    """

    starts = None

    def __init__(self, keys: Tensor, values: Tensor, filled: int) -> None:
        self._keys, self._values = keys[:, :, :filled], values[:, :, :filled]  # (1, K, S, W) each
        self.offset = filled - 1

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._keys[:, :, -1:] = keys
        self._values[:, :, -1:] = values
        return self._keys, self._values

    def reorder(self, rows: Tensor) -> None:
        raise NotImplementedError

    def rewind(self, tokens: int) -> None:
        raise NotImplementedError


class GemvLinear(nn.Module):
    """x W^T + b for one row, written as products and sums: the compiler fuses them with their neighbours, and reads W
    in its stored format.

    Takes the weights of an `nn.Linear` or an `Int8Linear`.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        for name in ("weight", "scale", "bias"):
            tensor = getattr(linear, name, None)
            self.register_buffer(name, None if tensor is None else tensor.detach())
        self.sums = PARTIAL_SUMS if self.weight.shape[1] % (PARTIAL_SUMS * VECTOR) == 0 else 1

    def forward(self, x: Tensor) -> Tensor:
        """(1, 1, in) -> (1, 1, out)"""
        padding = self.weight.shape[1] - x.shape[-1]
        x = F.pad(x, (0, padding)) if padding else x
        products = _computed_once(x).unsqueeze(-2) * self.weight.to(x.dtype)  # (1, 1, out, in)
        y = products.unflatten(-1, (self.sums, -1)).sum(dim=-2).sum(dim=-1)  # (1, 1, out)
        y = y if self.scale is None else y * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


class GemvAttention(nn.Module):
    """`DotProduct` for one query, written as products and sums for the compiler to fuse."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        assert isinstance(core, DotProduct)
        self.scale = core.scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """q (1, H, 1, W), k and v (1, K, S, W) -> (1, H, 1, W). The query attends to all S slots."""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        q = _computed_once(q * scale).unflatten(1, (k.shape[1], -1))  # (1, K, H/K, 1, W)
        weights = (q * k.unsqueeze(2)).sum(dim=-1).softmax(dim=-1)  # (1, K, H/K, S)
        summed = (_computed_once(weights).unsqueeze(-1) * v.unsqueeze(2)).sum(dim=-2, keepdim=True)
        return summed.flatten(1, 2)  # (1, H, 1, W)


def _computed_once(x: Tensor) -> Tensor:
    """x, through a no-op that makes the compiler store x, instead of computing it again for each output."""
    return x.as_strided(x.shape, x.stride())


def _is_linear(_: str, module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Linear, Int8Linear)


def _is_core(_: str, module: nn.Module) -> bool:
    return type(module) is DotProduct


def _tensors(cache: Sequence[Cache]) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's keys and values, unfilled slots included."""
    keys, values = [], []
    for layer in cache:
        assert isinstance(layer, KVCache)
        keys.append(layer.keys)
        values.append(layer.values)
    return keys, values
