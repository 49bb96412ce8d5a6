"""Sections of names and values on stdout, as `tinylm info` and `tinylm doctor` print them."""

from collections.abc import Mapping
from typing import Any

from tinylm.console import Console


def print_fields(console: Console, title: str, fields: Mapping[str, Any], *, first: bool = False) -> None:
    """Print a title and a line per field. first: whether to omit the empty line before the title."""
    console.result(title if first else f"\n{title}")
    for name, value in fields.items():
        shown = name if name.isupper() else name.replace("_", " ")  # environment variables keep their names
        console.field(shown, _as_text(value))


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_as_text(part)}" for name, part in value.items() if part is not None)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
