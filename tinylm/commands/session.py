"""A training session as the user sees it: the plan, progress, signals, and how it ended; shared by what trains."""

import contextlib
import dataclasses
import datetime
import functools
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinylm import __version__
from tinylm.commands.options import BudgetOptions, RhythmOptions, given
from tinylm.config import Budget, RunConfig, TrainingConfig
from tinylm.console import Console, duration
from tinylm.errors import InterruptedRunError, UsageError

if TYPE_CHECKING:
    from tinylm.model.decoder import Decoder
    from tinylm.plan import Plan
    from tinylm.training.trainer import Outcome

SAMPLE_SECONDS = 20.0  # at least, between two samples shown during training
OVERFIT = 0.01  # nats above the best validation loss that are worth a word
REASONS = {
    "steps": "all steps are done",
    "epochs": "all epochs are done",
    "time": "the time is up",
    "patience": "the validation loss has stopped improving",
}


def process_start() -> float:
    """When this process began, on the clock of time.monotonic(): until now it has computed without a pause."""
    return time.monotonic() - time.process_time()


def new_run_config(**parts: Any) -> RunConfig:
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return RunConfig(version=__version__, created=created, **parts)


def chosen_budget(options: BudgetOptions) -> Budget | None:
    """`None` when the user gave no budget. Raises UsageError for more than one."""
    values = {name: value for name, value in given(options).items() if name != "patience"}
    return Budget(**values) if values else None


def given_patience(options: BudgetOptions) -> dict[str, int]:
    return {} if options.patience is None else {"patience": options.patience}


@contextlib.contextmanager
def new_run_at(path: Path, force: bool) -> Iterator[Path]:
    """The hidden folder in which a run is prepared. A run that ends before its first save leaves no trace.

    Raises UsageError when there is something at the path that must not be overwritten.
    """
    from tinylm.checkpoint import check_free, preparation_folder

    check_free(path, force)
    missing = [folder for folder in path.absolute().parents if not folder.exists()]
    try:
        yield preparation_folder(path)
    finally:
        shutil.rmtree(preparation_folder(path), ignore_errors=True)
        for folder in missing:
            with contextlib.suppress(OSError):  # which a folder that holds something raises
                folder.rmdir()


def show_plan(console: Console, plan: "Plan", config: RunConfig, reasons: str) -> None:
    model, training, data = plan.model, plan.training, config.data
    assert data is not None
    passes = plan.steps * training.batch_size * model.context / data.train_tokens
    micro = f", {training.micro_batch} at a time" if training.micro_batch < training.batch_size else ""
    about = "about " if training.budget.time is not None else ""
    lines = {
        "device": reasons + ("; compiled" if plan.runtime.compile else ""),
        "tokenizer": f"{config.tokenizer.kind}, {model.vocab_size:,} ids",
        "text": f"{data.train_tokens:,} tokens to train on, {data.val_tokens:,} to validate with",
        "model": f"{plan.parameters:,} parameters: {model.layers} layers, {model.heads} heads, width {model.width}, "
        f"context {model.context}",
        "batch": f"{training.batch_size} sequences a step{micro}",
        "length": f"{about}{plan.steps:,} steps, {passes:.1f} passes over the text",
        "time": f"about {duration(plan.seconds)}",
        "memory": f"about {plan.memory / 2**20:,.0f} MB",
    }
    for name, text in lines.items():
        console.note(f"{name + ':':<10} {text}")
    for notice in plan.notices:
        console.warn(notice)


def run_session(
    console: Console,
    path: Path,
    parameters: int,
    session: Callable[..., "Outcome"],
    command: str,
    sample: Callable[[], str],
) -> None:
    """Train with progress and signals; print the run's path, or with --json what became of it.

    `command` is the one that resumes, without the path. Raises InterruptedRunError when a signal stopped it.
    """
    from tinylm.training.signals import stop_on_signals

    with stop_on_signals() as stop, console.progress() as show:
        outcome = session(report=_Reporter(console, show, sample), check_stop=stop.check)
    state = outcome.state
    if outcome.stopped_by == "signal":
        message = f"Stopped at step {state.step}, and all of it is saved. Go on with: {command} {quoted(path)}"
        if state.evaluated < 0:
            message = "Stopped before the first save; nothing was written."
        raise InterruptedRunError(message, stop.signal_number)
    assert state.best_loss is not None and state.val_loss is not None
    console.note(f"Stopped at step {state.step}: {REASONS[outcome.stopped_by]}.")
    if state.val_loss > state.best_loss + OVERFIT:
        console.warn(
            f"The validation loss rose from {state.best_loss:.4f} at step {state.best_step} to {state.val_loss:.4f}: "
            "the model began to learn the text by heart. The best weights are the ones kept."
        )
    console.note(f"Best validation loss: {state.best_loss:.4f} nats a token, at step {state.best_step}.")
    if console.as_json:
        console.record(
            {
                "run": str(path),
                "step": state.step,
                "val_loss": state.val_loss,
                "best_step": state.best_step,
                "best_val_loss": state.best_loss,
                "parameters": parameters,
                "seconds": round(state.seconds, 3),
                "stopped_by": outcome.stopped_by,
            }
        )
    else:
        console.result(str(path))


class _Reporter:
    """Turns the trainer's events into a line of progress, JSON records and now and then a sample."""

    def __init__(self, console: Console, show: Callable[[float, str], None], sample: Callable[[], str]) -> None:
        self._console = console
        self._show = show
        self._sample = sample
        self._sampled = time.monotonic()
        self._read = console.as_json  # whether someone reads the records
        self._loss = self._val_loss = self._speed = ""

    def __call__(self, event: Any) -> None:
        from tinylm.training.session import metrics_record
        from tinylm.training.trainer import Evaluated, Logged, Notice, Stepped

        match event:
            case Stepped():
                self._show(event.progress, f"step {event.step}{self._loss}{self._val_loss}{self._speed}")
            case Logged():
                self._loss = f"  loss {event.loss:.3f}"
                self._speed = f"  {event.tokens_per_second:,.0f} tok/s"
            case Evaluated():
                self._val_loss = f"  val {event.val_loss:.3f}"
                self._maybe_sample(event.step)
            case Notice():
                self._console.warn(event.message)
        if self._read and isinstance(event, Logged | Evaluated):
            try:
                self._console.record(metrics_record(event))
            except BrokenPipeError:
                self._read = False  # the reader has seen enough; the run goes on

    def _maybe_sample(self, step: int) -> None:
        if self._console.on_terminal and step and time.monotonic() - self._sampled >= SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self._console.note(f"\nstep {step}{self._val_loss}\n{self._sample()}\n")


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


def sampled_text(model: "Decoder", tokenizer: Any, config: RunConfig, tokens: int = 120) -> str:
    """A short sample to look at while training; it does not touch the trainer's random numbers."""
    import torch

    from tinylm.inference.generator import generate
    from tinylm.inference.sampler import Sampler, Sampling
    from tinylm.inference.text import start_tokens

    device = model.embedding.weight.device
    was_training = model.training
    model.eval()
    sampler = Sampler(Sampling(), 0, 1, device, tokenizer.vocab_size)
    with torch.compiler.set_stance("force_eager"):
        ids = [row[0] for row in generate(model, [start_tokens(tokenizer, config.data, [])], sampler, tokens)]
    model.train(was_training)
    return str(tokenizer.decode(ids))


def resume_run(
    console: Console,
    path: Path,
    budget: BudgetOptions,
    rhythm: RhythmOptions,
    command: str,
    base: Path | None = None,
) -> None:
    """Go on with a run from its last save, with what was decided when it began; budget and rhythm may change.

    `base` is where an adapter's base is now, if it was moved.
    """
    from tinylm.adapters.load import load_base
    from tinylm.adapters.lora import add_lora, load_adapter_tensors
    from tinylm.checkpoint import RunFolder, read_config, read_tokenizer, restore_model
    from tinylm.device import choose_device
    from tinylm.text.prepare import reopen_tokens
    from tinylm.training.session import train_session

    started = process_start()
    config = read_config(path)
    if config.training is None or config.runtime is None or config.data is None:
        raise UsageError(
            f"{path} was not trained but merged; begin a run from it with tinylm train --init-from {path}."
        )
    choose_device(config.runtime.device)
    run = RunFolder(path)
    save = run.load_last(config)
    tokenizer = read_tokenizer(path, config)
    with console.counting("reading", config.data.characters, "characters") as advance:
        tokens = reopen_tokens(path, config.data, tokenizer, advance)
    changes = {**given(rhythm), **given_patience(budget)}
    if (new_budget := chosen_budget(budget)) is not None:
        changes["budget"] = new_budget
    training: TrainingConfig = dataclasses.replace(config.training, **changes)
    runtime = config.runtime
    config = dataclasses.replace(config, training=training)
    if config.adapter is None:
        model = restore_model(config, save.weights)
    else:
        model, _, _ = load_base(path, config.adapter, base, "cpu")
        add_lora(model, config.adapter)
        load_adapter_tensors(model, save.weights)
    console.note(f"Going on with {path} at step {save.state['step']}, on {runtime.device} in {runtime.dtype}.")
    session = functools.partial(train_session, run, config, model, tokens, resume_from=save, started=started)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    run_session(console, path, trained, session, command, lambda: sampled_text(model, tokenizer, config))
