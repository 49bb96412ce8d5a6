"""Opening the model that a command works with; shared by the commands that use a trained one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tinylm.commands.options import option
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.config import RunConfig
    from tinylm.model.decoder import Decoder
    from tinylm.text.tokenizer import Tokenizer

CHECKPOINTS = Path("checkpoints")

ModelPath = Annotated[
    Path | None, option("A run folder (default: the newest model under checkpoints/).", None, "RUN", "--model", "-m")
]
AdapterPath = Annotated[Path | None, option("An adapter to put on the model.", None, "DIR", "--adapter")]


def newest_run(console: Console) -> Path:
    """The model most recently trained under checkpoints/, said on stderr. Raises UsageError when there is none."""
    from tinylm.checkpoint import MODEL_FILE

    weights = sorted(CHECKPOINTS.glob(f"[!.]*/{MODEL_FILE}"), key=lambda file: file.stat().st_mtime)
    if not weights:
        raise UsageError(
            f"There is no trained model under {CHECKPOINTS}/; train one with tinylm train corpus.txt, or name one with "
            "--model."
        )
    path = weights[-1].parent
    console.note(f"Using {path}, the newest model.")
    return path


def open_model(
    console: Console, model: Path | None, adapter: Path | None, device: str
) -> tuple["Decoder", "RunConfig", "Tokenizer", Path]:
    """The model on its device, its configuration, its tokenizer and its folder; with an adapter, that base's."""
    from tinylm.adapters.load import load_adapted, read_adapter_config
    from tinylm.checkpoint import load_model

    if adapter is not None:
        network, config, tokenizer = load_adapted(adapter, model, device)
        return network, config, tokenizer, model or Path(read_adapter_config(adapter)[1].base)
    path = model or newest_run(console)
    network, config, tokenizer, _ = load_model(path, device)
    return network, config, tokenizer, path
