"""tinylm report: an HTML file about one or several runs."""

from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import complete_runs, with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.config.settings import DEVICE
from tinylm.config.validation import Setting


@with_option_groups
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Runs to show, overlaid (default: the newest model).",
            show_default=False,
            autocompletion=complete_runs("config.json"),
        ),
    ] = None,
    out: Annotated[Path, Setting("HTML file to write.", None, metavar="FILE", flags=("--out", "-o"))] = Path(
        "report.html"
    ),
    prompt: Annotated[
        str | None,
        Setting("Text of the attention maps (default: the beginning of the validation text).", None, metavar="TEXT"),
    ] = None,
    memorisation: Annotated[
        bool | None,
        Setting("Measure memorisation of the training text (default: 20 samples, if model and text are small).", None),
    ] = None,
    device: Annotated[str, DEVICE] = "auto",
    *,
    output: OutputOptions,
) -> None:
    """Write an HTML file about runs: curves, samples, attention, loss per token, evaluation, memorisation and settings.

    The file needs no network. An earlier report is replaced.
    """
    from tinylm.run_report.page import write_report
    from tinylm.run_report.predictions import ModelOptions

    console = output.console()
    names = write_report(runs or [], out, ModelOptions(prompt, memorisation, device), console)
    if console.as_json:
        console.record({"report": str(out), "runs": names})
    else:
        console.result(str(out))
