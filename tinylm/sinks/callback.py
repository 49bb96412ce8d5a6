"""A training callback that sends metrics to an experiment tracker, which runs in a process of its own.

The libraries of trackers print to stdout, register exit handlers, retry requests without a limit and raise exceptions
in background threads. In another process, none of this reaches the training, and the process can be killed.
"""

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tinylm import __version__
from tinylm.errors import UsageError
from tinylm.reporter import Reporter
from tinylm.sinks.process import TrackerProcess
from tinylm.training.events import Evaluated, Event, Logged, Started, metrics_record
from tinylm.validation import describe_value

FINISH_SECONDS = 30.0  # for a tracker to write or upload the rest at the end, before its process is killed
MAX_REASON = 300  # characters of a tracker's message in a warning


class TrackerKind(NamedTuple):
    """A supported tracker.

    package: name of the package and of its module. has_folder: whether its name can be followed by =DIR.
    remedy: what to do about a failure, as a clause.
    """

    package: str
    has_folder: bool
    remedy: str


TRACKERS = {
    "tensorboard": TrackerKind("tensorboardX", True, "make room in its folder, or name another folder in `log_to`"),
    "wandb": TrackerKind("wandb", False, "with WANDB_MODE=offline in the environment, it needs no network"),
    "trackio": TrackerKind("trackio", False, "without TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, it needs no network"),
}


class TrackerCallback:
    """Training callback that sends the metrics of a run to a tracker: each number of metrics.jsonl, at its step.

    name: "tensorboard", "tensorboard=DIR", "wandb" or "trackio"
    reporter: receives notes of the tracker, and a warning about its first failure, which does not end the training

    A resumed run continues its curve: wandb finds it by the id in config.json, the others by the name of the run
    directory.

    Raises UsageError for any other name, and for a package that is not installed.
    """

    def __init__(self, name: str, reporter: Reporter) -> None:
        self._name, separator, self._folder = name.partition("=")
        if self._name not in TRACKERS:
            raise UsageError(
                f"`log_to` is {describe_value(name)}; it must be tensorboard, tensorboard=DIR, wandb or trackio."
            )
        tracker = TRACKERS[self._name]
        if separator and not (tracker.has_folder and self._folder):
            raise UsageError(f"`log_to` is {describe_value(name)}; only tensorboard=DIR has a value.")
        if not is_installed(tracker.package):
            raise UsageError(
                f"`log_to` {self._name} needs a package; install it (pip install {tracker.package}), or leave it out."
            )
        self._remedy = tracker.remedy
        self._reporter = reporter
        self._process: TrackerProcess | None = None
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case Logged() | Evaluated() if self._process is not None:
                values = dict(flat_numbers(metrics_record(event)))
                step = values.pop("step")
                if not self._process.send({"step": step, "values": values, "time": time.time()}):
                    self._fail("it is slower than the training, and lacks some metrics")
        if self._process is not None:
            self._pass_on(self._process)

    def close(self) -> None:
        """Let the tracker write or upload the rest, for at most FINISH_SECONDS, and end its process."""
        process, self._process = self._process, None
        if process is None:
            return
        finished = process.finish(FINISH_SECONDS)
        if not finished:
            self._fail(f"it did not finish within {FINISH_SECONDS:.0f} s")
        else:
            self._pass_on(process)
        process.close()

    def _start(self, event: Started) -> None:
        first = {"name": self._name, "folder": self._folder or None, "run": describe_run(event)}
        try:
            self._process = TrackerProcess(first)
        except OSError as error:
            self._fail(f"its process cannot be started ({error.strerror or error})")

    def _pass_on(self, process: TrackerProcess) -> None:
        """Report the messages of the process, and an exit code that is not 0."""
        for message in process.messages():
            if "note" in message:
                self._reporter.note(f"{self._name}: {message['note']}")
            else:
                self._fail(message["problem"])
        if process.exit_code and not self._has_failed:
            self._fail(process.exit_reason())

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            reason = " ".join(reason.split())[:MAX_REASON].rstrip(".")
            self._reporter.warn(
                f"Logging to {self._name} failed: {reason}. Training is not affected, and metrics.jsonl is complete; "
                f"{self._remedy}."
            )
        self._has_failed = True


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
    """The numbers in JSON values, each with its path of keys, such as `gradient_norms/layers.0`."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from flat_numbers(value, f"{name}/{key}" if name else str(key))
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield name, values
