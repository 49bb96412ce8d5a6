"""tinylm merge-lora: merge a LoRA adapter into its base model."""

from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import complete_runs, with_option_groups
from tinylm.commands.options import ModelOption, OutputOptions
from tinylm.config.validation import Panel, Setting
from tinylm.run_directory.layout import ADAPTER_FILE


@with_option_groups
def merge_lora(
    adapter: Annotated[
        Path,
        typer.Argument(
            help="Adapter directory or name.", show_default=False, autocompletion=complete_runs(ADAPTER_FILE)
        ),
    ],
    out: Annotated[Path, Setting("Run directory to write.", Panel.RUN, metavar="DIR", flags=("--out", "-o"))],
    model: ModelOption = None,
    dtype: Annotated[
        str, Setting("Number format of the weights to write; auto: that of the base.", None, ("auto", "fp32"))
    ] = "auto",
    force: Annotated[bool, Setting("Replace an existing run.", Panel.RUN)] = False,
    undo: Annotated[bool, Setting("Subtract the adapter from the merged model named by --model.", Panel.RUN)] = False,
    *,
    output: OutputOptions,
) -> None:
    """Merge a LoRA adapter into its base model, and check that the model that was written computes the same logits.

    With --undo: subtract a merged adapter from a model.
    """
    from tinylm.models.merge import merge_adapter

    console = output.console()
    merge = merge_adapter(adapter, out, model, console, dtype=dtype, force=force, undo=undo)
    if console.as_json:
        console.record({"run": str(merge.run), "difference": merge.difference, "change": merge.change})
    else:
        console.result(str(merge.run))
