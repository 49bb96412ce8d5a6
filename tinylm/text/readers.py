"""Decode one file into text, lines, or the records of JSON, Parquet, CSV or TSV, in chunks of bounded size.

Records have keys to which other tools give a meaning that tinylm does not learn, and without which a record means
something else: a bad answer would be learned as a good one. These are refused. Other keys that tinylm does not know,
such as an identifier or a source, have no effect.
"""

import codecs
import contextlib
import csv
import itertools
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinylm.errors import BadFilesError, UsageError
from tinylm.system.files import unicode_path
from tinylm.text.files import (
    CHUNK_BYTES,
    Progress,
    content_suffix,
    decompressed_chunks,
    display_name,
    encoding_of,
    no_progress,
)

_PREFERENCE = "for preferences, name the question 'prompt' and its two answers 'chosen' and 'rejected'"
_GRADE = (
    "it marks an answer as good or bad, and all answers would be learned as good ones; keep the good ones without this "
    "key, or make preferences of 'prompt', 'chosen' and 'rejected'"
)
_MEDIA = "only texts are read; leave the record out, or the key if its text is complete without it"
_TEXTS_ALONE = 'to read the texts alone, use `format="jsonl"`'

# The worse of two answers. Argilla, NeMo, ms-swift; ms-swift; torchtune; OpenAI
REJECTED = dict.fromkeys(
    ("rejected_response", "rejected_messages", "rejected_conversations", "non_preferred_output"), _PREFERENCE
)
# Of conversations and preferences.
REFUSED = {
    "functions": "describe the functions under 'tools'",
    "documents": "put the documents into a message",
    "chat_template_kwargs": "write its values into a `chat_template`",
    "history": "put the earlier questions and answers into 'messages'",
    # LLaMA-Factory, ms-swift, trl: conversations with images and sounds
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _MEDIA),
    **REJECTED,
}
# Of conversations. trl, axolotl, ms-swift: KTO, classifiers, and steps of an answer; LLaMA-Factory: KTO.
REFUSED_IN_CONVERSATIONS = {**REFUSED, "rejected": _PREFERENCE, **dict.fromkeys(("label", "labels", "kto_tag"), _GRADE)}
REFUSED_IN_MESSAGES = {
    "function_call": "put the call into 'tool_calls'",
    **dict.fromkeys(("train", "train_detail", "loss", "loss_mask", "train_on_turn"), "use 'weight', which is 0 or 1"),
}
# Of texts with labels or without, in addition to second texts. The name in batches of transformers.
REFUSED_IN_TEXTS = {"labels": f"for a classifier, name the one label of a text 'label'; {_TEXTS_ALONE}"}
# The second text of a record, by the key of the first, as in GLUE and sentence-transformers.
SECOND_TEXTS = {
    "text": ("text_pair", "text2"),
    "text1": ("text2",),
    "text_a": ("text_b",),
    "sentence1": ("sentence2",),
    "question1": ("question2",),
    "premise": ("hypothesis",),
}


def refused_in_texts(text_key: str) -> dict[str, str]:
    """The keys that are refused in records whose text is under `text_key`."""
    advice = f"it is a second text, and one is read; join the two; {_TEXTS_ALONE}"
    return {**REFUSED_IN_TEXTS, **dict.fromkeys(SECOND_TEXTS.get(text_key, ()), advice)}


def refuse_keys(values: Mapping[str, Any], refused: Mapping[str, str], location: str) -> None:
    """Raise UsageError, with the location and advice, for a key in `refused` that has a value."""
    for key, advice in refused.items():
        if values.get(key) not in (None, "", [], {}):
            raise UsageError(f"{location}: {key!r} is not supported; {advice}.")


SIGNATURE = b"PAR1"  # the first bytes of a file
BATCH_ROWS = 256  # converted to Python values at a time


def is_parquet(file: Path) -> bool:
    """Whether the name of a file has the suffix of Parquet."""
    return file.suffix.lower() == ".parquet"


def parquet_columns(file: Path) -> tuple[str, ...]:
    """The names of the columns. Errors as for `parquet_rows`."""
    with _opened(file) as table:
        return tuple(table.schema_arrow.names)


def parquet_rows(
    file: Path, columns: Sequence[str], progress: Progress, also: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location of each row, for messages, and its values in those of `columns` and `also` that the file has.

    Numbers of a class that the `datasets` library has written become its name. Null values within lists and structs are
    left out, since Parquet fills them in. `progress` receives numbers of bytes in proportion to the rows read.

    Raises BadFilesError for a file that cannot be read or is not Parquet, and UsageError for one that has none of the
    columns, and if pyarrow is not installed.
    """
    size, done, number = file.stat().st_size, 0, 0
    with _opened(file) as table:
        names = table.schema_arrow.names
        present = [name for name in columns if name in names]
        if not present:
            found = ", ".join(map(str, names))[:200]
            advice = "name the column of the text with `text_key`" if len(columns) == 1 else "leave the file out"
            raise UsageError(f"{file}: no column {' or '.join(map(repr, columns))} (found: {found}); {advice}.")
        present += [name for name in also if name in names]
        classes = _class_names(table.schema_arrow.metadata or {})
        total = table.metadata.num_rows
        for group in range(table.num_row_groups):
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=present):
                for row in batch.to_pylist():
                    number += 1
                    location = f"{file}, row {number}"
                    for name in [name for name in classes.keys() & row.keys() if type(row[name]) is int]:
                        label, labels = row[name], classes[name]
                        if not -1 <= label < len(labels):
                            found = f"{name!r} is {label}, and the file names {len(labels)} classes, from 0 on"
                            raise UsageError(f"{location}: {found}; correct it.")
                        row[name] = None if label == -1 else labels[label]  # -1 means none
                    yield location, {name: _without_nulls(value) for name, value in row.items()}
                progress(size * number // total - done)
                done = size * number // total


def _class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The names of the classes, in the order of their numbers, by column: the ClassLabels of `datasets`."""
    found = {}
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
        for column, feature in json.loads(metadata[b"huggingface"])["info"]["features"].items():
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
                names = feature.get("names")
                if isinstance(names, list) and all(isinstance(name, str) for name in names):
                    found[column] = names
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value if entry is not None] if isinstance(value, list) else value


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Context manager with an open pyarrow.parquet.ParquetFile, whose errors become BadFilesErrors."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            f"{file} is a Parquet file. To read it, install a package (pip install pyarrow), or convert it to JSONL."
        ) from None
    try:
        # Without pre_buffer, a column is read in chunks of buffer_size bytes, not a row group at once.
        with (
            unicode_path(file) as path,
            pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK_BYTES) as table,
        ):
            yield table
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        strerror = getattr(error, "strerror", None)
        reason = strerror or " ".join(str(error).split())[:200].rstrip(".")
        raise BadFilesError(f"Cannot read {file}: {reason}. Copy it again, or leave it out.") from error


JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIXES = (*JSONL_SUFFIXES, ".json")
TABLE_SUFFIXES = (".csv", ".tsv")
MAX_RECORD = 1 << 28  # characters of a line or of an element of a JSON array, which is held in memory
MAX_FIELD = 1 << 24  # characters of a field or a line of CSV

_BLANK = re.compile(r"[ \t\r\n]*")
_MAX_LOOKAHEAD = 16  # the JSON parser reports incomplete text at most this many characters before its end


def is_json_file(file: Path) -> bool:
    """Whether the name of a file has a JSON suffix; a compression suffix after it is ignored."""
    return content_suffix(file) in JSON_SUFFIXES


def is_table(file: Path) -> bool:
    """Whether the name of a file has the suffix of CSV or TSV; a compression suffix after it is ignored."""
    return content_suffix(file) in TABLE_SUFFIXES


def table_columns(file: Path, encoding: str) -> list[str]:
    """The names in the first line of CSV or TSV; none if it cannot be read as such. Raises as `decoded_chunks`."""
    chunks = decoded_chunks(file, encoding, no_progress)
    with contextlib.suppress(UsageError, StopIteration), contextlib.closing(chunks):
        return next(_table_rows(chunks, file))[1]
    return []


def table_texts(
    file: Path, encoding: str, columns: Sequence[str], progress: Progress
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the location of each row of CSV or TSV after the first, and its texts in those of `columns` that it has.

    The separator is the comma, semicolon or tab that occurs most often in the first line; in TSV, the tab. Blanks
    around the fields do not count if a name in the first line has some.

    Raises BadFilesError, with the location, for a row with another number of fields than the first, for invalid quotes
    and for a field or line of more than MAX_FIELD characters, and as `decoded_chunks` does.
    """
    rows = _table_rows(decoded_chunks(file, encoding, progress), file)
    names: list[str] = []
    for location, row in rows:
        if not names:
            names = row
        elif len(row) != len(names):
            raise BadFilesError(
                f"{location}: it has {len(row)} fields, but the first line has {len(names)}; correct it."
            )
        else:
            yield location, {column: row[names.index(column)] for column in columns if column in names}


def _table_rows(chunks: Iterator[str], file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the location and the fields of each row that is not empty."""
    name = display_name(file)
    lines = (f"{line}\n" for line in _lines(chunks, name, MAX_FIELD))
    empty_lines, first = 0, next(lines, "")
    while first and not first.strip("\r\n"):
        empty_lines, first = empty_lines + 1, next(lines, "")
    separator = "\t" if content_suffix(file) == ".tsv" else max(",;\t", key=first.count)
    csv.field_size_limit(MAX_FIELD)
    is_padded = any(name != name.strip(" ") for name in first.rstrip("\r\n").split(separator))
    # Otherwise, a quote after a blank would be a part of the field.
    dialect: dict[str, Any] = {"delimiter": separator, "strict": True, "skipinitialspace": is_padded}
    reader = csv.reader(itertools.chain(itertools.repeat("\n", empty_lines), [first], lines), **dialect)
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise BadFilesError(f"{name}, from line {start}: invalid CSV ({error}); correct it.") from None
        if row:
            yield f"{name}, line {start}", [field.strip(" ") for field in row] if is_padded else row


def decoded_chunks(file: Path, encoding: str, progress: Progress) -> Generator[str, None, None]:
    """Yield the text of a file in non-empty chunks, without a byte-order mark; line ends are unchanged.

    encoding: of a file that has no byte-order mark and is not UTF-8 (see `encoding_of`). `progress` receives the number
    of bytes read from the disk. Raises BadFilesError, with the offset in the decompressed file, for data that is not
    valid in the encoding, UsageError for a lone surrogate, and as `decompressed_chunks` does.
    """
    encoding = encoding_of(file, encoding)
    decoder = codecs.getincrementaldecoder(encoding)()
    name, offset, is_first = display_name(file), 0, True
    for data in itertools.chain(decompressed_chunks(file, progress), [b""]):  # UTF-7 may have text left at the end
        start = offset - len(decoder.getstate()[0])  # of what is decoded now
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeError as error:
            location = f"offset {start + getattr(error, 'start', 0)}"
            if isinstance(error, UnicodeDecodeError):  # UTF-16 without a byte-order mark raises a plain UnicodeError
                location = f"byte 0x{error.object[error.start]:02X} at {location}"
            raise BadFilesError(
                f"{name} is not valid {encoding.upper()} ({location}). If it looks right in another encoding, such as "
                "cp1252, cp1251, gb18030 or shift_jis, name that with `encoding`; leave binary files out."
            ) from None
        require_encodable(text, f"{name}, from offset {start}")  # UTF-7 can have lone surrogates
        offset += len(data)
        if text and is_first:
            text, is_first = text.removeprefix("\ufeff"), False
        if text:
            yield text


def numbered_lines(chunks: Iterable[str], name: str) -> Iterator[tuple[int, str]]:
    """Yield the number, starting at 1, and the text of each line that is not blank. Only line feeds end a line.

    `name` is the file's name in errors. Raises BadFilesError for a line of more than MAX_RECORD characters.
    """
    for number, line in enumerate(_lines(chunks, name, MAX_RECORD), start=1):
        if line and not line.isspace():
            yield number, line


def _lines(chunks: Iterable[str], name: str, limit: int) -> Iterator[str]:
    """Yield the lines of a text. Raises BadFilesError for one of more than `limit` characters."""
    number = length = 0
    buffered: list[str] = []
    for chunk in chunks:
        first, *others = chunk.split("\n")
        buffered.append(first)
        length += len(first)
        if length > limit:
            raise _too_long_error(f"{name}, line {number + 1}", limit)
        if others:
            last = others.pop()
            yield from ("".join(buffered), *others)
            number += 1 + len(others)
            buffered, length = [last], len(last)
    if length:
        yield "".join(buffered)


def _too_long_error(location: str, limit: int) -> BadFilesError:
    return BadFilesError(f"{location}: longer than {limit:,} characters; split it into shorter documents.")


def json_records(chunks: Iterable[str], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of each line of JSONL, or of each element of a JSON array.

    A location is the file's `name` with the number of the line or element, for messages. Raises BadFilesError, with the
    location, for invalid JSON and for a line or element of more than MAX_RECORD characters.
    """
    chunks = iter(chunks)
    first = next(chunks, "")
    chunks = itertools.chain([first], chunks)
    if first.lstrip()[:1] == "[":
        yield from _array_elements(chunks, name)
        return
    for number, line in numbered_lines(chunks, name):
        location = f"{name}, line {number}"
        yield location, parse_json_line(line, location)


def _array_elements(chunks: Iterator[str], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of each element of the array, which is parsed one element at a time."""
    decoder = json.JSONDecoder()
    text = next(chunks).lstrip()
    at, number, expects_comma = 1, 0, False  # `at` is the position in `text`, after the opening bracket

    while True:
        at = skip_blanks(text, at)
        if at == len(text):
            text, at = next(chunks, ""), 0
            if not text:
                raise BadFilesError(f"{name}: its JSON array has no closing bracket (']'); the file may be incomplete.")
        elif text[at] == "]" and (expects_comma or not number):
            break
        elif expects_comma:
            if text[at] != ",":
                raise BadFilesError(f"{name}, element {number}: invalid JSON (no comma after it).")
            at, expects_comma = at + 1, False
        else:
            number += 1
            location = f"{name}, element {number}"
            while True:
                try:
                    value, at = decoder.raw_decode(text, at)
                    break
                except (ValueError, RecursionError) as error:
                    # Whether the end of `text` may be the reason, so that more text could make it valid
                    is_incomplete = isinstance(error, json.JSONDecodeError) and (
                        error.msg.startswith("Unterminated string") or error.pos >= len(text) - _MAX_LOOKAHEAD
                    )
                    longer = _extend(text[at:], chunks, location) if is_incomplete else None
                    if longer is None:
                        raise _invalid_json_error(error, location) from None
                    text, at = longer, 0
            yield location, value
            expects_comma = True

    if not all(rest.isspace() for rest in itertools.chain([text[at + 1 :] or " "], chunks)):
        raise BadFilesError(f"{name}: its JSON array is followed by other text; remove that, or put it into the array.")


def skip_blanks(text: str, at: int) -> int:
    """The index of the first character from `at` on that is not white space of JSON."""
    return _BLANK.match(text, at).end()  # type: ignore[union-attr]  # matches the empty string


def _extend(text: str, chunks: Iterator[str], location: str) -> str | None:
    """Append chunks until the length doubles, so that all parsing takes linear time; `None` if no chunk is left.

    Raises BadFilesError for more than MAX_RECORD characters.
    """
    parts, length = [text], 0
    for chunk in chunks:
        parts.append(chunk)
        length += len(chunk)
        if length >= len(text):
            break
    if len(text) + length > MAX_RECORD:
        raise _too_long_error(location, MAX_RECORD)
    return "".join(parts) if length else None


def parse_json_line(line: str, location: str) -> Any:
    """The JSON value of a line. Raises BadFilesError, with the location, for invalid JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _invalid_json_error(error, location, "; each line must be one JSON object") from None


def _invalid_json_error(error: Exception, location: str, advice: str = "") -> BadFilesError:
    # Besides JSONDecodeError, numbers of thousands of digits raise ValueError, and deep nesting raises RecursionError.
    reason = error.msg if isinstance(error, json.JSONDecodeError) else error
    return BadFilesError(f"{location}: invalid JSON ({reason}){advice}.")


def records(
    file: Path, encoding: str, columns: Sequence[str], progress: Progress, also: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of each record of a file of JSONL, a JSON array, Parquet, CSV or TSV.

    columns: the columns to read from Parquet, CSV and TSV. also: further ones, if the file has them. `progress` and
    errors as for `decoded_chunks`, `json_records`, `parquet_rows` and `table_texts`.
    """
    if is_parquet(file):
        return parquet_rows(file, columns, progress, also)
    if is_table(file):
        return table_texts(file, encoding, (*columns, *also), progress)
    return json_records(decoded_chunks(file, encoding, progress), display_name(file))


def text_of_record(record: Any, location: str, text_key: str) -> str:
    """The text of a document: a JSON string, or the string under `text_key` of an object.

    Raises UsageError, with the location, for any other value.
    """
    if isinstance(record, str):
        return require_encodable(record, location)
    if not isinstance(record, dict) or text_key not in record:
        if isinstance(record, dict):
            refuse_keys(record, REJECTED, location)
        keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
        pairs = isinstance(record, dict) and {"source", "target"} <= record.keys()
        advice = 'read pairs with `format="pairs"`' if pairs else "name the key with `text_key`"
        if not pairs and isinstance(record, dict) and sum(isinstance(value, str) for value in record.values()) > 1:
            advice += ". For training on questions and answers, rename their keys to 'prompt' and 'completion'"
        raise UsageError(f"{location}: no text under {text_key!r} (found: {keys[:200]}); {advice}.")
    text = record[text_key]
    if not isinstance(text, str):
        raise UsageError(
            f"{location}: the value under {text_key!r} is {json.dumps(text, default=str)[:40]}, which is not a string; "
            "correct it, or name another key with `text_key`."
        )
    return require_encodable(text, location)


def require_encodable(text: str, location: str) -> str:
    """Return the text. Raises UsageError, with the location, for a lone surrogate, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{location}: a lone surrogate at character {error.start} of the text; correct it.") from None
    return text
