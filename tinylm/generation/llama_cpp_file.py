"""The choice between torch and llama.cpp as the engine of a decoder, and the GGUF file for llama.cpp (decision 025)."""

import contextlib
import copy
from dataclasses import dataclass
from pathlib import Path

from tinylm.adapters.adapter import Adapter, Replacement, adapter_layers
from tinylm.adapters.lora import LoRAEmbedding, LoRALinear, merge_lora
from tinylm.config.run import RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.family import ForeignModel
from tinylm.formats.gguf_reader import open_gguf
from tinylm.formats.gguf_writer import write_gguf
from tinylm.generation.generation_config import SpeedConfig
from tinylm.generation.llama_cpp import (
    CHECKSUMS,
    GGUF_FOLDER,
    LAYOUT,
    LlamaCpp,
    import_llama_cpp,
    record_checksums,
    take_cached,
)
from tinylm.reporter import Reporter
from tinylm.run_directory.weights import digest
from tinylm.system.cache_directory import private_folder
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder, Transformer

GGUF_TYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
MERGEABLE = (LoRALinear, LoRAEmbedding, Replacement)
SMALLEST_CONTEXT = 4
MAX_CACHED_BYTES = 8 << 30  # of all files; the newest one is kept whatever its size


@dataclass(frozen=True)
class EngineWeights:
    """A model to convert for llama.cpp.

    kind: GGUF type of the matrices: f32, f16, bf16 or q8_0
    quantized: the GGUF file that the model was opened from, whose quantized tensors are copied unchanged, or `None`
    switches_adapters: whether adapters are selected per prompt
    """

    network: Transformer
    config: RunConfig
    tokenizer: Tokenizer
    kind: str
    quantized: Path | None
    switches_adapters: bool


def open_llama_cpp(weights: EngineWeights, speed: SpeedConfig, reporter: Reporter) -> LlamaCpp | None:
    """The model in llama.cpp, or `None` if torch is to be used. The GGUF file is written to the cache at first use.

    With `speed.engine` "llama.cpp", raises UsageError if llama.cpp cannot run this model with these settings, and
    TinyLMError if the GGUF file cannot be written or opened. With auto, returns `None` in these cases; a TinyLMError is
    reported as a warning.
    """
    required = speed.engine == "llama.cpp"
    if speed.engine == "torch":
        return None
    reason = reason_against(weights, speed)
    if reason is None:
        try:
            file = convert(weights, reporter)
            rows = weights.network.vocab_size
            return LlamaCpp(file, weights.network.context, weights.tokenizer.vocab_size, rows, is_exact(weights))
        except UsageError as error:
            reason = str(error).removesuffix(".")
        except TinyLMError as error:
            if required:
                raise
            reporter.warn(f"llama.cpp is not used: {error}")
    if required:
        raise UsageError(f'`engine="llama.cpp"` is not possible: {reason}; leave it out.')
    return None


def is_exact(weights: EngineWeights) -> bool:
    """Whether all weights of the converted file have 32 bits."""
    return weights.kind == "f32" and weights.quantized is None


def reason_against(weights: EngineWeights, speed: SpeedConfig) -> str | None:
    """Why llama.cpp cannot be used, as a clause for error messages; `None` if it can."""
    network = weights.network
    if not isinstance(network, Decoder):
        return "it is for decoders"
    if network.device.type != "cpu":
        return f"it is for a CPU, and the model is on {network.device.type}"
    if not speed.cache:
        return "it needs the cache"
    if network.context < SMALLEST_CONTEXT:
        return f"it is for contexts of at least {SMALLEST_CONTEXT} tokens"
    if weights.switches_adapters:
        return "prompts choose their adapters"
    layers = adapter_layers(network).values()
    if any(not isinstance(layer, MERGEABLE) for layer in layers):
        return "the model has a bottleneck adapter, which cannot be merged"
    if any(isinstance(layer.base, Adapter) for layer in layers):
        return "a module of the model has several adapters"
    if import_llama_cpp() is None:
        return "the package xllamacpp is not installed, or cannot be loaded on this machine"
    return None


def _merged(network: Transformer) -> Transformer:
    """The network, or a copy with its adapters merged at their scales."""
    if not adapter_layers(network):
        return network
    merged = copy.deepcopy(network)
    merge_lora(merged)
    return merged


def convert(weights: EngineWeights, reporter: Reporter) -> Path:
    """The GGUF file of the model in the user's cache, written if it does not exist; tokens are numbers of their ids.

    The name has a digest of weights, configuration and tokenizer, and the type of the weights ("own" if they are copied
    from `weights.quantized`). Raises UsageError for a model that GGUF cannot represent, and TinyLMError if the file
    cannot be written or `weights.quantized` cannot be read.
    """
    folder, config, tokenizer = private_folder(GGUF_FOLDER), weights.config, weights.tokenizer
    tensors = _merged(weights.network).state_dict()
    identity = digest(tensors, config, step=LAYOUT, val_loss=None)[:32]  # no step: another layout is another file
    suffix = "own" if weights.quantized else weights.kind
    file = folder / f"{identity}-{suffix}.gguf"
    if take_cached(file):
        return file
    if file.exists():
        reporter.warn(f"{file.name} in the cache is damaged, or others can write to it; it is written again.")
    reporter.note("Converting the model for llama.cpp, once...")
    model = ForeignModel(config.family, config.model, tensors, tokenizer.to_str(), tokenizer.special, None)
    try:
        quantized = open_gguf(weights.quantized) if weights.quantized else None
    except (OSError, ValueError) as error:  # the file has changed since the model was opened
        raise TinyLMError(f"Cannot read {weights.quantized}: {error}.") from error
    write_gguf(file, model, weights.kind, quantized=quantized, end_id=tokenizer.end_of_text_id)
    try:
        record_checksums(file)
    except OSError as error:
        raise TinyLMError(f"Cannot write {file.with_suffix(CHECKSUMS)}: {error.strerror}.") from error
    _delete_oldest(folder)
    return file


def _delete_oldest(folder: Path) -> None:
    """Delete the least recently used files above MAX_CACHED_BYTES in total."""
    cached = (file for suffix in ("gguf", "json") for file in folder.glob(f"*.{suffix}"))
    found = []
    for file in cached:
        with contextlib.suppress(OSError):  # another process deletes files, too
            found.append((file.stat(), file))
    total = 0
    for number, (status, file) in enumerate(sorted(found, key=lambda item: item[0].st_mtime, reverse=True)):
        total += status.st_size
        if number and total > MAX_CACHED_BYTES:
            with contextlib.suppress(OSError):
                file.unlink()
                file.with_suffix(CHECKSUMS).unlink(missing_ok=True)
