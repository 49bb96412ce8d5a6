"""tinylm classify: the label of each text, by a classifier."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tinylm.commands.console import Console
from tinylm.commands.option_groups import option, with_option_groups
from tinylm.commands.options import AdapterOption, ModelOption, OutputOptions
from tinylm.commands.streams import stdin_lines
from tinylm.config.settings import DeviceSettings
from tinylm.config.validation import Panel, check_choice
from tinylm.errors import UsageError
from tinylm.reporter import counted
from tinylm.run_directory.layout import path_exists

STANDARD_INPUT = "-"
FORMATS = ("text", "jsonl")
MAX_TEXTS = 4096  # that are classified together

EXAMPLES = r"""Examples:

tinylm classify -m checkpoints/mail "You have won a prize"
    The label of a text.

tinylm classify - --json < texts.txt
    A text per line, a JSON object with all probabilities for each.

tinylm classify - --format jsonl --json < texts.jsonl
    JSON objects with a text each, whose other keys are kept.
"""


@dataclass(frozen=True)
class ClassifyOptions:
    """How texts are read."""

    format: Annotated[
        str, option("Lines of standard input: a text each, or JSON (default: text).", Panel.DATA, "text|jsonl")
    ] = "text"
    text_key: Annotated[str | None, option("Key of the text in JSONL (default: text).", Panel.DATA, "KEY")] = None
    unknown: Annotated[
        str,
        option("Characters outside the vocabulary: an error, or skipped (default: skip).", Panel.DATA, "error|skip"),
    ] = "skip"


class Entry(NamedTuple):
    """A text to classify. name: for messages. others: what its JSON object has besides."""

    name: str
    text: str
    others: dict[str, Any]


@with_option_groups
def classify(
    texts: Annotated[
        list[str], typer.Argument(help="Texts, or - for a text per line of standard input.", show_default=False)
    ],
    model: ModelOption = None,
    adapter: AdapterOption = None,
    *,
    options: ClassifyOptions,
    machine: DeviceSettings,
    output: OutputOptions,
) -> None:
    """Print the label of each text, by a model that was trained on texts with labels."""
    from tinylm.generation.classify import without_unknown
    from tinylm.models.load import load

    console = output.console()
    check_choice("format", options.format, FORMATS)
    check_choice("unknown", options.unknown, ("error", "skip"))
    loaded = load(model, adapters=list(adapter or ()), **vars(machine), reporter=console)
    start, count = time.monotonic(), 0
    for entries in _batches(_entries(texts, options, console)):
        known = [without_unknown(entry.text, loaded.tokenizer, options.unknown, entry.name) for entry in entries]
        found = iter(loaded.classify([text for text in known if text.strip()]))
        results = [next(found) if text.strip() else None for text in known]
        for entry, result in zip(entries, results, strict=True):
            if console.as_json:
                fields = {"label": None} if result is None else vars(result)
                console.record({**entry.others, "text": entry.text, **fields})
        if not console.as_json:
            console.result("".join(f"{result.label if result else ''}\n" for result in results), end="")
        count += len(entries)
    seconds = time.monotonic() - start
    console.note(f"{counted(count, 'text')} in {seconds:.2f} s, {count / max(seconds, 1e-9):,.0f} per second.")


def _entries(texts: list[str], options: ClassifyOptions, console: Console) -> Iterator[list[Entry]]:
    """Yield the texts of the command line, or those of standard input, as many at a time as have arrived."""
    if options.format == "text" and options.text_key is not None:
        raise UsageError("--text-key is for --format jsonl; add that, or leave it out.")
    if texts != [STANDARD_INPUT]:
        if options.format == "jsonl" or STANDARD_INPUT in texts:
            raise UsageError("Standard input is read if - is the only text, and --format jsonl is for its lines.")
        for text in texts:
            if text and path_exists(Path(text)):
                console.warn(f"{text!r} is classified as a text, and is also a path; for a text per line: - < {text}")
        yield [Entry(f"Text {number}", text, {}) for number, text in enumerate(texts, start=1)]
        return
    number = 0
    for lines in stdin_lines():
        entries = []
        for line in lines:
            number += 1
            if line.strip() or options.format == "text":
                entries.append(_entry(line, f"Standard input, line {number}", options))
        yield entries


def _entry(line: str, name: str, options: ClassifyOptions) -> Entry:
    """The text of a line. Raises UsageError for JSON without a text."""
    from tinylm.text.readers import parse_json_line, text_of_record

    if options.format == "text":
        return Entry(name, line, {})
    record = parse_json_line(line, name)
    others = {key: value for key, value in record.items() if key != "label"} if isinstance(record, dict) else {}
    return Entry(name, text_of_record(record, name, options.text_key or "text"), others)


def _batches(arrivals: Iterator[list[Entry]]) -> Iterator[list[Entry]]:
    """Yield the texts in lists of at most MAX_TEXTS; no text waits for another to arrive."""
    for entries in arrivals:
        for start in range(0, len(entries), MAX_TEXTS):
            yield entries[start : start + MAX_TEXTS]
