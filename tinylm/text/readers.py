"""From the bytes of one file to its text, its lines, or its JSON records, in pieces of bounded size."""

import codecs
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tinylm.errors import UsageError
from tinylm.text.compression import Advance, content_suffix, ignore, read_bytes, shown

FORMATS = ("auto", "text", "jsonl", "lines", "pairs")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*JSONL_SUFFIXES, ".json")
LONGEST_LINE = 1 << 28  # characters of a line, or of an element of a JSON array: they are held in memory

_BLANK = re.compile(r"[ \t\r\n]*")
_CUT_OFF = 16  # characters: the most that the parser looks at before it calls a literal or an escape wrong


def is_json_file(file: Path) -> bool:
    """Whether the name says so, compressed or not."""
    return content_suffix(file) in JSON_SUFFIXES


def read_text(file: Path, encoding: str, advance: Advance = ignore) -> Iterator[str]:
    """The text in pieces. Line ends are kept as they are; a byte-order mark is dropped.

    `advance` is called with the bytes read from the disk. Raises UsageError, naming the offset, for a byte that is not
    valid in the encoding.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    offset = 0
    begun = False
    for data in read_bytes(file, advance):
        pending = len(decoder.getstate()[0])
        text = _decode(decoder, data, False, file, offset - pending, encoding)
        offset += len(data)
        if not begun and text:
            text, begun = text.removeprefix("\ufeff"), True
        if text:
            yield text
    pending = len(decoder.getstate()[0])
    _decode(decoder, b"", True, file, offset - pending, encoding)


def _decode(
    decoder: codecs.IncrementalDecoder, data: bytes, final: bool, file: Path, offset: int, encoding: str
) -> str:
    try:
        return decoder.decode(data, final)
    except UnicodeError as error:
        raise invalid_bytes(file, error, offset, encoding) from None


def invalid_bytes(file: Path, error: UnicodeError, offset: int, encoding: str) -> UsageError:
    """The error for a piece, `offset` bytes after the file's beginning, that the decoder refused."""
    place = f"offset {offset + getattr(error, 'start', 0)}"
    if isinstance(error, UnicodeDecodeError):  # which UTF-16 without a byte-order mark is not
        place = f"byte 0x{error.object[error.start]:02X} at {place}"
    return UsageError(
        f"{shown(file)} is not valid {encoding.upper()} ({place}). If it is text in another encoding, name it with "
        "--encoding; leave binary files out."
    )


def numbered_lines(pieces: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, numbered from 1. A line ends at a line feed, and nowhere else.

    Raises UsageError for a line that is too long to be held in memory.
    """
    number = length = 0
    held: list[str] = []
    for piece in itertools.chain(pieces, ["\n"]):
        first, *others = piece.split("\n")
        held.append(first)
        length += len(first)
        if length > LONGEST_LINE:
            raise _too_long(f"{name}, line {number + 1}")
        if not others:
            continue
        last = others.pop()
        for line in ("".join(held), *others):
            number += 1
            if line and not line.isspace():
                yield number, line
        held, length = [last], len(last)


def _too_long(place: str) -> UsageError:
    return UsageError(f"{place}: longer than {LONGEST_LINE:,} characters; split it into shorter documents.")


def json_records(pieces: Iterable[str], name: str) -> Iterator[tuple[str, Any]]:
    """The values of JSONL, one per line, or of a JSON array, each with its place for messages.

    Raises UsageError, naming the place, for what is not JSON.
    """
    pieces = iter(pieces)
    first = next(pieces, "")
    everything = itertools.chain([first], pieces)
    if first.lstrip()[:1] == "[":
        yield from _array_elements(everything, name)
        return
    for number, line in numbered_lines(everything, name):
        place = f"{name}, line {number}"
        yield place, parse_json_line(line, place)


def _array_elements(pieces: Iterator[str], name: str) -> Iterator[tuple[str, Any]]:
    """The elements of one JSON array, parsed one at a time."""
    decoder = json.JSONDecoder()
    text = next(pieces).lstrip()
    at, number, wants_comma = 1, 0, False  # after the bracket

    while True:
        at = _BLANK.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text, too
        if at == len(text):
            more = next(pieces, None)
            if more is None:
                raise UsageError(f"{name}: the array that it begins with has no end (']'); it may have been cut off.")
            text, at = more, 0
        elif text[at] == "]" and (wants_comma or not number):
            break
        elif wants_comma:
            if text[at] != ",":
                raise UsageError(f"{name}, element {number}: not JSON (no comma after it).")
            at, wants_comma = at + 1, False
        else:
            number += 1
            place = f"{name}, element {number}"
            while True:
                try:
                    value, at = decoder.raw_decode(text, at)
                    break
                except (ValueError, RecursionError) as error:
                    longer = _longer(text[at:], pieces, place) if _is_cut_off(error, text) else None
                    if longer is None:
                        raise _not_json(error, place) from None
                    text, at = longer, 0
            yield place, value
            wants_comma = True

    if not all(rest.isspace() for rest in itertools.chain([text[at + 1 :] or " "], pieces)):
        raise UsageError(f"{name}: there is more after the end of the array that it begins with.")


def _is_cut_off(error: Exception, text: str) -> bool:
    """Whether more text could make it valid."""
    return isinstance(error, json.JSONDecodeError) and (
        error.msg.startswith("Unterminated string") or error.pos >= len(text) - _CUT_OFF
    )


def _longer(text: str, pieces: Iterator[str], place: str) -> str | None:
    """At least twice the text, so that parsing it again takes linear time in all; `None` where there is no more."""
    parts, length = [text], 0
    for piece in pieces:
        parts.append(piece)
        length += len(piece)
        if length >= len(text):
            break
    if len(text) + length > LONGEST_LINE:
        raise _too_long(place)
    return "".join(parts) if length else None


def parse_json_line(line: str, place: str) -> Any:
    """Raises UsageError, naming the place, for what is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _not_json(error, place, "; each line must be one JSON object") from None


def _not_json(error: Exception, place: str, advice: str = "") -> UsageError:
    """The parser also refuses numbers of thousands of digits, and nesting as deep."""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
    return UsageError(f"{place}: not JSON ({reason}){advice}.")


def text_of_record(record: Any, place: str, text_key: str) -> str:
    """A document: the text under the key of an object, or a string itself. Raises UsageError for anything else."""
    if isinstance(record, str):
        return require_characters(record, place)
    if not isinstance(record, dict) or text_key not in record:
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        pairs = isinstance(record, dict) and {"source", "target"} <= record.keys()
        advice = "these are pairs, for --format pairs" if pairs else "name the field with --text-key"
        raise UsageError(f"{place}: no text under {text_key!r} (found: {keys[:200]}); {advice}.")
    text = record[text_key]
    if not isinstance(text, str):
        raise UsageError(
            f"{place}: under {text_key!r} is {json.dumps(text)[:40]}, which is not a text; correct it, or name another "
            "field with --text-key."
        )
    return require_characters(text, place)


def require_characters(text: str, place: str) -> str:
    """The text; raises UsageError when it has half a surrogate pair, which JSON can spell, in it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{place}: half a surrogate pair at character {error.start} of the text; correct it."
        ) from None
    return text
