"""tinylm classify: the label of each text, by a classifier."""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

from tinylm.commands.console import Console
from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import AdapterOption, ModelOption, OutputOptions
from tinylm.commands.streams import arriving_lines
from tinylm.config.settings import UNKNOWN, DeviceSettings
from tinylm.config.validation import Panel, Setting
from tinylm.errors import TinyLMError, UsageError
from tinylm.reporter import counted
from tinylm.run_directory.layout import path_exists

if TYPE_CHECKING:
    from tinylm.text.tokenizer import Tokenizer

STANDARD_INPUT = "-"
TABLES = (".csv", ".tsv", ".parquet", ".json")
MAX_TEXTS = 4096  # that are classified together

EXAMPLES = r"""Examples:

tinylm classify -m checkpoints/mail "You have won a prize"
    The label of a text.

tinylm classify -f texts.txt --json
    A text per line, a JSON object with all probabilities for each.

tinylm classify - --format jsonl --json < texts.jsonl
    JSON objects with a text each, whose other keys are kept.
"""


@dataclass(frozen=True)
class ClassifyOptions:
    """How texts are read."""

    file: Annotated[
        Path | None,
        Setting("File with a text per line; - for standard input.", Panel.DATA, metavar="FILE", flags=("--file", "-f")),
    ] = None
    format: Annotated[
        str | None,
        Setting(
            "Lines of the input: a text each, or JSON (default: JSON in .jsonl files).", Panel.DATA, ("text", "jsonl")
        ),
    ] = None
    text_key: Annotated[str | None, Setting("Key of the text in JSONL (default: text).", Panel.DATA, metavar="KEY")] = (
        None
    )
    unknown: Annotated[str, UNKNOWN] = "skip"


ANSWER_KEYS = ("label", "probability", "probabilities", "cut", "error")  # of an earlier answer, which are not kept


class Entry(NamedTuple):
    """A text to classify. fields: what its record has besides the label. known: the text without characters outside the
    vocabulary; empty with a problem, which is why there is no text to classify.
    """

    fields: dict[str, Any]
    known: str
    problem: UsageError | None = None


@with_option_groups
def classify(
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts, or - for a text per line of standard input.", show_default=False),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    *,
    options: ClassifyOptions,
    machine: DeviceSettings,
    output: OutputOptions,
) -> None:
    """Print the label of each text, by a model that was trained on texts with labels."""
    from tinylm.models.load import load

    console = output.console()
    words = texts or []
    _check(words, options, console)
    loaded = load(model, adapters=list(adapter or ()), **vars(machine), reporter=console)
    start, count, cut, problems = time.monotonic(), 0, 0, 0
    arrivals = _entries(words, options, loaded.tokenizer, goes_on=console.as_json)
    # No text waits for another to arrive
    for entries in (some[n : n + MAX_TEXTS] for some in arrivals for n in range(0, len(some), MAX_TEXTS)):
        found = iter(loaded.classify([entry.known for entry in entries if entry.known.strip()]))
        results = [next(found) if entry.known.strip() else None for entry in entries]
        for entry, result in zip(entries, results, strict=True) if console.as_json else ():
            answer = {"label": None} if result is None else vars(result)
            console.record(
                entry.fields | (answer if entry.problem is None else {"error": console.with_flags(str(entry.problem))})
            )
        if not console.as_json:
            console.result("".join(f"{result.label if result else ''}\n" for result in results), end="")
        count += len(entries)
        cut += sum(result is not None and result.cut for result in results)
        problems += sum(entry.problem is not None for entry in entries)
    if cut:
        longer = "text is longer" if cut == 1 else "texts are longer"
        console.warn(f"{cut:,} {longer} than the context of {loaded.network.context:,} tokens; the rest did not count.")
    seconds = time.monotonic() - start
    console.note(f"{counted(count, 'text')} in {seconds:.2f} s, {count / max(seconds, 1e-9):,.0f} per second.")
    if problems:
        raise TinyLMError(f"{problems:,} of {counted(count, 'line')} have no label; see 'error' in their records.")


def _check(texts: list[str], options: ClassifyOptions, console: Console) -> None:
    """Raise UsageError for words and options that do not go together."""
    reads_lines = options.file is not None or texts == [STANDARD_INPUT]
    if bool(texts) == (options.file is not None):
        raise UsageError("Give the texts, - for standard input, or a file with `file`.")
    if options.text_key is not None and _format(options) == "text":
        raise UsageError('`text_key` is for `format="jsonl"`; add that, or leave it out.')
    if not reads_lines and (options.format == "jsonl" or STANDARD_INPUT in texts):
        raise UsageError('Standard input is read if - is the only text, and `format="jsonl"` is for its lines.')
    if options.file is not None and options.format is None and options.file.suffix.lower() in TABLES:
        raise UsageError(
            f'`file` {options.file} is not read by its columns or keys, only line by line (`format="text"`), or as '
            'JSON in each line (`format="jsonl"`); write the texts into such a file.'
        )
    for text in () if reads_lines else texts:
        if text and path_exists(Path(text)):
            console.warn(f"{text!r} is classified as a text, and is also a path; for a text per line: -f {text}")


def _format(options: ClassifyOptions) -> str:
    from tinylm.text.readers import JSONL_SUFFIXES

    if options.format is None:
        return "text" if options.file is None or options.file.suffix.lower() not in JSONL_SUFFIXES else "jsonl"
    return options.format


def _entries(
    texts: list[str], options: ClassifyOptions, tokenizer: "Tokenizer", *, goes_on: bool
) -> Iterator[list[Entry]]:
    """Yield the texts of the command line, or those of a file or standard input, as many at a time as have arrived.

    goes_on: whether a line without a text is an entry with a problem; if not, UsageError is raised after the texts
        before it.
    """
    format = _format(options)

    def read(lines: list[str], name: str, first: int) -> Iterator[list[Entry]]:
        entries: list[Entry] = []
        for number, line in enumerate(lines, start=first):
            if not line.strip() and format == "jsonl":
                continue
            entry = _entry(line, f"{name} {number}", format, options, tokenizer)
            if entry.problem is not None and not goes_on:
                yield entries
                raise entry.problem
            entries.append(entry)
        yield entries

    if options.file is None and texts != [STANDARD_INPUT]:
        yield from read(texts, "Text", 1)
        return
    is_stdin = options.file is None or str(options.file) == STANDARD_INPUT
    name, first = "Standard input" if is_stdin else str(options.file), 1
    try:
        with nullcontext(sys.stdin.buffer) if is_stdin else cast(Path, options.file).open("rb") as stream:
            for lines in arriving_lines(stream, name, errors="surrogateescape" if goes_on else "strict"):
                yield from read(lines, f"{name}, line", first)
                first += len(lines)
    except OSError as error:
        raise UsageError(f"Cannot read `file` {name}: {error.strerror}.") from error


def _entry(line: str, name: str, format: str, options: ClassifyOptions, tokenizer: "Tokenizer") -> Entry:
    """The text of a line, or the problem: JSON without a text, and a text that is not UTF-8 or cannot be encoded."""
    from tinylm.text.readers import parse_json_line, text_of_record
    from tinylm.text.tokenizer_choice import without_unknown

    shown = line.encode(errors="surrogateescape").decode(errors="replace")  # a surrogate is a byte that is not UTF-8
    fields: dict[str, Any] = {} if format == "jsonl" else {"text": shown}
    try:
        if shown != line:
            raise UsageError(f"{name}: the line is not UTF-8; convert the text.")
        if format == "jsonl":
            record = parse_json_line(line, name)
            others = record if isinstance(record, dict) else {}
            fields = {key: value for key, value in others.items() if key not in ANSWER_KEYS}
            line = text_of_record(record, name, options.text_key or "text")
            fields.setdefault("text", line)
        return Entry(fields, without_unknown(line, tokenizer, options.unknown, name))
    except UsageError as error:
        return Entry(fields, "", error)
