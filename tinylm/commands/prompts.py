"""Reading prompts: one text, one per line, or lines of JSONL with settings of their own."""

import json
import sys
import typing
from dataclasses import replace
from typing import Any

from tinylm.checks import RANGES, one_of, require, shown
from tinylm.commands.sampling import Prompt, PromptOptions, Settings
from tinylm.errors import UsageError

STANDARD_INPUT = "-"
FORMATS = ("text", "jsonl", "lines")


def read_prompts(options: PromptOptions, settings: Settings) -> list[Prompt]:
    """The prompts with their settings: `settings`, and for a line of JSONL its own over them.

    One line end at the end of a file or of standard input is dropped. Raises UsageError for a source that cannot be
    read, for JSONL that was not called so, and for a line or a value in it that cannot be used.
    """
    name, text = _read(options)
    match _format(options):
        case "text":
            if options.format is None and name is not None:
                _require_plain_text(text, name)
            return [Prompt(text, settings)]
        case "lines":
            lines = [line.removesuffix("\r") for line in text.split("\n")]
            name = name or "The prompt"
            return [Prompt(line, settings, f"{name}, line {number}") for number, line in enumerate(lines, start=1)]
        case _:
            return _jsonl_prompts(text, name or "The prompt", settings)


def _read(options: PromptOptions) -> tuple[str | None, str]:
    """The name of a file or of standard input, and the text in it; or None, and the text given as an option."""
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file contradict each other; give one of them.")
    path = options.prompt_file
    name = None
    try:
        if options.prompt == STANDARD_INPUT or (path is not None and str(path) == STANDARD_INPUT):
            name = "Standard input"
            data = sys.stdin.buffer.read()
        elif path is not None:
            name = str(path)
            data = path.read_bytes()
        else:
            return None, (options.prompt or "").encode("utf-8", "surrogateescape").decode("utf-8")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name or 'The prompt'} is not valid UTF-8 (byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}); convert it to UTF-8."
        ) from None
    except UnicodeEncodeError as error:  # on Windows, which does not check arguments
        raise UsageError(f"The prompt has half of a surrogate pair at offset {error.start}; leave it out.") from None
    except OSError as error:
        raise UsageError(f"Cannot read --prompt-file {name}: {error.strerror}.") from error
    return name, text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def _format(options: PromptOptions) -> str:
    from tinylm.text.readers import JSONL_SUFFIXES

    if options.format is None:
        file = options.prompt_file
        return "jsonl" if file is not None and file.suffix.lower() in JSONL_SUFFIXES else "text"
    one_of("format", options.format, FORMATS)
    return options.format


def _require_plain_text(text: str, name: str) -> None:
    """Raises UsageError for text that consists of JSON objects: nobody said whether they are prompts or a prompt."""
    lines = [line for line in text.split("\n") if line.strip()]
    choose = "as a single prompt with --format text"
    if lines and all(isinstance(_json_or_none(line), dict) for line in lines):
        raise UsageError(f"{name} looks like JSONL; read it as that with --format jsonl, or {choose}.")
    if text.lstrip().startswith(("[", "{")) and isinstance(value := _json_or_none(text), (dict, list)):
        whole = [value] if isinstance(value, dict) else value
        if whole and all(isinstance(one, dict) for one in whole):
            raise UsageError(
                f"{name} looks like JSON; write one object per line for --format jsonl, or read it {choose}."
            )


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _jsonl_prompts(text: str, name: str, settings: Settings) -> list[Prompt]:
    prompts = [
        _jsonl_prompt(line, f"{name}, line {number}", settings)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise UsageError(f"{name} has no prompt in it; write one per line.")
    return prompts


def _jsonl_prompt(line: str, place: str, settings: Settings) -> Prompt:
    """A key of null counts as left out."""
    from tinylm.text.readers import parse_json_line, require_characters

    record = parse_json_line(line, place)
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UsageError(f"{place}: expected an object with a text under 'prompt'.")
    kinds = typing.get_type_hints(Settings)
    known = ("prompt", "adapter", *kinds)
    unknown = [shown(key) for key in record if key not in known]
    if unknown:
        raise UsageError(f"{place}: unknown key {', '.join(unknown)}; the known ones are: {', '.join(known)}.")
    values = {key: value for key, value in record.items() if value is not None}
    prompt = require_characters(values.pop("prompt"), place)
    adapter = values.pop("adapter", None)
    require(isinstance(adapter, str | None), f"{place}: 'adapter' is {shown(adapter)}; it must be a text.")
    own = {key: _checked(key, value, kinds[key], place) for key, value in values.items()}
    return Prompt(prompt, replace(settings, **own), place, frozenset(own), adapter)


def _checked(key: str, value: Any, kind: Any, place: str) -> Any:
    """A value from JSON as a setting of a type. Raises UsageError for one of another type or out of its range."""
    is_ = f"{place}: {key!r} is"
    if kind == tuple[str, ...]:
        texts = tuple(value) if isinstance(value, list) else (value,)
        require(
            all(isinstance(text, str) for text in texts), f"{is_} {shown(value)}; it must be a text or a list of texts."
        )
        require("" not in texts, f"{is_} empty; give the text to stop at, or leave it out.")
        return texts
    numbers, name = (int, "a whole number") if kind is int else ((int, float), "a number")
    require(isinstance(value, numbers) and not isinstance(value, bool), f"{is_} {shown(value)}; it must be {name}.")
    require(RANGES[key].has(value), f"{is_} {shown(value)}; it must be {RANGES[key]}.")
    return value
