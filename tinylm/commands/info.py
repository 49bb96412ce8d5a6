"""tinylm info: all about one run."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.groups import with_groups
from tinylm.commands.model import complete_run, find_run, newest_run
from tinylm.commands.options import OutputOptions
from tinylm.commands.session import quoted
from tinylm.config import RunConfig
from tinylm.console import Console

CURVE_POINTS = 12


@with_groups
def info(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run directory (default: the newest).", show_default=False, autocompletion=complete_run),
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """Show a run's configuration, parameters by part, tokenizer, corpus and curve, and what can be done with it."""
    from tinylm.checkpoint import RunFolder, read_config, read_tokenizer, summarise
    from tinylm.cost import parameters_by_part

    console = output.console()
    path = find_run(console, run) if run else newest_run(console)
    if not path.name:  # the folder one stands in
        path = path.absolute()
    config = read_config(path)
    record: dict[str, Any] = {
        "run": str(path),
        **summarise(path),
        "config": config.to_json(),
        "parameters_by_part": parameters_by_part(config.model),
        "tokenizer": {"kind": config.tokenizer.kind, "vocab_size": read_tokenizer(path, config).vocab_size},
        "curve": RunFolder(path).read_curve(),
        "commands": _commands(path, config, config.training is not None),
    }
    if console.as_json:
        console.record(record)
        return
    _print_fields(console, "run", {k: record[k] for k in ("run", "kind", "parameters", "step", "val_loss")})
    _print_fields(console, "model", dataclasses.asdict(config.model))
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
    console.result("\nwhat next")
    for what, command in record["commands"].items():
        console.result(f"  {what + ':':<10} {command}")


EXAMPLES = {
    "decoder": ("...", "text.txt", "other.txt"),
    "encoder": ("... <mask> ...", "text.txt", "other.txt"),
    "encoder-decoder": ("...", "pairs.tsv", "other.tsv"),
}  # a prompt, and two files


def _commands(path: Path, config: RunConfig, trained: bool) -> dict[str, str]:
    place = quoted(path)
    adapter = config.adapter
    prompt, file, other = EXAMPLES[config.model.architecture]
    if adapter is not None:
        command = "finetune-lora" if adapter.kind == "lora" else "finetune-adapter"
        use = {
            "resume": f"tinylm {command} --resume {place}",
            "sample": f'tinylm sample --adapter {place} --prompt "{prompt}"',
            "evaluate": f"tinylm eval --adapter {place} {file}",
        }
        if adapter.kind != "lora":
            return use
        return {
            **use,
            "merge": f"tinylm merge-lora {place} --out {quoted(path.with_name(path.name + '-merged'))}",
        }
    commands = {
        "sample": f'tinylm sample --model {place} --prompt "{prompt}"',
        "evaluate": f"tinylm eval --model {place} {file}",
        "fine-tune": f"tinylm finetune-lora --model {place} {other}",
    }
    return {"resume": f"tinylm train --resume {place}", **commands} if trained else commands


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
