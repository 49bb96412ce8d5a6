"""Opening a model for generation, without importing torch if the cache has a converted file for llama.cpp."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.commands.options import MachineOptions
from tinylm.console import Console
from tinylm.formats.hub import is_reference
from tinylm.generation.converted_model import Conversion, ConvertedModel, conversion_key, open_converted
from tinylm.generation.generation_config import SpeedConfig
from tinylm.reporter import Reporter
from tinylm.run_directory.find_run import find_run, newest_model

if TYPE_CHECKING:
    from tinylm.loaded_model import Model


def open_generator(
    name: Path | None,
    adapters: Sequence[str | Path],
    machine: MachineOptions,
    quantize: str,
    speed: SpeedConfig,
    console: Console,
    *,
    switches_adapters: bool = False,
) -> "Model | ConvertedModel":
    """The model, prepared for generation. Takes the arguments of `tinylm.loaded_model.load` and `prepare_generation`.

    Raises their errors.
    """

    def find(reporter: Reporter) -> Path:
        return newest_model(reporter) if name is None else find_run(name, reporter)

    key = None
    if not adapters and not is_reference(str(name)):
        path = find(Console(quiet=True))  # `load` will report it
        key = conversion_key(path, machine.device, machine.dtype, quantize)
        if key is not None and (converted := open_converted(key, speed, console)) is not None:
            find(console)
            console.note(converted.note)
            return converted
    from tinylm.loaded_model import load

    model = load(name, adapters=adapters, quantize=quantize, **vars(machine), reporter=console)
    decoder = model.prepare_generation(speed, switches_adapters=switches_adapters)
    if key is not None and decoder is not None:
        tokenizer = model.tokenizer.to_str()
        Conversion(decoder.file.name, model.config, tokenizer, decoder.threads, model.note).write(key)
    return model
