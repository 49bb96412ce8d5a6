"""A training session as the user sees it: progress, signals, and how it ended; shared by what trains."""

import functools
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinylm.config import RunConfig
from tinylm.console import Console
from tinylm.errors import ClosedOutputError, InterruptedRunError, OutputError, TinyLMError, is_out_of_memory

if TYPE_CHECKING:
    from tinylm.checkpoint import LastSave, RunFolder
    from tinylm.model.stack import Transformer
    from tinylm.text.dataset import TokenFolder
    from tinylm.text.tokenizer import Tokenizer

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


def run_session(
    console: Console,
    run: "RunFolder",
    config: RunConfig,
    model: "Transformer",
    tokens: "TokenFolder",
    tokenizer: "Tokenizer",
    *,
    command: str,
    started: float,
    resume_from: "LastSave | None" = None,
) -> None:
    """Train with progress and signals; print the run's path, or with --json what became of it.

    `command` is the tinylm command that resumes such a run. Raises InterruptedRunError when a signal stopped it.
    """
    from tinylm.tasks import make_task
    from tinylm.training.session import train_session
    from tinylm.training.signals import stop_on_signals

    assert config.training is not None
    task = make_task(tokens, tokenizer, config.model, config.training)
    sample = functools.partial(sampled_text, model, tokenizer, config)
    with stop_on_signals() as stop, console.progress() as show:
        reporter = _Reporter(console, show, sample)
        outcome = train_session(
            run,
            config,
            model,
            task,
            resume_from=resume_from,
            report=reporter,
            check_stop=stop.check,
            started=started,
        )
    state = outcome.state
    if stop.signal_number and outcome.stopped_by != "signal":
        message = f"Stopped at step {state.step}: {REASONS[outcome.stopped_by]}, and all of it is saved in {run.path}."
        raise InterruptedRunError(message, stop.signal_number)
    if outcome.stopped_by == "signal":
        message = (
            f"Stopped at step {state.step}, and all of it is saved. Go on with: {command} --resume {quoted(run.path)}"
        )
        if state.evaluated < 0:
            message = "Stopped before the first save; nothing was written."
        raise InterruptedRunError(message, stop.signal_number)
    assert state.best_loss is not None and state.val_loss is not None
    console.note(f"Stopped at step {state.step}: {REASONS[outcome.stopped_by]}.")
    passes = state.step / task.steps_per_epoch
    if state.val_loss > state.best_loss + OVERFIT:
        reason = "the model began to learn the text by heart" if passes > 1 else "a lower --lr may help"
        console.warn(
            f"The validation loss rose from {state.best_loss:.4f} at step {state.best_step} to {state.val_loss:.4f}: "
            f"{reason}. The best weights are the ones kept."
        )
    console.note(f"Best validation loss: {state.best_loss:.4f} nats a token, at step {state.best_step}.")
    try:
        if reporter.failure is not None:
            raise reporter.failure
        if console.as_json:
            console.record(
                {
                    "run": str(run.path),
                    "step": state.step,
                    "val_loss": state.val_loss,
                    "best_step": state.best_step,
                    "best_val_loss": state.best_loss,
                    "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
                    "seconds": round(state.seconds, 3),
                    "stopped_by": outcome.stopped_by,
                }
            )
        else:
            console.result(str(run.path))
    except ClosedOutputError:
        raise
    except OutputError as error:
        raise TinyLMError(f"The run is complete and saved in {run.path}. {error}") from error


class _Reporter:
    """Turns the trainer's events into a line of progress, JSON records and now and then a sample."""

    def __init__(self, console: Console, show: Callable[[float, str], None], sample: Callable[[], str | None]) -> None:
        self._console = console
        self._show = show
        self._sample = sample
        self._sampled = time.monotonic()
        self._loss = self._val_loss = self._speed = ""
        self.failure: OutputError | None = None  # why the records stopped; the run goes on without them

    def __call__(self, event: Any) -> None:
        from tinylm.training.session import metrics_record
        from tinylm.training.trainer import Evaluated, Logged, Notice, Stepped

        match event:
            case Stepped():
                fields = (self._loss, self._val_loss, f"step {event.step}", self._speed)
                self._show(event.progress, "  ".join(filter(None, fields)))  # the most important first
            case Logged():
                self._loss = f"loss {event.loss:.3f}"
                self._speed = f"{event.tokens_per_second:,.0f} tok/s"
            case Evaluated() if event.step:  # at step 0 nothing has been learned
                self._val_loss = f"val {event.val_loss:.3f} @{event.step}"
                self._maybe_sample(event)
            case Notice():
                self._console.warn(event.message)
        if self._console.as_json and self.failure is None and isinstance(event, Logged | Evaluated):
            try:
                self._console.record(metrics_record(event))
            except OutputError as error:
                self.failure = error

    def _maybe_sample(self, event: Any) -> None:
        if self._console.on_terminal and time.monotonic() - self._sampled >= SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            if (sample := self._sample()) is not None:
                self._console.note(f"\nstep {event.step}  val {event.val_loss:.3f}\n{sample}\n")


def quoted(path: Path) -> str:
    return shlex.quote(str(path))


def sampled_text(model: "Transformer", tokenizer: "Tokenizer", config: RunConfig, tokens: int = 120) -> str | None:
    """A short sample to look at while training; it does not touch the trainer's random numbers.

    `None` for a model that does not write by itself, and out of memory: no sample is worth a run.
    """
    from tinylm.inference.generator import generate
    from tinylm.inference.sampler import Sampler, Sampling
    from tinylm.inference.text import start_tokens
    from tinylm.model.decoder import Decoder
    from tinylm.training.eager import eagerly

    if not isinstance(model, Decoder):
        return None
    was_training = model.training
    model.eval()
    sampler = Sampler(Sampling(), 0, 1, model.device, tokenizer.vocab_size)
    try:
        with eagerly():
            ids = [row[0] for row in generate(model, [start_tokens(tokenizer, config.data, [])], sampler, tokens)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        model.train(was_training)
    return tokenizer.decode(ids)
