"""tinylm compare: whether one model is better than another on a text."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinylm.commands.option_groups import command_line_flags, complete_runs, is_on_command_line, with_option_groups
from tinylm.commands.options import OutputOptions, text_source
from tinylm.config.settings import DeviceSettings, TextFileSettings, UnknownCharacterSettings
from tinylm.config.training import BATCH
from tinylm.config.validation import Setting
from tinylm.errors import UsageError
from tinylm.system.ranks import Launch

if TYPE_CHECKING:
    from tinylm.analysis.comparison import Comparison
    from tinylm.commands.console import Console


@with_option_groups
def compare(
    ctx: typer.Context,
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="Run, Hugging Face folder, GGUF file, hf:OWNER/NAME or adapter.",
            autocompletion=complete_runs("config.json"),
        ),
    ],
    b: Annotated[
        Path,
        typer.Argument(
            metavar="B", help="Model or adapter to compare with A.", autocompletion=complete_runs("config.json")
        ),
    ],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files, or - for standard input (default: the validation text, if both have the same).",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, Setting("Windows per forward pass; affects speed and memory only.", None, BATCH)
    ] = None,
    *,
    model: Annotated[
        Path | None,
        Setting(
            "Base model of the adapters (default: the one that an adapter records).",
            None,
            metavar="MODEL",
            flags=("--model", "-m"),
        ),
    ] = None,
    text_options: TextFileSettings,
    unknown: UnknownCharacterSettings,
    machine: DeviceSettings,
    output: OutputOptions,
) -> None:
    """Compare two decoders on a text: the difference in bits per byte, with a 95 % confidence interval.

    The interval is a paired bootstrap over the documents, or over blocks of a text with fewer than 20 documents. The
    tokenizers may differ.
    """
    from tinylm.analysis.comparison import compare_models, load_model_or_adapter

    if Launch.of(os.environ).size > 1:
        raise UsageError("Models are compared in one process; start the command without torchrun.")
    if not text and (unused := command_line_flags(ctx, text_options, unknown)):
        raise UsageError(
            f"{', '.join(unused.values())} has no effect without a text; name a text to compare on, or leave it out."
        )
    source = text_source(ctx, text, text_options, unknown.unknown) if text else None
    console = output.console()
    first, second = (load_model_or_adapter(path, model, **vars(machine), reporter=console) for path in (a, b))
    if not (first.adapters or second.adapters) and model is not None and is_on_command_line(ctx, "model"):
        raise UsageError("`model` has no effect, since neither A nor B is an adapter; leave it out.")
    _print(
        console,
        compare_models(first, second, source, names=(str(a), str(b)), batch_size=batch_size, reporter=console),
    )


def _print(console: "Console", comparison: "Comparison") -> None:
    if console.as_json:
        console.record(comparison.to_json())
        return
    console.table(("", ""), list(comparison.rows().items()))
    console.line(comparison.verdict)
