"""The report as one HTML file that needs no network and runs no code but its own.

The data is a JSON block; the script inserts its strings as text. A content security policy admits only the scripts and
styles of this package, by their hashes, and forbids network requests.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from tinylm.system.files import write_text

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
