"""Sections of names and values on stdout, as `tinylm info` and `tinylm doctor` print them."""

from collections.abc import Mapping
from typing import Any

from tinylm.commands.console import Console

UNITS = {  # by the end of a name, the longest first
    "_gb_per_second": "GB/s",
    "_microseconds": "µs",
    "_tflops": "TFLOP/s",
    "_gb": "GB",
    "_mb": "MB",
}


def print_fields(console: Console, title: str, fields: Mapping[str, Any], *, first: bool = False) -> None:
    """Print a title and a line per field. first: whether to omit the empty line before the title."""
    console.result(title if first else f"\n{title}")
    for name, value in fields.items():
        console.field(*_name_and_text(name, value))


def _name_and_text(name: str, value: Any) -> tuple[str, str]:
    """The name in words, without its unit, and the value with it, as in memory_gb: memory, 2.6 GB."""
    end = next((end for end in UNITS if name.endswith(end)), "")
    shown = name if name.isupper() else name.removesuffix(end).replace("_", " ")  # environment variables are kept
    return shown, f"{_as_text(value)} {UNITS[end]}" if end and value is not None else _as_text(value)


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(" ".join(_name_and_text(name, part)) for name, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
