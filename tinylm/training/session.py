"""A session of a run in one process: what it reports to, the signals that stop it, and its training.

The first signal (Ctrl-C, SIGTERM) saves the run and stops; a second one stops at once. The signal handlers outside of
training are in `tinylm.system.process_signals`.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tinylm.errors import InterruptedRunError
from tinylm.machine.measure import LoadMeter, LoadNotes
from tinylm.reporter import LogReporter, Reporter
from tinylm.run_directory.loading import summarise
from tinylm.run_directory.metrics_log import History
from tinylm.system.process_signals import catchable_signals
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.training.events import Event, EventCallback, Started, Stepped
from tinylm.training.result import TrainingResult
from tinylm.training.run import TrainingRun
from tinylm.training.trainer import StopTraining

# A second signal within these seconds counts as a copy of the first, as a shell or timeout(1) may send it. With
# torchrun, a scheduler may send one to all processes of a job, and torchrun another one.
DUPLICATE_SECONDS, SHARED_DUPLICATE_SECONDS = 0.5, 5.0


class StopRequest:
    """Records the signal that stops training: `signal_number` is the first signal received, or 0.

    After `check`, it is the same on all ranks.

    ranks: the processes of the run, which stop together if one of them receives a signal
    """

    def __init__(self, ranks: Ranks, now: Callable[[], float] = time.monotonic) -> None:
        self.signal_number = 0
        self._ranks, self._now = ranks, now
        self._duplicate_seconds = DUPLICATE_SECONDS if ranks.is_alone else SHARED_DUPLICATE_SECONDS
        self._received = 0.0
        self._checked = False

    def check(self) -> None:
        """Raise StopTraining if a signal was received by any rank."""
        self._checked = True
        received = [number for number in self._ranks.gather(self.signal_number) if number]
        if received:
            if not self.signal_number:
                self._received = self._now()
            self.signal_number = received[0]
            raise StopTraining

    def receive(self, number: int) -> bool:
        """Record a signal. Returns whether to stop at once, without a save.

        True for a second signal that is no copy of the first (see DUPLICATE_SECONDS), and for a signal before the first
        `check`: there is nothing to save yet, and compiling the model may take a minute.
        """
        if not self._checked:
            return True
        now = self._now()
        if not self.signal_number:
            self.signal_number, self._received = number, now
            return False
        return now - self._received > self._duplicate_seconds


@contextlib.contextmanager
def stop_on_signals(
    numbers: Collection[int], ranks: Ranks = ONE_RANK, now: Callable[[], float] = time.monotonic
) -> Iterator[StopRequest]:
    """Context manager that yields a StopRequest, which records the first of the given signals.

    If `receive` returns True, the previous handler is called, and KeyboardInterrupt is raised if it returns. Ignored
    signals (nohup, background jobs of a script) stay ignored. Does nothing outside of the main thread, the only one in
    which Python handles signals.
    """
    request = StopRequest(ranks, now)
    in_main_thread = threading.current_thread() is threading.main_thread()
    handled = [number for number in catchable_signals() if number in numbers] if in_main_thread else []
    before: dict[int, Any] = {number: signal.getsignal(number) for number in handled}

    def handle(number: int, frame: FrameType | None) -> None:
        if request.receive(number):
            if callable(before[number]):
                before[number](number, frame)
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Session:
    """How one process reports and stops a run.

    reporter: receives notes, warnings and progress
    callbacks: each is called with every event
    started: `time.monotonic()` from which the training time of this process counts
    stop_signals: the first of these signals saves the run and ends training; a second one has its usual effect
    ranks: the processes that train the model together; only rank 0 reports
    """

    reporter: Reporter = field(default_factory=LogReporter)
    callbacks: Sequence[EventCallback] = ()
    started: float = field(default_factory=time.monotonic)
    stop_signals: Sequence[int] = (signal.SIGINT,)
    ranks: Ranks = ONE_RANK

    def report(self, event: Event) -> None:
        """Call each callback with the event, on rank 0."""
        for callback in self.callbacks if self.ranks.is_first else ():
            callback(event)


def train_session(run: TrainingRun, session: Session) -> TrainingResult:
    """Train a run, new or resumed, until it stops. Its directory is written and locked.

    All ranks call this together: rank 0 after `share_run`, the others with the run from `receive_run`.

    Raises InterruptedRunError if a signal stops it before the first step, and the errors of `TrainingRun.train`.
    """
    # What callbacks and the user learn first
    resumed_step = None if run.resume_from is None else run.resume_from.state["step"]
    started = Started(
        run.directory.path,
        run.config,
        run.model,
        run.tokenizer,
        steps_per_epoch=run.task.steps_per_epoch,
        best=run.best,
        resumed_step=resumed_step,
    )
    session.report(started)
    if run.runtime.compile:
        session.reporter.note("Compiling the model, which takes about a minute.")

    # Other processes that slow down training on a CPU
    load_notes = None
    if run.runtime.device == "cpu" and session.ranks.is_first:
        processes = session.ranks.launch.local_size
        load_notes = LoadNotes(
            session.reporter.note,
            LoadMeter(processes),
            threads=processes * session.ranks.share_threads(run.runtime.threads),
            timed=run.training.budget.time is not None,
            planned_steps=run.config.planned.steps if run.config.planned and run.resume_from is None else None,
        )

    # Training
    def report(event: Event) -> None:
        session.report(event)
        if isinstance(event, Stepped) and load_notes is not None:
            load_notes.step(event.step, event.progress)

    with stop_on_signals(session.stop_signals, session.ranks) as stop:
        stopped_by, state = run.train(report, stop.check, started=session.started)
    session.ranks.gather(None)  # wait until rank 0 has saved the run; if it fails, all ranks fail
    if state.step == 0:
        raise InterruptedRunError(InterruptedRunError.BEFORE_FIRST_STEP, stop.signal_number)

    # The result, over all sessions
    is_joined = (state.joined_step, state.joined_loss) == (state.step, state.best_loss)
    val_loss = state.joined_loss if is_joined else state.val_loss
    joins = run.training.join > 1  # then the size of the model that is kept depends on the losses
    parameters = summarise(run.directory.path)["parameters"] if joins else run.trainable_parameters
    return TrainingResult(
        run=run.directory.path,
        history=History.read(run.directory.path),
        stopped_by=stopped_by,
        step=state.step,
        epochs=state.step / run.task.steps_per_epoch,
        val_loss=val_loss,
        best_val_loss=state.best_loss,
        best_step=state.best_step,
        kept_step=state.best_step if run.training.keep == "best" else state.last_eval_step,
        parameters=parameters,
        seconds=state.seconds,
        val_bits_per_byte=run.config.bits_per_byte(val_loss),
        best_val_bits_per_byte=run.config.bits_per_byte(state.best_loss),
        signal_number=stop.signal_number,
        base=None if run.config.adapter is None else Path(run.config.adapter.base),
        loss_unit=run.config.loss_unit,
    )
