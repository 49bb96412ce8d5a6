"""A run before it begins: its folder, its text in tokens, and its plan; shared by what trains, and by merging."""

import contextlib
import datetime
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tinylm import __version__
from tinylm.commands.groups import given
from tinylm.commands.options import BudgetOptions, LearningOptions
from tinylm.commands.reading import encode_text
from tinylm.config import AdapterConfig, Budget, ModelConfig, RunConfig, TokenizerConfig
from tinylm.console import Console, duration

if TYPE_CHECKING:
    from tinylm.cost import Machine
    from tinylm.plan import Plan
    from tinylm.text.dataset import TokenFolder
    from tinylm.text.prepare import Reading
    from tinylm.text.tokenizer import Tokenizer


def new_run_config(**parts: Any) -> RunConfig:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return RunConfig(version=__version__, created=created, **parts)


def chosen_budget(options: BudgetOptions) -> Budget | None:
    """`None` when the user gave no budget. Raises UsageError for more than one."""
    values = {name: value for name, value in given(options).items() if name != "patience"}
    return Budget(**values) if values else None


@contextlib.contextmanager
def new_run_at(path: Path, force: bool) -> Iterator[Path]:
    """The hidden folder in which a run is prepared. A run that ends before its first save leaves no trace.

    Raises UsageError when there is something at the path that must not be overwritten, or being written.
    """
    from tinylm.place import check_free, only_user, preparation_folder

    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        with only_user(path):
            check_free(path, force)
            try:
                yield preparation_folder(path)
            finally:
                shutil.rmtree(preparation_folder(path), ignore_errors=True)
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # which a folder that holds something raises
                folder.rmdir()


@contextlib.contextmanager
def dry_run_at(console: Console, path: Path, force: bool) -> Iterator[Path]:
    """A temporary folder to plan a run in. Nothing is written at the path; what keeps a run from it is said."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())) and not force:
        console.note(f"{path} is already there: to train, replace it with --force or choose another --out.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class NewRun(NamedTuple):
    tokens: "TokenFolder"
    plan: "Plan"
    config: RunConfig


def plan_run(
    console: Console,
    machine: "Machine",
    reading: "Reading",
    tokenizer: "Tokenizer",
    preparation: Path,
    learning: LearningOptions,
    budget: Budget | None,
    *,
    model: dict[str, Any],
    base: ModelConfig | None = None,
    adapter: AdapterConfig | None = None,
) -> NewRun:
    """Encode the text and plan the training on it; `model`, `base` and `adapter` are those of a plan."""
    from tinylm.plan import plan_training
    from tinylm.text.pairs import PairContexts

    tokens, data = encode_text(console, reading, tokenizer, preparation)
    plan = plan_training(
        machine,
        data,
        tokenizer.vocab_size,
        model=model,
        training=learning.training(),
        budget=budget,
        compile=learning.compiling.compile,
        base=base,
        adapter=adapter,
        pair_contexts=PairContexts.of(tokens, tokenizer.end_of_text) if data.kind == "pairs" else None,
    )
    config = new_run_config(
        model=plan.model,
        tokenizer=TokenizerConfig(kind=tokenizer.kind, sha256=tokenizer.sha256),
        data=data,
        training=plan.training,
        runtime=plan.runtime,
        adapter=adapter,
    )
    return NewRun(tokens, plan, config)


def show_plan(console: Console, plan: "Plan", config: RunConfig, trained: int, *, as_result: bool) -> None:
    """The plan on stderr, before a run; as the result of a command, on stdout. `trained` parameters change."""
    for notice in plan.notices:
        console.warn(notice)
    if as_result and console.as_json:
        console.record(_plan_record(plan, config, trained))
        return
    for name, text in _plan_lines(plan, config, trained).items():
        say = console.result if as_result else console.note
        say(f"{name + ':':<10} {text}")


def _plan_lines(plan: "Plan", config: RunConfig, trained: int) -> dict[str, str]:
    model, training, data = plan.model, plan.training, config.data
    assert data is not None
    micro = f", {training.micro_batch} at a time" if training.micro_batch < training.batch_size else ""
    about = "about " if training.budget.time is not None else ""
    lines = {
        "tokenizer": f"{config.tokenizer.kind}, {model.vocab_size:,} ids",
        "text": f"{data.train_tokens:,} tokens to train on, {data.val_tokens:,} to validate with"
        + (f"; {data.train_pairs:,} pairs" if data.train_pairs else ""),
        "model": f"{plan.parameters:,} parameters: {model.layers} layers, {model.heads} heads, width {model.width}, "
        f"context {model.context}" + ("" if model.tie else ", untied") + (", compiled" if plan.runtime.compile else ""),
        "batch": f"{training.batch_size} sequences a step{micro}",
        "length": f"{about}{plan.steps:,} steps, {plan.passes:.1f} passes over the text",
        "time": f"about {duration(plan.seconds)}",
        "memory": f"about {plan.memory / 2**20:,.0f} MB",
    }
    if config.adapter is not None:
        inside = {"lora": "rank {} on", "bottleneck": "{} features after"}[config.adapter.kind]
        targets = ", ".join(config.adapter.targets)
        lines["adapter"] = f"{inside.format(config.adapter.rank)} {targets}: {trained:,} parameters"
    return lines


def _plan_record(plan: "Plan", config: RunConfig, trained: int) -> dict[str, Any]:
    values = config.to_json()
    parts = {name: values[name] for name in ("model", "tokenizer", "data", "training", "runtime", "adapter")}
    cost = {"steps": plan.steps, "seconds": round(plan.seconds, 1), "memory": plan.memory}
    return {"parameters": trained, **cost, **parts}
