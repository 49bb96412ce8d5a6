"""tinylm info: configuration, size and loss curve of one run, or of a model or adapter of another tool."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from tinylm.commands.fields import print_fields
from tinylm.commands.next_steps import resume_command, shell_quote
from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.commands.trained_model_options import complete_run
from tinylm.run_config import RunConfig
from tinylm.run_directory.find_run import newest_model

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
            help="Run, Hugging Face folder, GGUF file, hf:OWNER/NAME or PEFT adapter (default: the newest model).",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    *,
    output: OutputOptions,
) -> None:
    """Show a run: configuration, parameters by part, tokenizer, corpus, loss curve, and commands that use it.

    For a model of another tool also its family and number formats. For an adapter of PEFT: its settings and formats.
    """
    from tinylm.formats.peft import is_adapter_folder
    from tinylm.formats.source import is_foreign
    from tinylm.open_model import find_model

    console = output.console()
    path = find_model(run, console) if run else newest_model(console)
    if not path.name:  # Path(".")
        path = path.absolute()
    if is_adapter_folder(path):
        record, parts = _describe_peft(path)
    elif is_foreign(path):
        record, parts = _describe_foreign(path)
    else:
        record, parts = _describe_run(path)
    if console.as_json:
        console.record(record)
        return
    for title, fields in parts.items():
        print_fields(console, title, fields, first=title == "run")
    if curve := record.get("curve"):
        every = -(-len(curve) // CURVE_POINTS)
        points = [*curve[:-1][::every], curve[-1]]
        console.result("\ncurve")
        console.table(("  step", "val loss"), [(f"{p['step']:>6}", f"{p['val_loss']:.4f}") for p in points])
    console.result("\ncommands")
    for purpose, command in record["commands"].items():
        console.result(f"  {purpose + ':':<10} {command}")


Parts = dict[str, dict[str, Any]]  # what is printed, by titles


def _describe_run(path: Path) -> tuple[dict[str, Any], Parts]:
    """All about a run, and the parts of it that are printed."""
    from tinylm.run_directory.loading import read_config, read_tokenizer, summarise
    from tinylm.run_directory.metrics_log import read_curve

    config = read_config(path)
    record = {
        "run": str(path),
        **summarise(path),
        **_describe_config(config),
        "tokenizer": {"kind": config.tokenizer.kind, "vocab_size": read_tokenizer(path, config).vocab_size},
        "curve": read_curve(path),
        "commands": _commands(path, config),
    }
    summary = {name: record[name] for name in ("run", "kind", "parameters", "step", "val_loss")}
    return record, {"run": summary, **_config_parts(config, record)}


def _describe_foreign(path: Path) -> tuple[dict[str, Any], Parts]:
    """All about a Hugging Face folder or a GGUF file, whose weights are not read."""
    from tinylm.formats.source import read_foreign
    from tinylm.open_model import run_config

    foreign = read_foreign(path)
    config, tokenizer = run_config(foreign, path)
    described = _describe_config(config)
    described["config"] = {name: described["config"][name] for name in ("model", "tokenizer", "family")}
    summary = {
        "run": str(path),
        "kind": "model",
        "format": "hugging face" if path.is_dir() else "gguf",
        "family": foreign.family,
        "parameters": described["parameters_by_part"]["total"],
        "number_formats": list(foreign.dtypes),
    }
    record = {
        **summary,
        **described,
        "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
        "commands": _commands(path, config),
    }
    return record, {"run": summary, **_config_parts(config, record)}


def _describe_peft(path: Path) -> tuple[dict[str, Any], Parts]:
    """All about an adapter of PEFT, whose weights are not read, without its base model."""
    from tinylm.formats.peft import summarise_adapter

    adapter = summarise_adapter(path)
    summary = {
        "run": str(path),
        "kind": "adapter",
        "format": "peft",
        "parameters": adapter.parameters,
        "number_formats": list(adapter.dtypes),
    }
    settings = {
        "base": adapter.config.base,
        "rank": adapter.config.rank,
        "alpha": adapter.config.alpha,
        "rank_stabilised": adapter.config.rank_stabilised,
        "targets": list(adapter.modules),
        "modules_to_save": list(adapter.config.modules_to_save),
    }
    quoted = shell_quote(path)
    commands = {
        "sample": f'tinylm sample --model BASE --adapter {quoted} --prompt "..."',
        "evaluate": f"tinylm eval --model BASE --adapter {quoted} text.txt",
        "merge": f"tinylm merge-lora {quoted} --model BASE --out merged",
    }
    return {**summary, "adapter": settings, "commands": commands}, {"run": summary, "adapter": settings}


def _describe_config(config: RunConfig) -> dict[str, Any]:
    from tinylm.planning.cost import parameters_by_part

    return {"config": config.to_json(), "parameters_by_part": parameters_by_part(config.model)}


def _config_parts(config: RunConfig, record: dict[str, Any]) -> Parts:
    model = {name: value for name, value in dataclasses.asdict(config.model).items() if value is not None}
    parts = {"model": model, "parameters": record["parameters_by_part"]}
    for title in ("adapter", "tokenizer", "data", "training", "runtime"):
        part = getattr(config, title)
        if part is not None:
            parts[title] = dataclasses.asdict(part)
    tokenizer = parts["tokenizer"]
    tokenizer["vocab_size"] = record["tokenizer"]["vocab_size"]
    tokenizer["chat_template"] = config.tokenizer.chat_template is not None
    return parts


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
