"""Opening a model for generation. Does not import torch if the cache has a converted file for llama.cpp."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.formats.hub import is_reference
from tinylm.generation.converted_model import (
    GGUF_FOLDER,
    Conversion,
    ConvertedModel,
    conversion_key,
    mark_used,
    open_converted,
)
from tinylm.generation.generation_config import SpeedConfig
from tinylm.reporter import LogReporter, Reporter, SilentReporter
from tinylm.run_directory.find_run import find_run, newest_model
from tinylm.system.cache_directory import is_private, private_folder

if TYPE_CHECKING:
    from tinylm.models.model import Model


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
    from tinylm.models.model import load

    model = load(path, adapters=adapters, device=device, dtype=dtype, quantize=quantize, reporter=reporter)
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
) -> tuple[str, Conversion]:
    """The name of a model, and its conversion for llama.cpp with the tokenizer and the chat template.

    The arguments are those of `tinylm.load`, on the CPU. Raises UsageError for a model that llama.cpp cannot run, and
    the errors of `tinylm.load`.
    """
    reporter, key = reporter or LogReporter(), None
    if not adapters and not is_reference(str(path)):
        found = _find(path, SilentReporter())
        key = conversion_key(found, "cpu", "auto", quantize, serves=True)
        record = None if key is None else Conversion.read(key)
        if record is not None and is_private(file := private_folder(GGUF_FOLDER) / Path(record.gguf).name):
            mark_used(file)
            return _find(path, reporter).stem, record
    from tinylm.models.model import load

    model = load(path, adapters=adapters, device="cpu", quantize=quantize, reporter=reporter)
    record = model.convert_for_serving()
    if key is not None:
        record.write(key)
    return model.path.stem, record


def _find(path: str | Path | None, reporter: Reporter) -> Path:
    return newest_model(reporter) if path is None else find_run(Path(path), reporter)
