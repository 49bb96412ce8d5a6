"""A training callback that sends the metrics of a run to an experiment tracker: TensorBoard or Weights & Biases."""

import contextlib
import importlib.util
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tinylm import __version__
from tinylm.config.validation import describe_value
from tinylm.errors import UsageError
from tinylm.reporter import Reporter
from tinylm.training.events import Evaluated, Event, Logged, Started, metrics_record

MAX_REASON = 300  # characters of a tracker's message in a warning
TENSORBOARD_FOLDER = "tensorboard"
FLUSH_SECONDS = 1.0  # minimum time between two writes of TensorBoard's file
WANDB_PROJECT = "tinylm"
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
REMEDIES = {
    "tensorboard": "make room in its folder, or name another folder in `log_to`",
    "wandb": "with WANDB_MODE=offline in the environment, it needs no network",
}


class Tracker(Protocol):
    """Logs metrics to the library of a tracker. The methods may raise any exception."""

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def finish(self) -> None: ...


class TrackerCallback:
    """Training callback that sends the metrics of a run to a tracker: each number of metrics.jsonl, at its step.

    name: "tensorboard", "tensorboard=DIR" or "wandb"
    reporter: receives notes of the tracker, and a warning about its first exception, after which it gets nothing more

    A resumed run continues its curve: wandb finds it by the id in config.json, TensorBoard by the name of the run
    directory.

    Raises UsageError for any other name, and for a package that is not installed.
    """

    def __init__(self, name: str, reporter: Reporter) -> None:
        self._name, separator, self._folder = name.partition("=")
        if self._name not in PACKAGES:
            raise UsageError(f"`log_to` is {describe_value(name)}; it must be tensorboard, tensorboard=DIR or wandb.")
        if separator and not (self._name == "tensorboard" and self._folder):
            raise UsageError(f"`log_to` is {describe_value(name)}; only tensorboard=DIR has a value.")
        if not is_installed(package := PACKAGES[self._name]):
            raise UsageError(
                f"`log_to` {self._name} needs a package; install it (pip install {package}), or leave it out."
            )
        self._reporter = reporter
        self._tracker: Tracker | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._attempt(lambda: self._start(event))
            case Logged() | Evaluated() if (tracker := self._tracker) is not None:
                values = dict(flat_numbers(metrics_record(event)))
                self._attempt(lambda: tracker.log(int(values.pop("step")), values))

    def close(self) -> None:
        """Let the tracker write or upload the rest."""
        if (tracker := self._tracker) is not None:
            self._attempt(tracker.finish)
        self._tracker = None

    def _start(self, event: Started) -> None:
        run = describe_run(event)
        if self._name == "tensorboard":
            self._tracker = TensorBoard(Path(self._folder or TENSORBOARD_FOLDER) / run["name"], run["step"])
        else:
            self._tracker = Wandb(run, lambda text: self._reporter.note(f"wandb: {text}"))

    def _attempt(self, call: Callable[[], None]) -> None:
        """Call into a library. What it prints is dropped, and its first exception ends the logging."""
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                call()
        except (Exception, SystemExit) as error:
            self._tracker = None
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON].rstrip(".")
            self._reporter.warn(
                f"Logging to {self._name} failed: {reason}. Training is not affected, and metrics.jsonl is complete; "
                f"{REMEDIES[self._name]}."
            )


class TensorBoard:
    """Writes scalars to a new event file in `folder`, by tensorboardX.

    resumed_step: the step that a resumed run continues from; `None` for a new run

    The first event of a session is a `SessionLog.START` with the first step of the session. TensorBoard then drops the
    points of earlier sessions from that step on: all for a new run; for a resumed run, those after the step that it
    continues from.

    tensorboardX's SummaryWriter is not used: its thread ends when the disk is full, and then its queue blocks.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        # Sessions that begin in the same second have different files, which sort by time.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        first = 0 if resumed_step is None else resumed_step + 1
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=first, session_log=start))
        self._flushed = 0.0

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write an event with all values."""
        now = time.time()
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.write_event(self._event(wall_time=now, step=step, summary=self._summary(value=scalars)))
        if now >= self._flushed + FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = now

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """Logs to the wandb run with the id in config.json; wandb uploads from a process of its own.

    run: the result of `describe_run`.
    note: called with the URL of the run or, without a login, with the command that uploads it

    Without a login, unless WANDB_MODE is set, wandb records into ./wandb and uploads nothing. WANDB_PROJECT,
    WANDB_ENTITY and other variables of wandb apply. wandb ignores steps before the last one that it has, so no point of
    a resumed run is logged twice.
    """

    def __init__(self, run: dict[str, Any], note: Callable[[str], None]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports of wandb's own errors to its developers
        import wandb

        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        self._run = wandb.init(
            project=None if os.environ.get("WANDB_PROJECT") else WANDB_PROJECT,
            name=run["name"],
            id=run["id"],
            resume="allow",
            config=run["config"],
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        if self._run.url:
            note(str(self._run.url))
        elif offline:
            note(
                f"not logged in, so nothing is uploaded; wandb sync {self._run.dir.removesuffix('files')} does it later"
            )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log all values at a step."""
        self._run.log(values, step=step)

    def finish(self) -> None:
        """Upload the rest."""
        self._run.finish()


def is_installed(package: str) -> bool:
    """Whether the package is installed. A folder without modules, such as wandb's folder of runs, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def describe_run(event: Started) -> dict[str, Any]:
    """The data of a run that trackers receive, as JSON values.

    name: of the run directory. id: in config.json. step: the step that a resumed run continues from; `None` for a new
        run. config: the version of tinylm, and the settings of model, training and adapter, without the path of the
        adapter's base.
    """
    values = event.config.to_json()
    parts = {name: values[name] for name in ("model", "training", "adapter") if values[name] is not None}
    parts.get("adapter", {}).pop("base", None)
    return {
        "name": Path(event.path).resolve().name,
        "id": event.config.id,
        "step": event.resumed_step,
        "config": {"tinylm": __version__, **parts},
    }


def flat_numbers(values: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in JSON values, each with its path of keys, such as `expert_shares/0/1`."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from flat_numbers(value, f"{name}/{key}" if name else str(key))
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield name, values
