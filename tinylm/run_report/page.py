"""The report as one HTML file that needs no network and runs no code but its own.

Its content is collected as plain values: curves, samples and settings of runs, and results of their models. They are a
JSON block; the script inserts its strings as text. A content security policy admits only the scripts and styles of this
package, by their hashes, and forbids network requests.
"""

import datetime
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tinylm import __version__
from tinylm.config.run import RunConfig
from tinylm.config.settings import format_duration
from tinylm.config.validation import require
from tinylm.errors import TinyLMError, UsageError
from tinylm.machine.torch_settings import usual_settings
from tinylm.models.load import load
from tinylm.reporter import LogReporter, Reporter, counted
from tinylm.run_directory.layout import find_run, newest_model
from tinylm.run_directory.loading import read_model_config, summarise
from tinylm.run_report.curves import number, read_curves, read_samples
from tinylm.run_report.predictions import ModelOptions, describe_model
from tinylm.system.files import check_replaceable, write_text
from tinylm.system.html import encode_json, security_policy
from tinylm.training.events import Evaluated, Event, Logged, Sampled, Started, Stepped
from tinylm.transformer.build import count_parameters

MAX_RUNS = 24
# Limits for all runs together, which keep a page below 2 MB: points of a curve, samples, bytes of attention maps.
POINTS, SAMPLES, MAP_BYTES = 4000, 240, 400_000
MAX_POINTS, MAX_SAMPLES = 1000, 120  # of one run
MAX_VALUE, MAX_DIGEST = 300, 12  # characters of a setting, and of one whose name ends with one of DIGESTS
DIGESTS = ("sha256", "digest", "fingerprint")

MARK = re.compile(b"<title>tinylm report</title>")

Run = dict[str, Any]


@usual_settings()
def report(
    runs: str | Path | Sequence[str | Path] | None = None,
    out: str | Path = "report.html",
    *,
    prompt: str | None = None,
    memorisation: bool | None = None,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> Path:
    """Write an HTML file about runs: curves, samples, attention, loss per token, evaluation, memorisation, settings.

    runs: run directories or names under checkpoints/. Default: the newest model.
    out: the file; an earlier report there is replaced.
    prompt: text of the attention maps. Default: the beginning of the validation text.
    memorisation: whether to measure it. Default: with 20 samples, if model and text are small.
    device: as in `load`. reporter: receives notes, warnings and progress. Default: the logger `tinylm`.

    Returns the path of the file. Raises UsageError for runs that cannot be used and for another file at `out`, and
    TinyLMError for damaged runs and a file that cannot be written.
    """
    named = [runs] if isinstance(runs, str | Path) else runs or ()
    options = ModelOptions(prompt, memorisation, device)
    write_report([Path(run) for run in named], Path(out), options, reporter or LogReporter())
    return Path(out)


def write_report(runs: Sequence[Path], out: Path, options: ModelOptions, reporter: Reporter) -> list[str]:
    """Write a report on these runs, or on the newest model, and return their names in it; errors are of `report`."""
    check_path(out)
    paths = [find_run(run, reporter) for run in runs] if runs else [newest_model(reporter, "runs")]
    content = collect_report(list(dict.fromkeys(paths)), reporter, options)
    try:
        write_page(content, out)
    except OSError as error:
        raise TinyLMError(f"Cannot write {out}: {error.strerror or error}.") from error
    return [run["name"] for run in content["runs"]]


def collect_report(paths: Sequence[Path], reporter: Reporter, options: ModelOptions) -> dict[str, Any]:
    """The content of a report on the runs at these paths, as JSON values without NaN and infinities.

    A run that cannot be read is reported as a warning and left out; if it is the only one, its error is raised.

    Raises UsageError for more than MAX_RUNS runs, and TinyLMError if none of several runs can be read.
    """
    if len(paths) > MAX_RUNS:
        raise UsageError(f"{len(paths)} runs are too many for a report; name at most {MAX_RUNS}.")
    duplicates = Counter(path.name for path in paths)
    runs = []
    for path in paths:
        name = path.name if path.name and duplicates[path.name] == 1 else str(path)
        try:
            run = collect_run(path, len(paths)) | {"name": name}
        except (TinyLMError, OSError) as error:
            if len(paths) == 1:
                raise
            reporter.warn(f"{path} is left out: {error}")
            continue
        _add_model(run, path, reporter, options, len(paths))
        runs.append(run)
    if not runs:
        raise TinyLMError("None of the runs can be read.")
    return assemble(runs, models=True)


def assemble(runs: Sequence[Run], *, models: bool) -> dict[str, Any]:
    """The content of a report on these runs. models: whether the runs have the sections that need their models."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"version": __version__, "created": created, "models": models, "runs": list(runs)}


def collect_run(path: Path, n_runs: int = 1) -> Run:
    """Curves, samples, settings, sizes and plan of one run, without the sections that need its model.

    n_runs: number of runs in the report, among which its points and samples are divided

    Raises TinyLMError for a damaged run. An error of its curves or samples is an entry of `problems` instead.
    """
    config, summary = read_model_config(path), summarise(path)
    run: Run = {
        "path": str(path),
        "kind": config.model.architecture if config.adapter is None else f"{config.adapter.kind} adapter",
        "parameters": summary["parameters"],
        "step": summary["step"],
        "best_step": summary["best_step"],
        "val_loss": number(summary["val_loss"], 6),
        "val_bits_per_byte": number(summary["val_bits_per_byte"], 6),
        "created": config.created[:40],
        "loss_unit": config.loss_unit,
        "parts": count_parameters(config.model),
        "settings": flatten(config.to_json() | {"id": None}),
        "problems": [],
    }
    tokens_per_step = config.tokens_per_step
    points = min(MAX_POINTS, POINTS // n_runs)
    run["curves"], run["samples"] = {}, []
    try:
        run["curves"] = read_curves(path, points, tokens_per_step, run["best_step"])
        run["samples"] = read_samples(path, min(MAX_SAMPLES, SAMPLES // n_runs))
    except TinyLMError as error:
        run["problems"].append(str(error))
    times = [s for part in ("train", "val") for s in run["curves"].get(part, {}).get("seconds", []) if s is not None]
    run["seconds"] = max(times, default=None)
    run["plan"] = _plan_rows(config, run, tokens_per_step)
    return run


def _add_model(run: Run, path: Path, reporter: Reporter, options: ModelOptions, n_runs: int) -> None:
    """Add the sections that need the model to `run`, and the reasons for missing sections to its `problems`."""
    is_adapter = run["kind"].endswith("adapter")
    try:
        model = load(
            None if is_adapter else path,
            adapters=[path] if is_adapter else (),
            device=options.device,
            reporter=_ProgressOnly(reporter),
        )
        sections, problems = describe_model(model, path, options, MAP_BYTES // n_runs)
        run |= sections
    except (TinyLMError, OSError) as error:
        problems = [f"The model was not loaded: {error}"]
    for problem in problems:
        reporter.warn(f"{path}: {problem}")
    run["problems"] += problems


class _ProgressOnly:
    """Forwards progress to a reporter. Notes and warnings go to the logger `tinylm`."""

    def __init__(self, reporter: Reporter) -> None:
        log = LogReporter()
        self.note, self.warn, self.counting = log.note, log.warn, reporter.counting


def _plan_rows(config: RunConfig, run: Run, tokens_per_step: int | None) -> list[tuple[str, str, str]]:
    """Rows of name, planned value and actual value; actual values count a resumed run from its beginning."""
    if config.training is None or config.data is None:
        return []
    budget = config.training.budget
    limit = {
        "steps": counted(budget.steps, "step") if budget.steps else "",
        "epochs": f"{budget.epochs:g} epochs" if budget.epochs else "",
        "time": format_duration(budget.time) if budget.time else "",
    }
    rows = [("budget", limit[budget.kind], "")]
    planned, step, seconds = config.planned, run["step"], run["seconds"]
    epochs_per_step = tokens_per_step / config.data.train_tokens if tokens_per_step and config.data.train_tokens else 0

    def add(name: str, expected: str | None, happened: str | None) -> None:
        rows.append((name, expected or "–", happened or "–"))

    add("steps", f"{planned.steps:,}" if planned else None, f"{step:,}" if step is not None else None)
    if epochs_per_step:
        done = f"{step * epochs_per_step:.2f}" if step is not None else None
        add("passes over the text", f"{planned.steps * epochs_per_step:.2f}" if planned else None, done)
    add("time", format_duration(planned.seconds) if planned else None, format_duration(seconds) if seconds else None)
    if tokens_per_step:
        add(
            "tokens per second, with evaluations",
            f"{planned.steps * tokens_per_step / planned.seconds:,.0f}" if planned and planned.seconds else None,
            f"{step * tokens_per_step / seconds:,.0f}" if step and seconds else None,
        )
    add("memory", f"{planned.memory / 1e6:,.0f} MB" if planned else None, "not recorded")
    return rows


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings as texts by dotted names, without those that are `None`; long texts and digests are truncated."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        elif value is not None:
            text = ", ".join(map(str, value[:50])) if isinstance(value, list | tuple) else str(value)
            limit = MAX_DIGEST if name.endswith(DIGESTS) else MAX_VALUE
            flat[prefix + name] = text if len(text) <= limit else text[:limit] + "…"
    return flat


FOLDER = Path(__file__).parent
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = ("uPlot.iife.min.js", "report.js")
TEMPLATE = "page.html"


def render_page(report: dict[str, Any]) -> str:
    """The HTML of a report. report: its content, as `collect_report` returns it.

    Raises ValueError for NaN and infinities.
    """
    styles, scripts = ([_read(name) for name in names] for names in (STYLES, SCRIPTS))
    return _read(TEMPLATE).format(
        policy=security_policy(styles, scripts),
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        licence=_read("uPlot-LICENSE.txt"),
        data=encode_json(report),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def check_path(path: Path, setting: str = "out") -> None:
    """Raise UsageError if there is a file at `path` other than a report or an empty one, or no folder for it.

    setting: the name of the setting that is the path
    """
    require(path.absolute().parent.is_dir(), f"There is no folder {path.parent}; choose another `{setting}`.")
    check_replaceable(path, "report", MARK, setting)


def write_page(report: dict[str, Any], path: Path) -> None:
    """Replace the file at `path` by the report, atomically. Raises OSError."""
    write_text(path, render_page(report))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


MIN_SECONDS = 5.0  # between two writes
MAX_SHARE = 0.01  # maximum share of the training time for writing, including the last write


class LiveReport:
    """Training callback that writes the report of the run to a file, without the sections that need the model.

    The page reloads itself until `close`, which writes it for the last time. If writing fails, training continues, and
    the first failure is a warning. seconds: total time of writing so far.

    clock: the time in seconds. write: writes the content to a file

    Raises UsageError if the folder of the file does not exist, or if there is a folder or another file at the path.
    """

    def __init__(
        self,
        path: Path,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[dict[str, Any], Path], None] = write_page,
    ) -> None:
        check_path(path, "report")
        self._path = path
        self._reporter = reporter
        self._clock, self._write_page = clock, write
        self._run: Path  # set when training starts
        self._has_trained = False
        self._started = 0.0
        self._next = 0.0  # time of the next write
        self._cost = 0.0  # seconds of the last write
        self._failed = False
        self.seconds = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._run, self._started = event.path, self._clock()
            # Until the first save, after step 1, there may be another run at the path, which it replaces.
            case Stepped() if event.step == 1:
                self._has_trained = True
            case Stepped() if not self._next:  # the first log line of a long run is minutes away
                self._has_trained = True
                self._write(reloading=True)
            case Logged() | Evaluated() | Sampled() if event.step > 1 and self._clock() >= self._next:
                self._write(reloading=True)

    def close(self) -> None:
        """Write the report for the last time, if there was a step, as a page that does not reload itself."""
        if self._has_trained:
            self._write(reloading=False)

    def _write(self, reloading: bool) -> None:
        start = self._clock()
        try:
            content = assemble([collect_run(self._run) | {"name": self._run.name}], models=False)
            refresh = math.ceil(max(MIN_SECONDS, self._cost / MAX_SHARE)) if reloading else None
            self._write_page(content | {"refresh": refresh}, self._path)
        except (TinyLMError, OSError) as error:
            if not self._failed:
                self._reporter.warn(f"The report {self._path} was not written: {error}")
            self._failed = True
        now = self._clock()
        self._cost = now - start
        self.seconds += self._cost
        # Late enough that all writes so far, the next and the last one take at most MAX_SHARE of the training time.
        self._next = max(now + MIN_SECONDS, self._started + (self.seconds + 2 * self._cost) / MAX_SHARE)
