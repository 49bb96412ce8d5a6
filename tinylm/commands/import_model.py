"""tinylm import: copy a model of another tool into a run directory."""

from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.config.validation import Panel, Setting


@with_option_groups
def import_model(
    source: Annotated[
        Path,
        typer.Argument(
            help="Hugging Face folder, GGUF file, or hf:OWNER/NAME of the hub with an optional @REVISION.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        Setting(
            "Run directory to write (default: checkpoints/<model name>).",
            Panel.RUN,
            metavar="DIR",
            flags=("--out", "-o"),
        ),
    ] = None,
    force: Annotated[bool, Setting("Replace an existing run.", Panel.RUN)] = False,
    *,
    output: OutputOptions,
) -> None:
    """Copy a model of another tool into a run directory, with its tokenizer, its weights and their dtype."""
    from tinylm.models import importing

    console = output.console()
    imported = importing.import_model(source, out, force=force, reporter=console)
    console.note(f"A model of the family {imported.family}, with {imported.parameters:,} parameters.")
    if console.as_json:
        console.record({"run": str(imported.run), "family": imported.family, "parameters": imported.parameters})
    else:
        console.result(str(imported.run))
