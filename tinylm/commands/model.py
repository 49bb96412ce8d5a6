"""Opening the model that a command works with; shared by the commands that use a trained one."""

import difflib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tinylm.checks import shown
from tinylm.commands.options import MachineOptions, option
from tinylm.config import DataConfig
from tinylm.console import Console
from tinylm.errors import UsageError
from tinylm.place import ADAPTER_FILE, CHECKPOINTS, MODEL_FILE

if TYPE_CHECKING:
    from tinylm.adapters.load import LoadedAdapter, WantedAdapter
    from tinylm.config import RunConfig
    from tinylm.model.stack import Transformer
    from tinylm.text.tokenizer import Tokenizer

MOST_NESTED = 4  # levels of folders in which runs are looked for
LARGEST_STRENGTH = 1000  # of an adapter


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
    runs = (path.relative_to(CHECKPOINTS).as_posix() for path in run_folders(CHECKPOINTS) if (path / file).is_file())
    return [name for name in runs if name.startswith(incomplete)]


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


def run_folders(folder: Path, depth: int = MOST_NESTED) -> Iterator[Path]:
    """The runs in a folder and in the folders in it, in order; hidden folders are left out, and those in a run."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name[0] != ".")
    except OSError:  # a folder that cannot be read has no runs to show
        return
    for path in (path for path in paths if path.is_dir()):  # False for a link in a circle
        if os.path.lexists(path / "config.json"):
            yield path
        elif depth > 1 and not path.is_symlink():
            yield from run_folders(path, depth - 1)


def find_run(console: Console, name: Path) -> Path:
    """The run, model or adapter, that a path names, or else the one of that name under checkpoints/.

    Raises UsageError when there is neither.
    """
    shelved = CHECKPOINTS / name
    other = not name.is_absolute() and ".." not in name.parts and name.name and _is_there(shelved)
    if other and shelved.resolve() != name.resolve():
        if os.path.lexists(name / "config.json"):
            console.note(f"Using the path {name}; the run of that name under {CHECKPOINTS}/ is {shelved}.")
            return name
        return shelved  # a text or a folder of texts often has the name of its run
    if _is_there(name):
        return name
    known = {path.relative_to(CHECKPOINTS).as_posix(): path for path in run_folders(CHECKPOINTS)}
    near = difflib.get_close_matches(name.as_posix().removeprefix(f"{CHECKPOINTS}/"), list(known), 3, 0.6)
    if near:
        raise UsageError(f"There is no run at {name}; perhaps you mean {' or '.join(near)}.")
    raise UsageError(f"There is no run at {name}; tinylm runs lists what there is.")


def _is_there(path: Path) -> bool:
    """Whether there is something at the path, or a run that a kill kept from appearing there."""
    from tinylm.place import hidden

    try:
        return os.path.lexists(path) or any(hidden(path, version).exists() for version in ("new", "old") if path.name)
    except OSError:
        return False


def newest_run(console: Console) -> Path:
    """The model most recently trained under checkpoints/, said on stderr. Raises UsageError when there is none."""
    weights = [path / MODEL_FILE for path in run_folders(CHECKPOINTS) if (path / MODEL_FILE).is_file()]
    if not weights:
        raise UsageError(
            f"There is no trained model under {CHECKPOINTS}/; train one with tinylm train corpus.txt, or name one with "
            "--model."
        )
    path = max(weights, key=lambda file: file.stat().st_mtime).parent
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

    model = model and find_run(console, model)
    if adapters:
        wanted = [wanted_adapter(console, text) for text in adapters]
        network, config, tokenizer, loaded = load_adapted(wanted, model, device)
        newest = replace(config, data=loaded[0].data)
        return OpenModel(network, newest, tokenizer, wanted[0].path, config.data, loaded)
    path = model or newest_run(console)
    network, config, tokenizer, _ = load_model(path, device)
    return OpenModel(network, config, tokenizer, path, config.data)


def wanted_adapter(console: Console, text: str) -> "WantedAdapter":
    """An adapter's path or name, or that and how strongly it is to act, as in run=0.5.

    Raises UsageError for what is no number, and where there is no adapter.
    """
    from tinylm.adapters.load import WantedAdapter

    path, _, strength = text.rpartition("=")
    if not path or _is_there(Path(text)) or _is_there(CHECKPOINTS / text):
        return WantedAdapter(find_run(console, Path(text)))
    try:
        number = float(strength)
    except ValueError:
        number = math.nan
    if not abs(number) <= LARGEST_STRENGTH:
        raise UsageError(
            f"--adapter {text[:200]}: {shown(strength)} is no number from -{LARGEST_STRENGTH} to {LARGEST_STRENGTH}; "
            f"write it as in {path[:200]}=0.5."
        )
    return WantedAdapter(find_run(console, Path(path)), number)
