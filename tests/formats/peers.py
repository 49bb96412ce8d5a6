"""The random models of benchmarks/family_peers.py, and edits of the files that they are saved in."""

import json
from pathlib import Path
from typing import Any

from family_peers import (
    BASES,
    BOS,
    CASES,
    CONTEXT,
    EOS,
    PAD,
    SMALL,
    TEMPLATE,
    VOCABULARY,
    ids,
    make_peer,
    make_tokenizer,
    save_peer,
    save_tokenizer,
)

__all__ = [
    "BASES",
    "BOS",
    "CASES",
    "CONTEXT",
    "EOS",
    "PAD",
    "SMALL",
    "TEMPLATE",
    "VOCABULARY",
    "edit_json",
    "ids",
    "make_peer",
    "make_tokenizer",
    "save_peer",
    "save_tokenizer",
]


def edit_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON object in a file; `...` removes one."""
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
