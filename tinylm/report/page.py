"""The report as one HTML file that needs no network and runs no code but its own.

The data is a JSON block; the script inserts its strings as text. A content security policy admits only the scripts and
styles of this package, by their hashes, and forbids network requests.
"""

import base64
import hashlib
import json
import math
import time
from pathlib import Path
from typing import Any

from tinylm.errors import TinyLMError, UsageError
from tinylm.report.collect import assemble, collect_run
from tinylm.reporter import Reporter
from tinylm.system.files import write_text
from tinylm.training.events import Evaluated, Event, Logged, Sampled, Started, Stepped

FOLDER = Path(__file__).parent
STYLES = ("uPlot.min.css", "report.css")
SCRIPTS = ("uPlot.iife.min.js", "report.js")
TEMPLATE = "page.html"


def render_page(report: dict[str, Any]) -> str:
    """The HTML of a report. report: its content, as `collect_report` returns it.

    Raises ValueError for NaN and infinities.
    """
    styles, scripts = ([_read(name) for name in names] for names in (STYLES, SCRIPTS))
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_hashes(styles)}; script-src {_hashes(scripts)}"
    )
    return _read(TEMPLATE).format(
        policy=policy,
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        licence=_read("uPlot-LICENSE.txt"),
        data=encode_json(report),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def write_page(report: dict[str, Any], path: Path) -> None:
    """Replace the file at `path` by the report, atomically. Raises OSError."""
    write_text(path, render_page(report))


def encode_json(values: Any) -> str:
    """JSON for a script element: without `<`, which could end the element, `>`, `&` and characters beyond ASCII.

    Raises ValueError for NaN and infinities.
    """
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    """Sources of a content security policy that admit elements with exactly these texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


MIN_SECONDS = 5.0  # between two writes
MAX_SHARE = 0.01  # maximum share of the training time for writing, including the last write


class LiveReport:
    """Training callback that writes the report of the run to a file, without the sections that need the model.

    The page reloads itself until `close`, which writes it for the last time. If writing fails, training continues, and
    the first failure is a warning. seconds: total time of writing so far.

    Raises UsageError if the folder of the file does not exist, or the file is a folder.
    """

    def __init__(self, path: Path, reporter: Reporter) -> None:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"`report` is {path}, which is not a file in an existing folder.")
        self._path = path
        self._reporter = reporter
        self._run: Path | None = None
        self._started = 0.0
        self._next = 0.0  # time of the next write
        self._cost = 0.0  # seconds of the last write
        self._failed = False
        self.seconds = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._run, self._started = event.path, time.monotonic()
            case Stepped() if not self._next:  # the first log line of a long run is minutes away
                self._write(reloading=True)
            # At step 0 there may still be another run at the path, which the first save replaces.
            case Logged() | Evaluated() | Sampled() if event.step and time.monotonic() >= self._next:
                self._write(reloading=True)

    def close(self) -> None:
        """Write the report for the last time, if it was written before, as a page that does not reload itself."""
        if self._run is not None and self._next:
            self._write(reloading=False)

    def _write(self, reloading: bool) -> None:
        assert self._run is not None
        start = time.monotonic()
        try:
            content = assemble([collect_run(self._run) | {"name": self._run.name}], models=False)
            refresh = math.ceil(max(MIN_SECONDS, self._cost / MAX_SHARE)) if reloading else None
            write_page(content | {"refresh": refresh}, self._path)
        except (TinyLMError, OSError) as error:
            if not self._failed:
                self._reporter.warn(f"The report {self._path} was not written: {error}")
            self._failed = True
        now = time.monotonic()
        self._cost = now - start
        self.seconds += self._cost
        # Late enough that all writes so far, the next and the last one take at most MAX_SHARE of the training time.
        self._next = max(now + MIN_SECONDS, self._started + (self.seconds + 2 * self._cost) / MAX_SHARE)
