"""Whether to generate with compiled code, to load it or compile it first, and the fallback (decision 017)."""

import time
from dataclasses import dataclass
from pathlib import Path

from tinylm.adapters.adapter import adapter_layers
from tinylm.cache_directory import is_private, private_folder
from tinylm.device import can_compile
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.compiled_decoder import CompiledDecoder, code_file, compile_decoder, load_compiled, obstacle
from tinylm.generation.fuse_layers import fuse_model
from tinylm.model.decoder import Decoder
from tinylm.model.stack import Transformer
from tinylm.model_config import ModelConfig
from tinylm.reporter import Reporter

# Minimum number of tokens for which compiling, or loading compiled code, saves time.
MIN_TOKENS_TO_COMPILE = 100_000
MIN_TOKENS_TO_LOAD = 128


@dataclass(frozen=True)
class Workload:
    """How much is to be generated.

    tokens: of all prompts together. num_samples: the largest batch of samples of one prompt. cache: with the KV cache.
    switches_adapters: whether adapters are selected between prompts.
    """

    tokens: int
    num_samples: int = 1
    cache: bool = True
    switches_adapters: bool = False


def choose_code(
    model: Transformer, config: ModelConfig, dtype: str, compile: str, workload: Workload, *, int8: bool
) -> Path | None:
    """The file of the compiled code to generate with, which may not exist yet; `None` to generate without.

    dtype: the format that the model will be converted to. compile: auto, on or off.

    Raises UsageError if `compile` is on and the model or the workload rules out compiled code.
    """
    # int8 code rounds differently from the eager model, so its use must not depend on whether a file exists.
    threshold = MIN_TOKENS_TO_COMPILE if int8 else MIN_TOKENS_TO_LOAD
    if compile == "off" or (compile == "auto" and workload.tokens < threshold):
        return None
    reason = _reason_against(model, dtype, workload)
    if reason is None:
        try:
            file = code_file(private_folder("compiled"), config, int8)
        except TinyLMError as error:
            reason = str(error).removesuffix(".")
        else:
            worth_compiling = compile == "on" or workload.tokens >= MIN_TOKENS_TO_COMPILE
            if is_private(file) or (worth_compiling and can_compile("cpu")):
                return file
            reason = "there is no C++ compiler"
    if compile == "on":
        raise UsageError(f'`compile="on"` is not possible: {reason}; leave it out.')
    return None


def _reason_against(model: Transformer, dtype: str, workload: Workload) -> str | None:
    """Why a model or a workload rules out compiled code, or `None`."""
    if not isinstance(model, Decoder):
        return "it is for decoders"
    if workload.num_samples > 1:
        return "it is for one sample at a time"
    if not workload.cache:
        return "it needs the cache"
    if adapter_layers(model):
        return "the model has an adapter; merge the adapter into the model"
    if dtype != "fp32" and model.device.type == "cpu":
        return 'it is for fp32 and `quantize="int8"`'
    return obstacle(model)


def fuse_and_compile(
    model: Transformer, file: Path | None, *, int8: bool, required: bool, reporter: Reporter
) -> CompiledDecoder | None:
    """Fuse the model in place, with `int8` also quantize it, and load its compiled step from `file`, if one is given.

    A file that does not exist is compiled first. If compiling or loading fails, raises TinyLMError where compiled code
    is `required`; otherwise warns and returns `None`, and the fused model generates without compiled code.
    """
    fuse_model(model, int8, prepack=file is None)
    if file is None:
        return None
    assert isinstance(model, Decoder)
    try:
        if not is_private(file):
            reporter.note("Compiling the decoding step, once for all models of this shape...")
            started = time.monotonic()
            compile_decoder(model, file)
            reporter.note(f"Compiled in {time.monotonic() - started:.0f} s; saved in {file.parent}.")
        return load_compiled(model, file)
    except TinyLMError as error:
        if required:
            raise
        reporter.warn(str(error))
        fuse_model(model, int8)
        return None
