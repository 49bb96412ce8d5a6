"""tinylm info: configuration, size and loss curve of runs, or of a model or adapter of another tool.

Several runs are compared in a table.
"""

import math
import statistics
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.console import Console, terminal_columns
from tinylm.commands.next_steps import shell_quote, use_commands
from tinylm.commands.option_groups import complete_runs, with_option_groups
from tinylm.commands.options import OutputOptions, print_fields
from tinylm.config.run import RunConfig, describe_loss
from tinylm.config.settings import format_duration
from tinylm.errors import TinyLMError, UsageError
from tinylm.reporter import counted
from tinylm.run_directory.layout import newest_model
from tinylm.run_report.curves import MAX_NUMBER

if TYPE_CHECKING:
    from tinylm.text.tokenizer import Tokenizer

MAX_CELL = 32  # characters; a longer value is shortened to its end
# Prefixes of settings that differ between any two runs, or follow from others. The id of a run is left out as well.
INCIDENTAL = ("created", "planned.", "runtime.job")


def compare_records(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The rows of the table: results, and the settings that differ. records: as `tinylm info --json` prints them.

    The first cell of a row is its name; a cell for each run follows. A missing value is "-".
    """
    from tinylm.run_report.page import DIGESTS, flatten

    results = {
        "kind": [record["kind"] for record in records],
        "parameters": [_count(record.get("parameters")) for record in records],
        "steps": [_count(record.get("step")) for record in records],
        "tokens": [_count(record.get("tokens")) for record in records],
        "best bits per byte": [_loss(record.get("val_bits_per_byte")) for record in records],
        "best val loss": [_loss(record.get("val_loss")) for record in records],
        "at step": [_count(record.get("best_step")) for record in records],
        "tokens per second": [_count(record.get("tokens_per_second")) for record in records],
        "time": ["-" if record.get("seconds") is None else format_duration(record["seconds"]) for record in records],
    }
    settings = []
    for record in records:
        flat = flatten(record["config"] | {"id": None} if "config" in record else {"adapter": record["adapter"]})
        left_out = {name for name in flat if name.startswith(INCIDENTAL) or name.endswith(DIGESTS)}
        settings.append({name: value for name, value in flat.items() if name not in left_out})
    for name in dict.fromkeys(name for found in settings for name in found):
        values = [found.get(name, "-") for found in settings]
        if len(set(values)) > 1:
            results[name] = [value if len(value) <= MAX_CELL else f"…{value[1 - MAX_CELL :]}" for value in values]
    return [(name, *(cell.replace("\n", "\\n") for cell in cells)) for name, cells in results.items()]


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


LETTERS = string.ascii_uppercase  # the labels of the runs in a comparison
POINTS = 2000  # about the most points that are drawn per curve
MAX_PLOT_COLUMNS, PLOT_ROWS = 100, 13
LABEL_EVERY = 3  # rows between two labels of the losses
MIN_COLUMNS = 10  # of a plot between its axes
SAMPLE_LINES, SAMPLE_CHARACTERS = 8, 400  # of the last sample of training, the most that are shown
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Described:
    """The data of a model or an adapter that `tinylm info` prints.

    record: the output of --json.
    summary: the fields that are printed first. settings: those that --all adds, by section title.
    sample: the last text that was sampled in training.
    training, validation: steps and losses, thinned; empty for models and adapters of other tools.
    loss_unit: as in RunConfig. tokenizer: of the model; `None` for adapters of other tools.
    """

    path: Path
    record: dict[str, Any]
    summary: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    sample: str | None = None
    training: Points = ()
    validation: Points = ()
    loss_unit: str = "nats per token"
    tokenizer: "Tokenizer | None" = None


@with_option_groups
def info(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Runs, Hugging Face folders, GGUF files, hf:OWNER/NAME or PEFT adapters (default: the newest model).",
            show_default=False,
            autocompletion=complete_runs("config.json"),
        ),
    ] = None,
    all_settings: Annotated[
        bool, typer.Option("--all", help="Show all settings, and the parameters by part.", show_default=False)
    ] = False,
    *,
    output: OutputOptions,
) -> None:
    """Show a run: size, losses, a sample of its text, and commands that use it; with --all, its settings as well.

    Several runs are compared: a table of the results and of the settings that differ, with a column for each run, and a
    plot of the validation losses. For a model of another tool, its family and dtypes are shown as well; for an adapter
    of PEFT, its settings and dtypes.
    """
    from tinylm.formats.peft import is_adapter_folder
    from tinylm.models.open import find_model, is_foreign

    console = output.console()
    names = list(dict.fromkeys(runs or ()))
    if len(names) > len(LETTERS):
        raise UsageError(f"{len(names)} runs are too many for a comparison; name at most {len(LETTERS)}.")
    paths = [find_model(name, console) for name in names] or [newest_model(console, "runs")]
    found = []
    for path in dict.fromkeys(path if path.name else path.absolute() for path in paths):  # Path(".") has no name
        try:
            describe = (
                _describe_peft if is_adapter_folder(path) else _describe_foreign if is_foreign(path) else _describe_run
            )
            found.append(describe(path))
        except (TinyLMError, OSError) as error:
            if len(paths) == 1:
                raise
            console.warn(f"{path} is left out: {error}")
    if not found:
        raise TinyLMError("None of the runs can be read.")
    if console.as_json:
        for run in found:
            console.record(run.record)
    elif len(found) == 1:
        _print_run(console, found[0], all_settings)
    else:
        _print_comparison(console, found)


def _print_run(console: Console, run: _Described, all_settings: bool) -> None:
    print_fields(console, "run", run.summary, first=True)
    _print_curve(console, run)
    if run.sample:
        console.result("\nsample")
        for line in run.sample[:SAMPLE_CHARACTERS].splitlines()[:SAMPLE_LINES]:
            console.line(f"  {line}")
    console.result("\ncommands")
    more = {} if all_settings or not run.settings else {"settings": f"tinylm info {shell_quote(run.path)} --all"}
    for purpose, command in (run.record["commands"] | more).items():
        console.line(f"  {purpose + ':':<10} {command}", 13)
    for title, fields in run.settings.items() if all_settings else ():
        print_fields(console, title, fields)


def _print_curve(console: Console, run: _Described) -> None:
    step: Any = run.record.get("best_step")
    loss: Any = run.record.get("val_loss")
    has_best = run.validation and step is not None and loss is not None and abs(loss) < MAX_NUMBER
    curves = [("·", run.training), ("o", run.validation), ("*", [(step, loss)] if has_best else [])]
    _draw(console, "curve", curves)
    names = (f"training loss, {run.loss_unit}", f"validation loss, {run.loss_unit}")
    for (mark, points), name in zip(
        curves, (*names, f"best: {loss:.4f} at step {step:,}" if has_best else ""), strict=True
    ):
        if points:
            console.result(f"  {mark} {name}")


def _draw(console: Console, title: str, curves: Sequence[tuple[str, Points]]) -> None:
    """Print a title and a plot, if there are any points. curves: a mark, and the points that it is drawn at."""
    lines = draw(curves, min(terminal_columns(sys.stdout), MAX_PLOT_COLUMNS), PLOT_ROWS)
    for line in ["", title, *lines] if lines else ():
        console.result(line)


def draw(curves: Sequence[tuple[str, Points]], columns: int, rows: int) -> list[str]:
    """The lines of text of a plot of losses against steps: `rows` rows, and two more for the axis of steps.

    curves: a mark, and the points (step, loss) with finite values that it is drawn at, over those of earlier curves.

    The lines have at most `columns` characters, unless the labels need more room. The axis of losses is logarithmic if
    all are positive; its labels are the losses in the middle of rows. No lines if there are no points.
    """
    points = [point for _, curve in curves for point in curve]
    if not points:
        return []
    to_axis, from_axis = (math.log, math.exp) if min(loss for _, loss in points) > 0 else (float, float)
    steps, heights = [step for step, _ in points], [to_axis(loss) for _, loss in points]
    left, right, bottom, top = min(steps), max(steps), min(heights), max(heights)
    labels = [""] * rows
    for row in range(0, rows, LABEL_EVERY) if top > bottom else [rows // 2]:
        labels[row] = f"{from_axis(top - (top - bottom) * row / (rows - 1)):.4g}"
    margin = max(map(len, labels))
    width = max(columns - margin - 2, MIN_COLUMNS)
    cells = [[" "] * width for _ in range(rows)]
    for mark, curve in curves:
        for step, loss in curve:
            across = (step - left) / (right - left) if right > left else 0.5
            down = (top - to_axis(loss)) / (top - bottom) if top > bottom else 0.5
            cells[round(down * (rows - 1))][round(across * (width - 1))] = mark
    lines = [
        f"{label:>{margin}} {'┤' if label else '│'}{''.join(row)}".rstrip()
        for label, row in zip(labels, cells, strict=True)
    ]
    start, end = (f"{step:,.0f}" if step < 1e7 else f"{step:.3g}" for step in (left, right))
    end += " steps"
    return [*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {start}{end:>{width - len(start)}}"]


def _print_comparison(console: Console, runs: list[_Described]) -> None:
    letters = LETTERS[: len(runs)]
    console.result("runs")
    for letter, run in zip(letters, runs, strict=True):
        console.field(letter, str(run.path))
    console.result("\ncomparison")
    console.table(("", *letters), compare_records([run.record for run in runs]))
    scored: list[tuple[Any, Any]] = [(run.record.get("val_bits_per_byte"), run.record.get("val_loss")) for run in runs]
    in_bits = all(bits and loss for bits, loss in scored)
    scales = [bits / loss if in_bits else 1.0 for bits, loss in scored]
    curves = [
        (letter, [(step, loss * scale) for step, loss in run.validation])
        for letter, run, scale in zip(letters, runs, scales, strict=True)
    ]
    units = ", ".join(dict.fromkeys(run.loss_unit for run in runs))
    _draw(console, f"validation loss, {'bits per byte' if in_bits else units}", curves)
    tokenizers = [run.tokenizer for run in runs if run.tokenizer is not None]
    if not in_bits and not all(tokenizers[0].has_ids_of(tokenizer) for tokenizer in tokenizers[1:]):
        console.note(
            "The tokenizers differ, so the losses per token cannot be compared; tinylm compare shows bits per byte."
        )


def _describe_run(path: Path) -> _Described:
    from tinylm.run_directory.loading import read_model_config, read_tokenizer, summarise
    from tinylm.run_directory.metrics_log import iterate_metrics
    from tinylm.run_report.curves import read_curves, read_samples

    config, summary = read_model_config(path), summarise(path)
    curve = [point for point in iterate_metrics(path) if point.get("val_loss") is not None]
    tokenizer = read_tokenizer(path, config)
    curves = read_curves(path, POINTS, None)
    speeds = [speed for speed in curves["train"].get("tokens_per_second", ()) if speed is not None]
    record = {
        "run": str(path),
        **summary,
        "tokens": None if config.tokens_per_step is None else summary["step"] * config.tokens_per_step,
        "tokens_per_second": round(statistics.median(speeds)) if speeds else None,
        **_describe_config(config),
        "tokenizer": {"kind": config.tokenizer.kind, "vocab_size": tokenizer.vocab_size},
        "commands": use_commands(path, config),
        "curve": curve,
    }
    samples = read_samples(path, 1)
    tokens = {point["step"]: point.get("val_tokens") for point in curve}
    return _Described(
        path,
        record,
        _run_summary(config, record, tokens.get(summary["best_step"])),
        _settings(config, record),
        samples[-1]["text"] if samples else None,
        _points(curves["train"], "loss"),
        _points(curves["val"], "val_loss"),
        config.loss_unit,
        tokenizer,
    )


def _run_summary(config: RunConfig, record: dict[str, Any], tokens: int | None) -> dict[str, Any]:
    """tokens: on which the kept weights were evaluated after a stop; `None` if they were evaluated as usual"""
    adapter, data = config.adapter, config.data
    shown = {"run": record["run"], "kind": record["kind"], **_model_summary(config, record)}
    if adapter is not None:
        kind = f"LoRA of rank {adapter.rank}" if adapter.kind == "lora" else f"bottleneck of size {adapter.rank}"
        shown["adapter"] = f"{kind} on {', '.join(adapter.targets)}, for {adapter.base}"
    if data is not None:
        shown["text"] = f"{', '.join(data.corpus)}: {data.train_tokens:,} tokens to train on"
    done = [counted(record["step"], "step")]
    if record["tokens"] is not None:
        done.append(counted(record["tokens"], "token"))
    if record["seconds"] is not None:
        done.append(format_duration(record["seconds"]))
    if record["tokens_per_second"] is not None:
        done.append(f"{record['tokens_per_second']:,} tokens per second")
    shown["training"] = ", ".join(done)
    if record["val_loss"] is not None:
        loss = describe_loss(record["val_loss"], record.get("val_bits_per_byte"), config.loss_unit)
        which = f", on {tokens:,} tokens where training was stopped" if tokens else ", the best"
        shown["validation_loss"] = f"{loss}{which}, at step {record['best_step']:,}"
    elif config.training is not None:
        shown["weights"] = f"of step {record['best_step']:,}, not evaluated"
    return shown


def _model_summary(config: RunConfig, record: dict[str, Any]) -> dict[str, Any]:
    model = config.model
    own = "" if config.adapter is None else f"; {record['parameters']:,} in the adapter"
    return {
        "parameters": f"{record['parameters_by_part']['total']:,}{own}",
        "model": f"{model.architecture}, {counted(model.layers, 'layer')} x width {model.width}, "
        f"context {model.context:,}" + (f", {model.experts} experts" if model.experts > 1 else ""),
        "tokenizer": f"{record['tokenizer']['kind']}, {record['tokenizer']['vocab_size']:,} ids"
        + (", with a chat template" if config.tokenizer.chat_template is not None else ""),
    }


def _points(columns: dict[str, Any], name: str) -> Points:
    values = zip(columns["step"], columns.get(name, ()), strict=False)
    return [(step, value) for step, value in values if value is not None]


def _describe_foreign(path: Path) -> _Described:
    """The data of a Hugging Face folder or a GGUF file. Reads no weights."""
    from tinylm.models.open import read_foreign, run_config

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
        "commands": use_commands(path, config),
    }
    summary |= _model_summary(config, record)
    return _Described(path, record, summary, _settings(config, record), tokenizer=tokenizer)


def _describe_peft(path: Path) -> _Described:
    """The data of a PEFT adapter. Reads neither its weights nor its base model."""
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
    record = {**summary, "adapter": settings, "commands": commands}
    return _Described(path, record, summary | settings, {})


def _describe_config(config: RunConfig) -> dict[str, Any]:
    from tinylm.transformer.build import count_parameters

    return {"config": config.to_json(), "parameters_by_part": count_parameters(config.model)}


def _settings(config: RunConfig, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings by section, without those that have no effect on this run."""
    values = config.to_json()

    def effective(title: str) -> dict[str, Any]:
        part = getattr(config, title)
        return {} if part is None else {name: values[title][name] for name in part.effective()}

    size, has_template = record["tokenizer"]["vocab_size"], config.tokenizer.chat_template is not None
    runtime = {name: value for name, value in (values["runtime"] or {}).items() if value is not None}
    if (rate := runtime.pop("matmul_rate", None)) is not None:  # in the units of `tinylm doctor`
        runtime["matmul_tflops"] = round(rate / 1e12, 3)
    if (seconds := runtime.pop("layer_seconds", None)) is not None:
        runtime["layer_microseconds"] = round(seconds * 1e6, 1)
    sections = {
        "model": effective("model"),
        "parameters": record["parameters_by_part"],
        "adapter": effective("adapter"),
        "tokenizer": {**values["tokenizer"], "vocab_size": size, "chat_template": has_template},
        "data": effective("data"),
        "training": effective("training"),
        "runtime": runtime,
    }
    return {title: section for title, section in sections.items() if section}
