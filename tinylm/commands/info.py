"""tinylm info: configuration, size and loss curve of one run."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.next_steps import resume_command, shell_quote
from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.commands.trained_model_options import complete_run
from tinylm.config import RunConfig
from tinylm.console import Console
from tinylm.run_directory.find_run import find_run, newest_model

CURVE_POINTS = 12  # points of the curve in the printed table, besides the last one
EXAMPLE_INPUTS = {  # by architecture: a prompt, and two text files
    "decoder": ("...", "text.txt", "other.txt"),
    "encoder": ("... <mask> ...", "text.txt", "other.txt"),
    "encoder-decoder": ("...", "pairs.tsv", "other.tsv"),
}


@with_option_groups
def info(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Run directory or name (default: the newest model).", show_default=False, autocompletion=complete_run
        ),
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """Show a run: configuration, parameters by part, tokenizer, corpus, loss curve, and commands that use it."""
    from tinylm.planning.cost import parameters_by_part
    from tinylm.run_directory.loading import read_config, read_tokenizer, summarise
    from tinylm.run_directory.metrics_log import read_curve

    console = output.console()
    path = find_run(run, console) if run else newest_model(console)
    if not path.name:  # Path(".")
        path = path.absolute()
    config = read_config(path)
    record: dict[str, Any] = {
        "run": str(path),
        **summarise(path),
        "config": config.to_json(),
        "parameters_by_part": parameters_by_part(config.model),
        "tokenizer": {"kind": config.tokenizer.kind, "vocab_size": read_tokenizer(path, config).vocab_size},
        "curve": read_curve(path),
        "commands": _commands(path, config),
    }
    if console.as_json:
        console.record(record)
        return
    _print_fields(console, "run", {k: record[k] for k in ("run", "kind", "parameters", "step", "val_loss")})
    model = {name: value for name, value in dataclasses.asdict(config.model).items() if value is not None}
    _print_fields(console, "model", model)
    _print_fields(console, "parameters", record["parameters_by_part"])
    for title in ("adapter", "tokenizer", "data", "training", "runtime"):
        part = getattr(config, title)
        if part is not None:
            _print_fields(console, title, dataclasses.asdict(part))
    if record["curve"]:
        every = -(-len(record["curve"]) // CURVE_POINTS)
        points = [*record["curve"][:-1][::every], record["curve"][-1]]
        console.result("\ncurve")
        console.table(("  step", "val loss"), [(f"{p['step']:>6}", f"{p['val_loss']:.4f}") for p in points])
    console.result("\ncommands")
    for purpose, command in record["commands"].items():
        console.result(f"  {purpose + ':':<10} {command}")


def _commands(path: Path, config: RunConfig) -> dict[str, str]:
    """Command lines that use a run, by purpose."""
    quoted = shell_quote(path)
    adapter = config.adapter
    prompt, file, other = EXAMPLE_INPUTS[config.model.architecture]
    if adapter is not None:
        use = {
            "resume": resume_command(path),
            "sample": f'tinylm sample --adapter {quoted} --prompt "{prompt}"',
            "evaluate": f"tinylm eval --adapter {quoted} {file}",
        }
        if adapter.kind != "lora":
            return use
        return {
            **use,
            "merge": f"tinylm merge-lora {quoted} --out {shell_quote(path.with_name(path.name + '-merged'))}",
        }
    commands = {
        "sample": f'tinylm sample --model {quoted} --prompt "{prompt}"',
        "evaluate": f"tinylm eval --model {quoted} {file}",
        "fine-tune": f"tinylm finetune-lora --model {quoted} {other}",
    }
    return {"resume": resume_command(path), **commands} if config.training is not None else commands


def _print_fields(console: Console, title: str, fields: dict[str, Any]) -> None:
    console.result(("\n" if title != "run" else "") + title)
    for name, value in fields.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
        elif isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value)) or "-"
        elif isinstance(value, int) and not isinstance(value, bool):
            value = f"{value:,}"
        console.result(f"  {name.replace('_', ' '):<18} {'-' if value is None else value}")
