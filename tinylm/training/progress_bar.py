"""What a Python program shows of its training to someone who watches it, in a notebook or a terminal."""

import contextlib
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TextIO, cast

from tqdm.auto import tqdm

from tinylm.config.run import describe_loss
from tinylm.reporter import LogReporter, shorten_number
from tinylm.training.events import Event, Notice, Planned, Started, Stepped
from tinylm.training.progress import RunProgress, plan_lines
from tinylm.training.result import STOP_REASONS, TrainingResult

BAR = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}  {desc}"
COUNT = "{desc} {elapsed}"  # of work whose amount is not known
INTERVAL = 0.5  # seconds between two states of a bar
NOTEBOOK_COLUMNS, BAR_COLUMNS = 120, 36  # of a line, and of the bar with its times


def watched_stream() -> TextIO | None:
    """Where somebody sees progress: the standard output of a notebook, or standard error if it is a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None and "IPKernelApp" in shell.config:
        return sys.stdout
    try:
        return cast(TextIO, _Terminal(sys.stderr)) if sys.stderr.isatty() else None
    except (AttributeError, ValueError):  # `None`, as on Windows without a console; an object with `write` only; closed
        return None


class _Terminal:
    """A stream whose failed writes are dropped, so that training goes on after its terminal has been closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same terminal, so that tqdm clears the bar before others write there."""
        return getattr(other, "_stream", other) is self._stream

    __hash__ = object.__hash__


class ProgressBar(LogReporter):
    """Reporter and training callback that writes the plan, notes and a bar to `stream`; its context ends the bar.

    If the program handles the records of the logger `tinylm`, notes and warnings go there instead.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._bars = contextlib.ExitStack()
        self._bar: Any = None
        self._progress: RunProgress

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.close()

    def note(self, message: str) -> None:
        if logging.getLogger("tinylm").hasHandlers():
            super().note(message)
        else:
            self._write(message)

    def warn(self, message: str) -> None:
        if logging.getLogger("tinylm").hasHandlers():
            super().warn(message)
        else:
            self._write(f"Warning: {message}")

    def _write(self, line: str) -> None:
        tqdm.write(line, file=self._stream)

    def _new_bar(self, bar_format: str, total: float | None, leave: bool) -> Any:
        options = {"dynamic_ncols": True, "mininterval": INTERVAL, "leave": leave}
        return tqdm(total=total, bar_format=bar_format, file=self._stream, **options)

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        """Context manager for the progress of work that is counted, as a bar that vanishes."""
        with self._new_bar(BAR if total else COUNT, total or None, leave=False) as bar:

            def advance(count: int) -> None:
                bar.set_description_str(f"{what}: {shorten_number(bar.n + count)} {unit}", refresh=False)
                bar.update(count)

            yield advance

    def __call__(self, event: Event) -> None:
        match event:
            case Planned():
                for notice in event.plan.notices:
                    self.warn(notice)
                for name, text in plan_lines(event.plan, event.config, event.parameters).items():
                    self._write(f"{name + ':':<10} {text}")
            case Started():
                self._progress = RunProgress(event)
                self._bar = self._bars.enter_context(self._new_bar(BAR, 1.0, leave=True))
            case Stepped():
                fields = self._progress.describe(event).split("  ")
                room = shutil.get_terminal_size((NOTEBOOK_COLUMNS, 0)).columns - BAR_COLUMNS
                while len(fields) > 1 and len("  ".join(fields)) > room:
                    fields.pop()
                self._bar.set_description_str("  ".join(fields), refresh=False)
                self._bar.update(min(event.progress, 1.0) - self._bar.n)
            case Notice():
                self.warn(event.message)
            case _ if self._bar is not None:
                self._progress.update(event)

    def finish(self, result: TrainingResult) -> None:
        """End the bar, and write why training stopped and where the run is."""
        if self._bar is not None and result.stopped_by != "signal":
            self._bar.update(1.0 - self._bar.n)
        self._bars.close()
        stopped = f"Stopped at step {result.step:,}: {STOP_REASONS[result.stopped_by]}."
        if result.stopped_by == "signal":
            self._write(f"{stopped} The run is saved; resume={str(result.run)!r} continues it.")
        elif result.best_val_loss is not None:
            best = describe_loss(result.best_val_loss, result.best_val_bits_per_byte, result.loss_unit)
            self._write(f"{stopped} Best validation loss: {best}, at step {result.best_step:,}. Saved in {result.run}.")
