"""A decoder's step, a token of one text, compiled ahead of time by torch's AOTInductor and kept on disk (decision 017).

What is kept is code alone: it takes its weights from the model, and serves every model of the same shape.
"""

import copy
import hashlib
import json
import platform
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tinylm
from tinylm.adapters.inject import replace_modules
from tinylm.compiler import prepare_compiler
from tinylm.config import ModelConfig
from tinylm.errors import TinyLMError
from tinylm.inference.quantize import Int8Linear
from tinylm.model.attention import DotProduct
from tinylm.model.cache import Cache, KVCache
from tinylm.model.decoder import Decoder
from tinylm.model.linear import Linear
from tinylm.model.moe import RoutedExperts

PACKAGE = Path(tinylm.__file__).parent
SOURCES = ("model", "inference", "adapters/inject.py")  # of all that makes or traces a compiled step
EXAMPLE_SLOTS = 5  # of the step that is traced
SUMS, VECTOR = 4, 16  # side by side, of so many numbers: a sum waits for its last addition
OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.precompile_headers": False,  # which are not worth their time for one file
    "always_keep_tensor_constants": True,  # short ones would else be written into the code
    "cpp.dynamic_threads": True,  # as many as torch has at the time
}


class CompiledDecoder:
    """A decoder that has one text's tokens from compiled code, but for a prompt and a window's first and last slot.

    The generator takes it in the decoder's place. `run` maps ids (1, 1), slots (S,), and each layer's keys and values
    (1, K, L, W), to logits (1, 1, V), in a list, and puts the token's keys and values into slot S - 1.
    """

    def __init__(self, decoder: Decoder, run: Callable[[list[Tensor]], list[Tensor]]) -> None:
        self._decoder = decoder
        self._run = run
        self._slots = torch.empty(decoder.context)  # only its shape is read

    @property
    def context(self) -> int:
        return self._decoder.context

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[Cache]:
        return self._decoder.make_cache(batch, length, starts)

    def last_logits(self, ids: Tensor, cache: Sequence[Cache] | None, count: int) -> Tensor:
        """(B, T) -> (B, count, V)"""
        if ids.numel() != 1 or not cache or not 0 < cache[0].offset < self.context - 1:
            return self._decoder.last_logits(ids, cache, count)
        keys, values = _tensors(cache)
        slots = self._slots[: cache[0].offset + 1]
        (logits,) = self._run([ids, slots, *keys, *values])
        for layer in cache:
            layer.offset += 1
        return logits


def obstacle(decoder: Decoder) -> str | None:
    """Why a decoder's step cannot be compiled, if it cannot."""
    if decoder.device.type != "cpu":
        return f"it is for a CPU, and the model is on {decoder.device.type}"
    if decoder.embedding.weight.dtype != torch.float32:
        return "it is for fp32 and --quantize int8"
    if any(window is not None for window in decoder.windows):
        return "layers with --local-window forget, and compiled code does not"
    if any(isinstance(module, RoutedExperts) for module in decoder.modules()):
        return "its experts are chosen anew for every token"
    if decoder.context <= EXAMPLE_SLOTS + 1:
        return f"a context of {decoder.context} is too short"
    if not _processor():
        return "this version of torch does not say which processor this is"
    return None


def code_file(folder: Path, config: ModelConfig, int8: bool) -> Path:
    """Where the code for models of this shape lies, on a processor like this."""
    shape = asdict(replace(config, dropout=0.0, attention_dropout=0.0, initialisation="modern"))
    identity = [source_digest(), torch.__version__, platform.platform(), dict(_processor()), shape, int8]
    return folder / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.pt2"


def source_digest(package: Path = PACKAGE) -> str:
    """SHA-256 of the source of the modules that a compiled step is traced from."""
    digest = hashlib.sha256()
    for source in SOURCES:
        path = package / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_bytes() if file.exists() else b""
            digest.update(f"{file.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def compile_decoder(decoder: Decoder, file: Path) -> None:
    """Compile an arranged decoder's step, in some tens of seconds; `file` appears when it is complete.

    Raises TinyLMError where that fails.
    """
    unfinished = file.with_name(f"{file.stem}.{secrets.token_hex(4)}.tmp.pt2")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"Cannot keep compiled code in {file.parent}: {error.strerror}. Set TINYLM_CACHE to another folder."
        raise TinyLMError(message) from error
    prepare_compiler()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's about itself
            import torch._inductor

            torch._inductor.aoti_compile_and_package(
                trace(decoder), package_path=str(unfinished), inductor_configs=OPTIONS
            )
        unfinished.chmod(0o600)
        unfinished.replace(file)
    except Exception as error:  # a compiler fails in ways of its own
        raise TinyLMError(f"Compiling failed ({_reason(error)}); --compile off does without.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def trace(decoder: Decoder) -> torch.export.ExportedProgram:
    """A decoder's step as a graph, for any number of slots but those that are the decoder's own."""
    keys, values = _tensors(decoder.make_cache(1, decoder.context))
    example = (torch.zeros(1, 1, dtype=torch.long), torch.empty(EXAMPLE_SLOTS), keys, values)
    slots = torch.export.Dim("slots", min=2, max=decoder.context - 1)
    whole = [None] * len(keys)
    with torch.no_grad():
        return torch.export.export(_Step(decoder), example, dynamic_shapes=(None, {0: slots}, whole, whole))


def load_compiled(decoder: Decoder, file: Path) -> CompiledDecoder:
    """A decoder by code that was compiled for its shape. Raises TinyLMError for a damaged file, which it removes."""
    try:
        # What torch._inductor.aoti_load_package returns holds one of these, and takes two seconds to import.
        package = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", False, 1, -1)
        step = _Step(decoder)
        named = (*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False))
        weights = {name: tensor.detach() for name, tensor in named}
        package.load_constants({name: weights[name] for name in package.get_constant_fqns()}, False, True, True)
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        file.unlink(missing_ok=True)
        message = f"{file} could not be loaded ({_reason(error)}), and was removed; --compile on compiles anew."
        raise TinyLMError(message) from error
    return CompiledDecoder(decoder, package.run)


class _Step(nn.Module):
    """What is compiled: the decoder, for one row, with the same weights."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        held = [*decoder.parameters(), *decoder.buffers()]
        self.decoder = copy.deepcopy(decoder, {id(tensor): tensor for tensor in held})
        if self.decoder.output is None:
            self.decoder.output = Linear(1, 1, bias=False)
            self.decoder.output.weight = self.decoder.embedding.weight
        replace_modules(self.decoder, _is_product, lambda _, module: _RowProduct(module))
        replace_modules(self.decoder, _is_core, lambda _, module: _RowAttention(module))

    def forward(self, ids: Tensor, slots: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """(1, 1), (S,), and each layer's (1, K, L, W) -> (1, 1, V)"""
        cache = [_Slots(*layer, slots.shape[0]) for layer in zip(keys, values, strict=True)]
        return self.decoder.logits(self.decoder(ids, cache).hidden)


class _Slots:
    """A layer's cache of which `filled` slots are used, the last of them by the token that is computed. A step neither
    reorders rows nor takes tokens back.
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


class _RowProduct(nn.Module):
    """x W^T + b for one row, as a sum: a compiler puts what is around it into the same loop, and reads W as it lies."""

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        for name in ("weight", "scale", "bias"):
            held = getattr(linear, name, None)
            self.register_buffer(name, None if held is None else held.detach())
        self.padding = linear.padding if isinstance(linear, Int8Linear) else 0
        self.sums = SUMS if self.weight.shape[1] % (SUMS * VECTOR) == 0 else 1

    def forward(self, x: Tensor) -> Tensor:
        """(1, 1, in) -> (1, 1, out)"""
        x = F.pad(x, (0, self.padding)) if self.padding else x
        products = _once(x).unsqueeze(-2) * self.weight.to(x.dtype)  # (1, 1, out, in)
        y = products.unflatten(-1, (self.sums, -1)).sum(dim=-2).sum(dim=-1)  # (1, 1, out)
        y = y if self.scale is None else y * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


class _RowAttention(nn.Module):
    """`DotProduct` for one query."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        assert isinstance(core, DotProduct)
        self.scale = core.scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """(1, H, 1, W) and two of (1, K, S, W) -> (1, H, 1, W)"""
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        q = _once(q * scale).unflatten(1, (k.shape[1], -1))  # (1, K, H/K, 1, W)
        weights = (q * k.unsqueeze(2)).sum(dim=-1).softmax(dim=-1)  # (1, K, H/K, S)
        return (_once(weights).unsqueeze(-1) * v.unsqueeze(2)).sum(dim=-2, keepdim=True).flatten(1, 2)  # (1, H, 1, W)


def _once(x: Tensor) -> Tensor:
    """x, which a compiler then computes once, and not again wherever it is used."""
    return x.as_strided(x.shape, x.stride())


def _is_product(_: str, module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Linear, Int8Linear)


def _is_core(_: str, module: nn.Module) -> bool:
    return type(module) is DotProduct


def _tensors(cache: Sequence[Cache]) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's keys and values, with the room that is not filled yet."""
    keys, values = [], []
    for layer in cache:
        assert isinstance(layer, KVCache)
        keys.append(layer.keys)
        values.append(layer.values)
    return keys, values


def _processor() -> Mapping[str, object]:
    """What it can do, as newer versions of torch can tell: code is compiled for just that."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__
