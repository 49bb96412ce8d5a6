"""Loading a model: `load` for any use, `open_generator` for generation, and `open_for_serving` for `tinylm serve`.

The last two do not import torch if the cache has a converted file for llama.cpp.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.config.run import DTYPES
from tinylm.config.validation import check_choice
from tinylm.errors import AdapterNotModelError, TinyLMError, concerning
from tinylm.formats.hub import is_reference
from tinylm.generation.conversion_cache import Conversion, conversion_key, open_converted, take_cached
from tinylm.generation.generation_config import SpeedConfig
from tinylm.generation.llama_cpp import reason_against
from tinylm.reporter import LogReporter, Reporter, SilentReporter
from tinylm.run_directory.layout import find_run, newest_model

if TYPE_CHECKING:
    from tinylm.generation.engine import Engine
    from tinylm.generation.text_generator import TextGenerator
    from tinylm.models.load_adapter import LoadedAdapter
    from tinylm.models.model import Model


def load(
    path: str | Path | None = None,
    *,
    adapters: str | Path | Sequence[str | Path] = (),
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "none",
    reporter: Reporter | None = None,
) -> "Model":
    """Load a trained model, with adapters on it, for inference.

    path: a run directory or its name under checkpoints/, a Hugging Face folder, hf:OWNER/NAME[@REVISION], or a GGUF
        file. Default: the base model of the adapters, or without adapters the newest model under checkpoints/.
    adapters: a run directory or the name of an adapter, or a folder of a PEFT adapter, or several of these, all trained
        on the same base model; if all are PEFT adapters, `path` is required. "DIR=0.5" applies the adapter with a scale
        of 0.5.
    device: auto (CUDA, then MPS, then the CPU), cuda, mps or cpu.
    dtype: fp32, bf16, fp16 or auto: losses, logits and labels are computed in the format in which the model or the
        first adapter was trained, or that of 16-bit weights, or the one that training here would have; text is
        generated in the format of 16-bit weights, or in fp32 (bf16 on CUDA where the device computes in it).
    quantize: none, or int8 weights for generation by llama.cpp, which are smaller and faster.
    reporter: receives notes and warnings. Default: the logger `tinylm`.

    Raises UsageError for a setting, a path or an adapter that cannot be used, and TinyLMError for damaged files, for
    adapters that were trained on another base model, and for a failed download.
    """
    from tinylm.machine.torch_settings import usual_settings

    reporter = reporter or LogReporter()
    adapters = (adapters,) if isinstance(adapters, str | Path) else adapters
    try:
        with usual_settings():
            run = _find(path, adapters, device, dtype, quantize, reporter, setting="path")
            return _load(run, adapters, device, dtype, quantize, reporter, only_generates=False)
    except AdapterNotModelError as error:  # whose message names the options of commands
        advice = "name it as one of the adapters, and its base as the path"
        error.args = (f"{error.path} is an adapter, not a model; {advice}.",)
        raise


@concerning("model")
def _find(
    path: str | Path | None,
    adapters: Sequence[str | Path],
    device: str,
    dtype: str,
    quantize: str,
    reporter: Reporter,
    setting: str = "model",
) -> Path | None:
    """The path of the model, by default of the newest one; `None` for the base of the adapters. The arguments are
    those of `load`, which are checked first. setting: that names a model
    """
    check_choice("quantize", quantize, ("none", "int8"))
    check_choice("dtype", dtype, ("auto", *DTYPES))
    if path is None:
        return None if adapters else newest_model(reporter, setting)
    if is_reference(str(path)):  # of the hub; a path of the disk is found without torch
        from tinylm.machine.device import choose_device
        from tinylm.models.open import find_model

        choose_device(device)  # an error comes before a download
        return find_model(Path(path), reporter)
    return find_run(Path(path), reporter)


@concerning("model", "adapter")
def _load(
    run: Path | None,
    adapters: Sequence[str | Path],
    device: str,
    dtype: str,
    quantize: str,
    reporter: Reporter,
    *,
    only_generates: bool,
) -> "Model":
    """run: as `_find` returns it. only_generates: whether the model only generates. The others: arguments of `load`."""
    from tinylm.machine.device import DTYPES as TORCH_DTYPES
    from tinylm.machine.device import choose_device, choose_generation_dtype, describe_device, weights_dtype
    from tinylm.machine.measure import choose_loss_dtype
    from tinylm.models.load_adapter import AdapterSpec, load_adapted_model
    from tinylm.models.model import Model
    from tinylm.models.model_engine import ModelEngine
    from tinylm.models.open import open_model

    chosen_device = choose_device(device)
    loaded: Sequence[LoadedAdapter] = ()
    if run is None or adapters:
        specs = [AdapterSpec.parse(str(adapter), reporter) for adapter in adapters]
        network, config, tokenizer, loaded = load_adapted_model(specs, run, chosen_device.value)
        for adapter in loaded:
            if adapter.note is not None:
                reporter.note(adapter.note)
        run = specs[0].path
    else:
        network, config, tokenizer, _ = open_model(run, chosen_device.value)
    stored = weights_dtype(network)
    generation_dtype = loss_dtype = choose_generation_dtype(dtype, chosen_device.value, stored)
    if not only_generates:
        trained = loaded[0].config if loaded else config
        recorded = None if trained is None or trained.runtime is None else trained.runtime.dtype
        loss_dtype = choose_loss_dtype(dtype, chosen_device.value, stored, recorded, reporter)
    note = (
        f"On {describe_device(chosen_device.value)}: {chosen_device.reason}; {loss_dtype.value}: {loss_dtype.reason}."
    )
    reporter.note(note)
    if stored != TORCH_DTYPES[loss_dtype.value]:
        network.float()  # as in training; autocast or the preparation for generation converts them
    engine = ModelEngine(run, network, config, tokenizer, tuple(loaded), generation_dtype.value, quantize, reporter)
    return Model(
        path=run,
        network=network,
        config=config,
        tokenizer=tokenizer,
        engine=engine,
        dtype=loss_dtype.value,
        adapters=tuple(loaded),
        note=note,
        reporter=reporter,
    )


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
) -> "TextGenerator":
    """The model for generation only, with the engine that the settings choose.

    speed, switches_adapters: see `ModelEngine.settle`. The other arguments are those of `tinylm.load`. Returns a
    `Model`, unless llama.cpp generates from the converted file of an earlier call, of a decoder without adapters.

    Raises the errors of `ModelEngine.settle` and `tinylm.load`.
    """
    speed, reporter = speed or SpeedConfig(), reporter or LogReporter()

    # The converted file of an earlier call, without torch
    run = _find(path, adapters, device, dtype, quantize, reporter)
    key = None if run is None or adapters else conversion_key(run, device, dtype, quantize)
    if key is not None and (cached := open_converted(key, speed, reporter)) is not None:
        return cached

    # The model's own files
    model = _load(run, adapters, device, dtype, quantize, reporter, only_generates=True)
    llama_cpp = model.engine.settle(speed, switches_adapters=switches_adapters)
    if key is not None and llama_cpp is not None:
        model.conversion_record(llama_cpp.file).write(key)
    return model


def open_for_serving(
    path: str | Path | None = None,
    *,
    adapters: Sequence[str | Path] = (),
    quantize: str = "none",
    reporter: Reporter | None = None,
) -> "tuple[str, Conversion, Callable[[], Engine]]":
    """The name of a model, its conversion for llama.cpp, and a function that opens the same model in torch.

    The arguments are those of `tinylm.load`, on the CPU. Raises UsageError for a model that llama.cpp cannot run, and
    the errors of `tinylm.load`. The function raises TinyLMError if the model's files have changed.
    """
    reporter = reporter or LogReporter()
    run = _find(path, adapters, "cpu", "auto", quantize, reporter)

    def load_files() -> "Model":
        return _load(run, adapters, "cpu", "auto", quantize, SilentReporter(), only_generates=True)

    # The converted file of an earlier call, or else the model's own files
    key = None if run is None or adapters else conversion_key(run, "cpu", "auto", quantize)
    record = None if key is None or reason_against(SpeedConfig()) else Conversion.read(key)
    if run is not None and record is not None and take_cached(record.file):
        name = run.stem
    else:
        model = load_files()
        reporter.note("On cpu: llama.cpp serves there.")
        name, record = model.path.stem, model.convert_for_serving()
        if key is not None:
            record.write(key)

    def open_torch() -> "Engine":
        again = load_files()
        if again.convert_for_serving().gguf != record.gguf:  # whose name has the digest of the weights
            raise TinyLMError(f"The files of {name} have changed since the server started; start it again.")
        again.engine.quantize = "none"  # torch has no int8 weights
        again.engine.settle(SpeedConfig(engine="torch"))
        return again.engine

    return name, record, open_torch
