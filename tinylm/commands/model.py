"""Opening the model that a command works with; shared by the commands that use a trained one."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tinylm.commands.options import MachineOptions, option
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.config import RunConfig
    from tinylm.model.stack import Transformer
    from tinylm.text.tokenizer import Tokenizer

CHECKPOINTS = Path("checkpoints")

ModelPath = Annotated[
    Path | None, option("A run folder (default: the newest model under checkpoints/).", None, "RUN", "--model", "-m")
]
AdapterPath = Annotated[Path | None, option("An adapter to put on the model.", None, "DIR", "--adapter")]


def newest_run(console: Console) -> Path:
    """The model most recently trained under checkpoints/, said on stderr. Raises UsageError when there is none."""
    from tinylm.place import MODEL_FILE

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
    """`path` is the folder of what was trained last, model or adapter, and `config.data` the text of that training."""

    network: "Transformer"
    config: "RunConfig"
    tokenizer: "Tokenizer"
    path: Path


def open_model(console: Console, model: Path | None, adapter: Path | None, device: str) -> OpenModel:
    """A model on its device, with the adapter on it if there is one."""
    from tinylm.adapters.load import load_adapted
    from tinylm.checkpoint import load_model

    if adapter is not None:
        return OpenModel(*load_adapted(adapter, model, device), adapter)
    path = model or newest_run(console)
    network, config, tokenizer, _ = load_model(path, device)
    return OpenModel(network, config, tokenizer, path)
