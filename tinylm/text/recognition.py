"""Recognise the data in a file by its first characters: lists, HTML, JSON and conversations."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tinylm.errors import UsageError
from tinylm.text.compression import content_suffix, display_name
from tinylm.text.encodings import first_text
from tinylm.text.readers import is_parquet, parquet_columns

HTML_SUFFIXES = (".html", ".htm", ".xhtml")
_HTML = re.compile(r"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL)

_MIN_LIST_LINES = 20
_MEAN_ITEM, _LONGEST_ITEM = 24, 60  # characters of the lines of a list
# Tables, indentation, and the ends of lines of prose and code.
_NOT_IN_LISTS = re.compile(r"\t|^\s|[.,:;!?。，！？；：、=(){}\[\]<>|]$", re.MULTILINE)
_BLANKS = re.compile(r"[ \t\r\n]*")
_JSON_OBJECT = re.compile(r'\s*(?:\[\s*)?\{\s*"(?:[^"\\]|\\.)*"\s*:')


def is_list(text: str) -> bool:
    """Whether the whole lines of a text look like short texts of their own, such as names: without empty lines, short,
    and at most a few of them indented or ending like sentences or code.
    """
    lines = text.split("\n")[:-1]
    lengths = [len(line) for line in lines]
    return (
        len(lines) >= _MIN_LIST_LINES
        and min(lengths) > 0
        and max(lengths) <= _LONGEST_ITEM
        and sum(lengths) <= _MEAN_ITEM * len(lines)
        and sum(_NOT_IN_LISTS.search(line) is not None for line in lines) <= 0.05 * len(lines)
    )


def is_html(file: Path, encoding: str) -> bool:
    """Whether the suffix of a file, or the beginning of one without a suffix, is that of HTML."""
    suffix = content_suffix(file)
    return suffix in HTML_SUFFIXES or (not suffix and _HTML.match(first_text(file, encoding)) is not None)


def is_json(text: str) -> bool:
    """Whether a text begins with a non-empty JSON object, or with an array that begins with one."""
    return _JSON_OBJECT.match(text) is not None


def first_keys(text: str) -> tuple[set[str], bool]:
    """The keys of the first JSON object of a text, alone or in an array, and whether the object is complete."""
    start = _JSON_OBJECT.match(text)
    keys: set[str] = set()
    if start is None:
        return keys, True
    decoder = json.JSONDecoder()
    at = text.index("{") + 1
    try:
        while True:
            key, at = decoder.raw_decode(text, _skip_blanks(text, at))
            keys.add(str(key))
            _, at = decoder.raw_decode(text, _skip_blanks(text, _skip_blanks(text, at) + 1))  # after the colon
            at = _skip_blanks(text, at)
            if text[at] != ",":
                return keys, text[at] == "}"
            at += 1
    except (ValueError, IndexError, RecursionError):
        return keys, False


def _skip_blanks(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]  # matches the empty string


def is_single_json_object(text: str) -> bool:
    """Whether a text begins with a JSON object over several lines, which is neither JSONL nor an array of documents."""
    first, line_feed, _ = text.lstrip("\ufeff \t\r\n").partition("\n")
    if not first.startswith("{") or not line_feed:
        return False
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        return True
    return False


def has_chat_keys(keys: set[str], complete: bool = True) -> bool:
    """Whether these are the keys of a conversation: those of a layout in `tinylm.text.chat`, or of a preference, and no
    `text`. If they may not be all, since the object is not `complete`, `prompt`, `completion`, `instruction`, `chosen`
    or `rejected` is enough.
    """
    if "text" in keys:
        return False
    pairs = ({"prompt", "completion"}, {"instruction", "output"}, {"chosen", "rejected"})
    if not complete and keys & {"prompt", "completion", "instruction", "chosen", "rejected"}:
        return True
    return bool(keys & {"messages", "conversations"}) or any(pair <= keys for pair in pairs)


def conversation_keys(file: Path, encoding: str) -> set[str]:
    """The keys of the first conversation in a JSON file, or the columns of Parquet; empty without conversations."""
    found = (set(parquet_columns(file)), True) if is_parquet(file) else first_keys(first_text(file, encoding))
    return found[0] if has_chat_keys(*found) else set()


def reject_json(file: Path, text: str, accepted_keys: Sequence[frozenset[str]] = ()) -> None:
    """Raise UsageError for JSON that would be read as plain text, except for conversations, and for objects with all of
    `accepted_keys`, if there are any.
    """
    keys, is_complete = first_keys(text)
    is_accepted = has_chat_keys(keys, is_complete) or any(accepted <= keys for accepted in accepted_keys)
    if is_json(text) and not is_accepted:
        raise UsageError(
            f"{display_name(file)} contains JSON, which would be read as plain text. Read its documents with "
            '`format="jsonl"` (and `text_key`), or the JSON itself with `format="text"`.'
        )
