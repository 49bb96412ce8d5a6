"""Opening the model that a command works with; shared by the commands that use a trained one."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tinylm.commands.options import MachineOptions, option
from tinylm.config import DataConfig
from tinylm.console import Console
from tinylm.errors import UsageError
from tinylm.place import ADAPTER_FILE, MODEL_FILE

if TYPE_CHECKING:
    from tinylm.adapters.load import LoadedAdapter, WantedAdapter
    from tinylm.config import RunConfig
    from tinylm.model.stack import Transformer
    from tinylm.text.tokenizer import Tokenizer

CHECKPOINTS = Path("checkpoints")


def complete_model(incomplete: str) -> list[str]:
    """Names of the models under checkpoints/, for the shell's completion."""
    return _names(MODEL_FILE, incomplete)


def complete_adapter(incomplete: str) -> list[str]:
    """Names of the adapters under checkpoints/, for the shell's completion."""
    return _names(ADAPTER_FILE, incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Names of all runs under checkpoints/, for the shell's completion."""
    return _names("config.json", incomplete)


def _names(file: str, incomplete: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(
            path.parent.name for path in CHECKPOINTS.glob(f"[!.]*/{file}") if path.parent.name.startswith(incomplete)
        )
    return []


ModelPath = Annotated[
    Path | None,
    option(
        "Run directory (default: the newest model under checkpoints/).",
        None,
        "RUN",
        *("--model", "-m"),
        autocompletion=complete_model,
    ),
]
AdapterPaths = Annotated[
    list[str] | None,
    option(
        "Adapter directory; may be given several times. DIR=0.5 applies half of the update.",
        None,
        "DIR",
        "--adapter",
        autocompletion=complete_adapter,
    ),
]


def newest_run(console: Console) -> Path:
    """The model most recently trained under checkpoints/, said on stderr. Raises UsageError when there is none."""
    weights = sorted(CHECKPOINTS.glob(f"[!.]*/{MODEL_FILE}"), key=lambda file: file.stat().st_mtime)
    if not weights:
        raise UsageError(
            f"There is no trained model under {CHECKPOINTS}/; train one with tinylm train corpus.txt, or name one with "
            "--model."
        )
    path = weights[-1].parent
    console.note(f"Using {path}, the newest model.")
    return path


def choose_where(console: Console, machine: MachineOptions) -> tuple[str, str]:
    """The device and the number format to answer in; the first thing that a command says."""
    from tinylm.device import choose_device, choose_inference_dtype, describe_device

    device = choose_device(machine.device)
    dtype = choose_inference_dtype(machine.dtype, device.value)
    console.note(f"On {describe_device(device.value)}: {device.reason}; {dtype.value}: {dtype.reason}.")
    return device.value, dtype.value


@dataclass(frozen=True)
class OpenModel:
    """`path` is the folder of what was trained last, model or adapter, and `config.data` the text of that training.

    `adapters` are those on it, and `base_data` is the text that the model beneath them was trained on.
    """

    network: "Transformer"
    config: "RunConfig"
    tokenizer: "Tokenizer"
    path: Path
    base_data: DataConfig | None
    adapters: "Sequence[LoadedAdapter]" = ()

    def use_only(self, chosen: int | None) -> DataConfig | None:
        """Let one adapter, by its number, or the base act alone; returns the text that it was trained on."""
        from tinylm.adapters.load import set_strength

        for number, adapter in enumerate(self.adapters):
            set_strength(adapter.layers, adapter.strength if number == chosen else 0.0)
        return self.base_data if chosen is None else self.adapters[chosen].data


def open_model(console: Console, model: Path | None, adapters: list[str] | None, device: str) -> OpenModel:
    """A model on its device, with the adapters on it if there are any."""
    from tinylm.adapters.load import load_adapted
    from tinylm.checkpoint import load_model

    if adapters:
        wanted = [wanted_adapter(text) for text in adapters]
        network, config, tokenizer, loaded = load_adapted(wanted, model, device)
        newest = replace(config, data=loaded[0].data)
        return OpenModel(network, newest, tokenizer, wanted[0].path, config.data, loaded)
    path = model or newest_run(console)
    network, config, tokenizer, _ = load_model(path, device)
    return OpenModel(network, config, tokenizer, path, config.data)


def wanted_adapter(text: str) -> "WantedAdapter":
    """A folder, or a folder and how strongly the adapter is to act, as in run=0.5. Raises UsageError for no number."""
    from tinylm.adapters.load import WantedAdapter

    path, _, strength = text.rpartition("=")
    if not path or Path(text).exists():
        return WantedAdapter(Path(text))
    try:
        number = float(strength)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"--adapter {text}: {strength!r} is no number; write it as in {path}=0.5.")
    return WantedAdapter(Path(path), number)
