"""Loading a model: `load` for any use, `open_generator` for generation, and `open_for_serving` for `tinylm serve`.

The last two do not import torch if the cache has a converted file for llama.cpp.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.config.validation import check_choice
from tinylm.errors import TinyLMError
from tinylm.formats.hub import is_reference
from tinylm.generation.generation_config import SpeedConfig
from tinylm.generation.llama_cpp import (
    Conversion,
    ConvertedModel,
    conversion_key,
    import_llama_cpp,
    open_converted,
    take_cached,
)
from tinylm.reporter import LogReporter, Reporter, SilentReporter
from tinylm.run_directory.layout import find_run, newest_model

if TYPE_CHECKING:
    from tinylm.models.adapter import LoadedAdapter
    from tinylm.models.model import Model


def load(
    path: str | Path | None = None,
    *,
    adapters: Sequence[str | Path] = (),
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "none",
    reporter: Reporter | None = None,
) -> "Model":
    """Load a trained model, with adapters on it, for inference.

    path: a run directory or its name under checkpoints/, a Hugging Face folder, hf:OWNER/NAME[@REVISION], or a GGUF
        file. Default: the base model of the adapters, or without adapters the newest model under checkpoints/.
    adapters: run directories or names of adapters, all trained on the same base model, or folders of PEFT adapters; if
        all are PEFT adapters, `path` is required. "DIR=0.5" applies the adapter with a scale of 0.5.
    device: auto (CUDA, then MPS, then the CPU), cuda, mps or cpu.
    dtype: fp32, bf16, fp16 or auto: losses, logits and labels are computed in the format in which the model or the
        first adapter was trained, or that of 16-bit weights, or the one that training here would have; text is
        generated in the format of 16-bit weights, or in fp32 (bf16 on CUDA where the device computes in it).
    quantize: none, or int8 weights for generation, which are smaller, and faster on a CPU.
    reporter: receives notes and warnings. Default: the logger `tinylm`.

    Raises UsageError for a setting, a path or an adapter that cannot be used, and TinyLMError for damaged files, for
    adapters that were trained on another base model, and for a failed download.
    """
    return _load(path, adapters, device, dtype, quantize, reporter or LogReporter(), only_generates=False)


def _load(
    path: str | Path | None,
    adapters: Sequence[str | Path],
    device: str,
    dtype: str,
    quantize: str,
    reporter: Reporter,
    *,
    only_generates: bool,
) -> "Model":
    """The arguments are those of `load`. only_generates: whether the model is only used for generation."""
    from tinylm.machine.device import DTYPES, choose_device, choose_generation_dtype, describe_device, weights_dtype
    from tinylm.machine.measure import choose_loss_dtype
    from tinylm.models.adapter import AdapterSpec, load_adapted_model
    from tinylm.models.model import Model
    from tinylm.models.open import find_model, open_model

    check_choice("quantize", quantize, ("none", "int8"))
    check_choice("dtype", dtype, ("auto", *DTYPES))
    chosen_device = choose_device(device)
    run = None if path is None else find_model(Path(path), reporter)
    loaded: Sequence[LoadedAdapter] = ()
    if adapters:
        specs = [AdapterSpec.parse(str(adapter), reporter) for adapter in adapters]
        network, config, tokenizer, loaded = load_adapted_model(specs, run, chosen_device.value)
        for adapter in loaded:
            if adapter.note is not None:
                reporter.note(adapter.note)
        run = specs[0].path
    else:
        run = run or newest_model(reporter)
        network, config, tokenizer, _ = open_model(run, chosen_device.value)
    stored = weights_dtype(network)
    for_generation = chosen_dtype = choose_generation_dtype(dtype, chosen_device.value, stored)
    if not only_generates:
        of_base = None if config.runtime is None else config.runtime.dtype
        recorded = loaded[0].dtype if loaded else of_base
        chosen_dtype = choose_loss_dtype(dtype, chosen_device.value, stored, recorded, reporter)
    note = (
        f"On {describe_device(chosen_device.value)}: {chosen_device.reason}; {chosen_dtype.value}: "
        f"{chosen_dtype.reason}."
    )
    reporter.note(note)
    if stored != DTYPES[chosen_dtype.value]:
        network.float()  # as in training; autocast or the preparation for generation converts them
    formats = (chosen_dtype.value, for_generation.value)
    return Model(run, network, config, tokenizer, *formats, quantize, tuple(loaded), reporter, note)


def open_generator(
    path: str | Path | None = None,
    speed: SpeedConfig | None = None,
    *,
    adapters: Sequence[str | Path] = (),
    switches_adapters: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "none",
    reporter: Reporter | None = None,
) -> "Model | ConvertedModel":
    """The model, prepared for generation only.

    speed, switches_adapters: see `Model.prepare_generation`. The other arguments are those of `tinylm.load`.

    Raises the errors of `Model.prepare_generation` and `tinylm.load`.
    """
    speed, reporter = speed or SpeedConfig(), reporter or LogReporter()

    key = None
    if not adapters and not is_reference(str(path)):
        found = _find(path, SilentReporter())  # `load` finds it again and reports it
        key = conversion_key(found, device, dtype, quantize)
        if key is not None and (converted := open_converted(key, speed, reporter)) is not None:
            _find(path, reporter)
            reporter.note(converted.note)
            return converted
    model = _load(path, adapters, device, dtype, quantize, reporter, only_generates=True)
    engine = model.prepare_generation(speed, switches_adapters=switches_adapters)
    if key is not None and engine is not None:
        tokenizer, rows = model.tokenizer.to_str(), model.network.vocab_size
        Conversion(engine.file.name, model.config, tokenizer, rows, engine.is_exact, model.note).write(key)
    return model


def open_for_serving(
    path: str | Path | None = None,
    *,
    adapters: Sequence[str | Path] = (),
    quantize: str = "none",
    reporter: Reporter | None = None,
) -> tuple[str, Conversion, Callable[[], "Model"]]:
    """The name of a model, its conversion for llama.cpp, and a function that loads the same model.

    The arguments are those of `tinylm.load`, on the CPU. Raises UsageError for a model that llama.cpp cannot run, and
    the errors of `tinylm.load`. The function raises TinyLMError if the model's files have changed.
    """
    reporter, key = reporter or LogReporter(), None

    def load_again() -> "Model":
        again = _load(path, adapters, "cpu", "auto", quantize, SilentReporter(), only_generates=True)
        if again.convert_for_serving().gguf != record.gguf:  # whose name has the digest of the weights
            raise TinyLMError(f"The files of {name} have changed since the server started; start it again.")
        return again

    if not adapters and not is_reference(str(path)):
        path = _find(path, reporter)
        key = conversion_key(path, "cpu", "auto", quantize)
        known = None if key is None else Conversion.read(key)
        if known is not None and import_llama_cpp() is not None and take_cached(known.file):
            name, record = path.stem, known
            return name, record, load_again
    model = _load(path, adapters, "cpu", "auto", quantize, SilentReporter(), only_generates=True)
    reporter.note("On cpu: llama.cpp serves there.")
    name, record = model.path.stem, model.convert_for_serving()
    if key is not None:
        record.write(key)
    return name, record, load_again


def _find(path: str | Path | None, reporter: Reporter) -> Path:
    return newest_model(reporter) if path is None else find_run(Path(path), reporter)
