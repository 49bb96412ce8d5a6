"""Prompts of tinylm sample: formats, settings of single lines, stop sequences and separators."""

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shell import assert_error, default_signals, records, run_child, run_ok, tinylm
from tinylm.commands.console import Console
from tinylm.commands.sample import read_prompts
from tinylm.commands.sample_options import PromptOptions, unescape
from tinylm.errors import UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import parse_prompts, require_plain_text

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX files")
HUGE = 10**400


def jsonl(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def answers(run: Path, text: str, *options: object) -> list[dict[str, Any]]:
    """The records of tinylm sample for JSONL prompts on standard input."""
    return records(run_ok("sample", "-m", run, "-f", "-", "--format", "jsonl", "--json", "-q", *options, stdin=text))


def sampled(run: Path, *options: object) -> list[dict[str, Any]]:
    """The records of tinylm sample with these options."""
    return records(run_ok("sample", "-m", run, "--json", "-q", *options))


# The argument and standard input


def test_an_argument_that_is_a_path_is_a_prompt_with_a_warning(run: Path, here: Path) -> None:
    (here / "the").write_text("sea")
    result = run_ok("sample", "the", "-m", run, "-n", 1, "--json", "-q")
    assert records(result)[0]["prompt"] == "the"
    assert result.stderr.startswith("Warning: The prompt is the text 'the', which is also a path.")
    assert "use --prompt-file" in result.stderr and "use --model" in result.stderr
    assert run_ok("sample", "", "-m", run, "-q").stderr == ""


def filled_pipe(text: bytes, blocking: bool = True) -> int:
    end, start = os.pipe()
    os.write(start, text)
    os.close(start)
    os.set_blocking(end, blocking)
    return end


def opened(path: Path, text: bytes = b"", flags: int = os.O_RDONLY, read: int = 0) -> int:
    """A descriptor of a file with `text`, of which `read` bytes were read already."""
    path.write_bytes(text)
    descriptor = os.open(path, flags)
    os.lseek(descriptor, read, os.SEEK_SET)
    return descriptor


def endless_socket() -> int:
    """One of two connected sockets, as some programs connect one to the standard input of every process."""
    one, other = socket.socketpair()
    other.detach()
    return one.detach()


STANDARD_INPUTS: dict[str, tuple[Callable[[Path], int], str]] = {
    "pipe": (lambda path: filled_pipe(b"Once\n"), "Once"),
    "non-blocking pipe": (lambda path: filled_pipe(b"Once", blocking=False), "Once"),
    "empty pipe": (lambda path: filled_pipe(b""), ""),
    "file": (lambda path: opened(path, b"Once\r\n"), "Once"),
    "file that a loop reads": (lambda path: opened(path, b"first\nsecond\n", read=6), ""),
    "empty file": (lambda path: opened(path), ""),
    "file open for writing": (lambda path: opened(path, flags=os.O_WRONLY), ""),
    "null device": (lambda path: os.open(os.devnull, os.O_RDONLY), ""),
    "nohup": (lambda path: os.open(os.devnull, os.O_WRONLY), ""),
    "socket": (lambda path: endless_socket(), ""),
    "terminal": (lambda path: os.openpty()[1], ""),
}


@posix
@pytest.mark.parametrize("name", STANDARD_INPUTS)
def test_without_a_prompt_standard_input_is_read_if_it_is_a_pipe_or_a_file_at_its_start(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, prompt = STANDARD_INPUTS[name]
    descriptor = make(here / "input.txt")
    with open(descriptor, encoding="utf-8", closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        for words in ("the", None):  # a prompt that is given leaves standard input to others
            (found,) = read_prompts(words, PromptOptions(), GenerationConfig(), Console())
            assert found.text == (prompt if words is None else words)
    os.close(descriptor)
    note = 'The prompt comes from standard input; with --prompt "", there is none.\n'
    assert capsys.readouterr().err == (note if prompt else "")


@posix
def test_a_note_says_that_the_command_waits_for_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written when the note is shown, after two seconds."""
    notes: list[str] = []
    reader, writer = os.pipe()

    class Listener(Console):
        def note(self, message: str) -> None:
            notes.append(message)
            if len(notes) == 1:
                os.write(writer, b"Once")
                os.close(writer)

    with os.fdopen(reader, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        (found,) = read_prompts(None, PromptOptions(), GenerationConfig(), Listener())
    assert found.text == "Once"
    assert notes[0].startswith("Waiting for the end of standard input, which has the prompt;")


@posix
@pytest.mark.slow
def test_the_command_works_with_a_closed_standard_input(run: Path) -> None:
    command = [sys.executable, "-m", "tinylm", "sample", "-m", str(run), "-n", "9", "--seed", "1", "--json", "-q"]
    result = run_child(["sh", "-c", " ".join(command) + " <&-"], preexec_fn=default_signals)
    assert result.stderr == ""
    assert result.stdout == run_ok(*command[3:], "-p", "").stdout


def test_an_endless_standard_input_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinylm.commands.streams.MAX_STDIN_BYTES", 1 << 20)
    assert_error(tinylm("sample", "-", "-m", run, stdin="y" * (1 << 21)), 2, "Standard input has more than 1 MB")


# Formats


def test_prompts_may_be_jsonl_or_lines_from_standard_input_or_a_file(run: Path, here: Path) -> None:
    """The option overrides the name of the file, and with lines an empty line is a prompt, too."""
    options = ("-n", 9, "--seed", 1)
    found = answers(run, text := jsonl({"prompt": "the"}, {"prompt": ""}, {"prompt": "no joy"}), *options)
    assert [record["prompt"] for record in found] == ["the", "", "no joy"]
    (here / "p.jsonl").write_text(text)
    assert sampled(run, "-f", "p.jsonl", *options) == found
    dashed = run_ok("sample", "-m", run, "-p", "-", "--format", "jsonl", *options, "--json", stdin=text)
    assert records(dashed) == found
    (here / "p.jsonl").write_bytes(b"the\r\n\nno joy\n")
    assert sampled(run, "-f", "p.jsonl", "--format", "lines", *options) == found
    (here / "p.jsonl").write_text("the\nsea\n")
    (record,) = sampled(run, "-f", "p.jsonl", "--format", "text", "-n", 1)
    assert record["prompt"] == "the\nsea"


def test_json_without_a_format_is_an_error_and_text_that_only_starts_like_json_is_a_prompt(bpe_run: Path) -> None:
    for text in ('{"prompt": "the"}\n', '{"prompt": "a"}\n\n{"b": 1}\n'):
        with pytest.raises(UsageError, match='p looks like JSONL; read it with `format="jsonl"`, or as a single'):
            require_plain_text(text, "p")
    for value in ([{"prompt": "a"}, {"prompt": "b"}], {"prompt": "a"}):
        with pytest.raises(UsageError, match='p looks like JSON; write one object per line for `format="jsonl"`'):
            require_plain_text(json.dumps(value, indent=2), "p")
    for text in ('{"prompt": "the', "[1, 2]", "{}\nand so on", "[" * 100_000, '"the"'):
        require_plain_text(text, "p")
    command = ("sample", "-m", bpe_run, "-p", "-", "-n", 1, "--json", "-q")
    assert_error(tinylm(*command, stdin='{"prompt": "a"}'), 2, "Standard input looks like JSONL; read it with --format")
    for options, text in ((("--format", "text"), '{"prompt": "a"}'), ((), "{}\nand so on")):
        assert records(run_ok(*command, *options, stdin=text + "\n"))[0]["prompt"] == text


# Settings of a line


def test_settings_in_a_line_act_like_the_same_options(run: Path) -> None:
    """The settings of a line override the options, and these the defaults; null leaves the option in effect."""
    options = ("--seed", 7, "-t", 0.9, "-n", 12)
    lines: list[tuple[dict[str, Any], tuple[object, ...]]] = [
        ({"seed": 3, "max_tokens": 5}, ("--seed", 3, "-n", 5)),
        ({"seed": 4, "temperature": 0}, ("--seed", 4, "-t", 0)),
        ({"seed": 4, "temperature": 2.5, "top_k": 3}, ("--seed", 4, "-t", 2.5, "-k", 3)),
        ({"seed": 4, "top_p": 0.3, "min_p": 0.1}, ("--seed", 4, "--top-p", 0.3, "--min-p", 0.1)),
        ({"seed": 4, "repeat_penalty": 40}, ("--seed", 4, "--repeat-penalty", 40)),
        ({"seed": 4, "stop": "e"}, ("--seed", 4, "--stop", "e")),
        ({"seed": 4, "stop": ["e", "o"]}, ("--seed", 4, "--stop", "e", "--stop", "o")),
        ({"seed": 5, "num_samples": 3}, ("--seed", 5, "--num-samples", 3)),
    ]
    found = answers(run, jsonl(*({"prompt": "the", **keys} for keys, _ in lines)), *options)
    expected = [record for _, own in lines for record in sampled(run, "-p", "the", *options, *own)]
    assert found == expected
    assert len({record["text"] for record in found}) > 7
    nulls = {"prompt": "the", "seed": None, "stop": None, "temperature": None, "adapter": None}
    assert answers(run, jsonl(nulls), *options) == sampled(run, "-p", "the", *options)


def test_a_line_with_a_seed_gives_the_same_text_at_every_position(run: Path) -> None:
    line = {"prompt": "the old", "seed": 11}
    (expected,) = answers(run, jsonl(line), "-n", 30, "--seed", 1)
    others = [{"prompt": "no"}, {"prompt": "a", "num_samples": 3}, {"prompt": "joy", "seed": 5}]
    assert answers(run, jsonl(*others, line), "-n", 30, "--seed", 2)[-1] == expected
    plain = answers(run, jsonl({"prompt": "no"}), "-n", 30, "--seed", 2)
    assert answers(run, jsonl(line, {"prompt": "no"}), "-n", 30, "--seed", 2)[1:] == plain


def test_the_seed_in_a_record_alone_reproduces_its_text(run: Path) -> None:
    """Whichever prompts and samples came before it; the first sample of a seed has that seed."""
    prompts = jsonl(
        {"prompt": "the", "num_samples": 3}, {"prompt": "sea", "seed": 9, "num_samples": 2}, {"prompt": "a"}
    )
    found = answers(run, prompts, "-n", 20, "--seed", 4)
    assert (found[0]["seed"], found[3]["seed"]) == (4, 9)
    assert len({record["seed"] for record in found}) == 6
    for record in found:
        assert sampled(run, "-p", record["prompt"], "--seed", record["seed"], "-n", 20) == [record]


INVALID: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_token": 3, "x": 1}, "unknown key 'max_token', 'x'; the known ones are: prompt, messages, tools, "),
    ({"max_tokens": 0}, "'max_tokens' is 0; it must be from 1 to 2147483647."),
    ({"max_tokens": 2.5}, "'max_tokens' is 2.5; it must be a whole number."),
    ({"max_tokens": True}, "'max_tokens' is True; it must be a whole number."),
    ({"max_tokens": HUGE}, "'max_tokens' is a number of more than 40 digits; it must be"),
    ({"temperature": "0.5"}, "'temperature' is '0.5'; it must be a number."),
    ({"temperature": -1}, "'temperature' is -1; it must be from 0 to 100."),
    ({"temperature": float("nan")}, "'temperature' is nan; it must be from 0 to 100."),
    ({"top_p": 0}, "'top_p' is 0; it must be greater than 0 and at most 1."),
    ({"min_p": 1}, "'min_p' is 1; it must be at least 0 and below 1."),
    ({"seed": -1}, "'seed' is -1; it must be at least 0 and below 9223372036854775808."),
    ({"stop": 3}, "'stop' is 3; it must be a string or a list of strings."),
    ({"stop": ["a", ""]}, "'stop' is empty;"),
    ({"stop": [["a"]]}, "'stop' is a list; it must be a string or"),
    ({"adapter": 3}, "'adapter' is 3; it must be a string."),
)


def test_an_invalid_value_is_reported_with_file_line_and_key() -> None:
    for keys, words in INVALID:
        with pytest.raises(UsageError, match=re.escape(f"p.jsonl, line 2: {words}")):
            parse_prompts(jsonl({"prompt": "the"}, {"prompt": "the", **keys}), "jsonl", GenerationConfig(), "p.jsonl")


# Stop sequences and separators


def test_samples_and_prompts_are_separated_by_a_text_with_escapes(run: Path) -> None:
    text = jsonl({"prompt": "the", "num_samples": 2}, {"prompt": "a"}, {"prompt": ""})
    found = [record["prompt"] + record["text"] for record in answers(run, text, "-n", 5, "--seed", 1)]
    command = ("sample", "-m", run, "-f", "-", "--format", "jsonl", "-n", 5, "--seed", 1)
    assert run_ok(*command, stdin=text).stdout == "\n---\n".join(found) + "\n"
    for written, meant in ((r"\n", "\n"), (r"\t|\t", "\t|\t"), (r"\\n", r"\n"), ("", ""), ("\n", "\n"), ("é", "é")):
        assert run_ok(*command, "--separator", written, stdin=text).stdout == meant.join(found) + "\n"
    assert run_ok(*command, "--separator", r"\n", "--no-stream", stdin=text).stdout == "\n".join(found) + "\n"


def test_a_stop_sequence_may_contain_escapes(run: Path) -> None:
    options = (run, "-n", 200, "--seed", 4)
    whole = sampled(*options)[0]["text"]
    (record,) = sampled(*options, "--stop", r"\n")
    assert (record["text"], record["finish_reason"]) == (whole[: whole.index("\n")], "stop")
    assert sampled(*options, "--stop", "\n") == [record]


def test_any_other_escape_is_an_error() -> None:
    valid = r"write \n (line feed), \t (tab) or \\ (backslash)."
    for text, where in (
        (r"\d", "before 'd'"),
        ("\\", "at its end"),
        (r"\\" "\\", "at its end"),
        ("\\\n", r"before '\n'"),
    ):
        with pytest.raises(UsageError) as caught:
            unescape("stop", text)
        assert str(caught.value) == f"`stop` has a backslash {where}; {valid}"
    with pytest.raises(UsageError, match="`stop` contains a lone surrogate"):
        unescape("stop", "\ud800")
