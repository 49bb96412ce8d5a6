"""Prompts of tinylm sample: formats, settings of single lines, stop sequences and separators."""

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.shell import assert_error, assert_usage_error, default_signals, records, run_child, run_ok, tinylm
from tinylm.commands.sample import read_prompts
from tinylm.commands.sample_options import PromptOptions
from tinylm.console import Console
from tinylm.generation.generation_config import GenerationConfig

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


def test_the_prompt_may_be_an_argument(run: Path) -> None:
    expected = sampled(run, "-p", "the old", "-n", 9, "--seed", 1)
    assert sampled(run, "the old", "-n", 9, "--seed", 1) == expected
    assert run_ok("sample", "", "-m", run, "-q").stderr == ""
    dashed = run_ok("sample", "-", "-m", run, "-n", 9, "--seed", 1, "--json", "-q", stdin="the old\n")
    assert records(dashed) == expected


@pytest.mark.parametrize("option", [("--prompt", "sea"), ("--prompt-file", "p.txt"), ("--prompt", "")])
def test_two_prompts_contradict_each_other(option: tuple[str, str], run: Path, here: Path) -> None:
    (here / "p.txt").write_text("sea")
    assert_error(tinylm("sample", "the", "-m", run, *option), 2, f"{option[0]} contradict each other; give one of them")


def test_an_argument_that_is_a_path_is_a_prompt_with_a_warning(run: Path, here: Path) -> None:
    (here / "the").write_text("sea")
    result = run_ok("sample", "the", "-m", run, "-n", 1, "--json", "-q")
    assert records(result)[0]["prompt"] == "the"
    assert result.stderr.startswith("Warning: The prompt is the text 'the', which is also a path.")
    assert "use --prompt-file" in result.stderr and "use --model" in result.stderr


def filled_pipe(text: bytes) -> int:
    end, start = os.pipe()
    os.write(start, text)
    os.close(start)
    return end


def opened(path: Path, text: bytes = b"", flags: int = os.O_RDONLY, read: int = 0) -> int:
    """A descriptor of a file with `text`, of which `read` bytes were read already."""
    path.write_bytes(text)
    descriptor = os.open(path, flags)
    os.lseek(descriptor, read, os.SEEK_SET)
    return descriptor


def non_blocking(descriptor: int) -> int:
    os.set_blocking(descriptor, False)
    return descriptor


def endless_socket() -> int:
    """One of two connected sockets, as some programs connect one to the standard input of every process."""
    one, other = socket.socketpair()
    other.detach()
    return one.detach()


@posix
@pytest.mark.parametrize(
    "make, prompt",
    [
        pytest.param(lambda path: filled_pipe(b"Once\n"), "Once", id="pipe"),
        pytest.param(lambda path: non_blocking(filled_pipe(b"Once")), "Once", id="non-blocking pipe"),
        pytest.param(lambda path: filled_pipe(b""), "", id="empty pipe"),
        pytest.param(lambda path: opened(path, b"Once\r\n"), "Once", id="file"),
        pytest.param(lambda path: opened(path, b"first\nsecond\n", read=6), "", id="file that a loop reads"),
        pytest.param(lambda path: opened(path), "", id="empty file"),
        pytest.param(lambda path: opened(path, flags=os.O_WRONLY), "", id="file open for writing"),
        pytest.param(lambda path: os.open(os.devnull, os.O_RDONLY), "", id="null device"),
        pytest.param(lambda path: os.open(os.devnull, os.O_WRONLY), "", id="nohup"),
        pytest.param(lambda path: endless_socket(), "", id="socket"),
        pytest.param(lambda path: os.openpty()[1], "", id="terminal"),
    ],
)
def test_without_a_prompt_standard_input_is_read_if_it_is_a_pipe_or_a_file_at_its_start(
    make: Callable[[Path], int],
    prompt: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    descriptor = make(here / "input.txt")
    with open(descriptor, encoding="utf-8", closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        for words in ("the", None):  # a prompt that is given leaves standard input to others
            (found,) = read_prompts(words, PromptOptions(), GenerationConfig(), Console())
            assert found.text == (prompt if words is None else words)
    os.close(descriptor)
    note = 'The prompt comes from standard input; with --prompt "", there is none.\n'
    assert capsys.readouterr().err == (note if prompt else "")


def test_a_note_says_that_the_command_waits_for_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    noted = threading.Event()

    class Listener(Console):
        def note(self, message: str) -> None:
            notes.append(message)
            noted.set()

    def read_late() -> bytes:
        assert noted.wait(60)
        return b"Once"

    monkeypatch.setattr("tinylm.commands.sample.WAITING_SECONDS", 0)
    monkeypatch.setattr("tinylm.commands.sample.has_piped_input", lambda: True)
    monkeypatch.setattr("tinylm.commands.sample.read_stdin", read_late)
    (found,) = read_prompts(None, PromptOptions(), GenerationConfig(), Listener())
    assert found.text == "Once"
    assert notes[0].startswith("Waiting for the end of standard input, which has the prompt;")


@posix
@pytest.mark.parametrize("opening", ["rb", None], ids=["file", "closed"])
def test_the_command_reads_a_prompt_from_a_file_on_standard_input(opening: str | None, run: Path, here: Path) -> None:
    (here / "p.txt").write_text("the old\n")
    command = [sys.executable, "-m", "tinylm", "sample", "-m", str(run), "-n", "9", "--seed", "1", "--json", "-q"]
    shell = " ".join(command) + (" <p.txt" if opening else " <&-")
    result = run_child(["sh", "-c", shell], preexec_fn=default_signals)
    assert result.stderr == ""
    assert result.stdout == run_ok(*command[3:], "-p", "the old" if opening else "").stdout


def test_an_endless_standard_input_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinylm.streams.MAX_STDIN_BYTES", 1 << 20)
    assert_error(tinylm("sample", "-", "-m", run, stdin="y" * (1 << 21)), 2, "Standard input has more than 1 MB")


# Formats


def test_jsonl_prompts_may_come_from_standard_input_or_a_file(run: Path, here: Path) -> None:
    text = jsonl({"prompt": "the"}, {"prompt": "no joy"})
    (here / "p.jsonl").write_text(text)
    found = answers(run, text, "-n", 9, "--seed", 1)
    assert [record["prompt"] for record in found] == ["the", "no joy"]
    assert found == sampled(run, "-f", "p.jsonl", "-n", 9, "--seed", 1)
    dashed = run_ok("sample", "-m", run, "-p", "-", "--format", "jsonl", "-n", 9, "--seed", 1, "--json", stdin=text)
    assert found == records(dashed)


def test_with_format_lines_each_line_is_a_prompt_even_if_it_is_empty(run: Path, here: Path) -> None:
    (here / "p.txt").write_bytes(b"the\r\n\nno joy\n")
    found = sampled(run, "-f", "p.txt", "--format", "lines", "-n", 9, "--seed", 1)
    assert [record["prompt"] for record in found] == ["the", "", "no joy"]
    assert found == answers(run, jsonl(*({"prompt": text} for text in ("the", "", "no joy"))), "-n", 9, "--seed", 1)


def test_the_format_option_overrides_the_file_name(run: Path, here: Path) -> None:
    (here / "p.jsonl").write_text("the\nsea\n")
    (record,) = sampled(run, "-f", "p.jsonl", "--format", "text", "-n", 1)
    assert record["prompt"] == "the\nsea"


@pytest.mark.parametrize("text", ['{"prompt": "the"}\n', '{"prompt": "a"}\n\n{"b": 1}\n'])
def test_jsonl_without_a_format_is_an_error(text: str, bpe_run: Path, here: Path) -> None:
    for how in ("-p", "-f"):
        assert_error(
            tinylm("sample", "-m", bpe_run, how, "-", stdin=text),
            2,
            "Standard input looks like JSONL; read it with --format jsonl, or as a single prompt with --format",
        )
    (here / "p.json").write_text(text)
    assert_error(tinylm("sample", "-m", bpe_run, "-f", "p.json"), 2, "p.json looks like JSONL")
    (record,) = records(
        run_ok("sample", "-m", bpe_run, "-p", "-", "--format", "text", "-n", 1, "--json", "-q", stdin=text)
    )
    assert record["prompt"] == text.removesuffix("\n")


def test_multi_line_json_without_a_format_is_an_error(bpe_run: Path) -> None:
    for value in ([{"prompt": "a"}, {"prompt": "b"}], {"prompt": "a"}):
        result = tinylm("sample", "-m", bpe_run, "-p", "-", stdin=json.dumps(value, indent=2))
        assert_error(result, 2, "Standard input looks like JSON; write one object per line for --format jsonl")


@pytest.mark.parametrize("text", ['{"prompt": "the', "[1, 2]", "{}\nand so on", "[" * 100_000, '"the"'])
def test_text_that_only_starts_like_json_is_a_plain_prompt(text: str, bpe_run: Path) -> None:
    run_ok("sample", "-m", bpe_run, "-p", "-", "-n", 1, stdin=text)
    run_ok("sample", "-m", bpe_run, "-p", '{"prompt": "typed"}', "-n", 1)


def test_an_unknown_format_is_an_error(run: Path) -> None:
    assert_error(
        tinylm("sample", "-m", run, "--format", "csv"), 2, "--format is 'csv'; it must be one of: text, jsonl, lines"
    )


# Settings of a line


def test_settings_in_a_line_act_like_the_same_options(run: Path) -> None:
    """The settings of a line override the options, and these the defaults."""
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


def test_null_in_a_line_leaves_the_option_in_effect(run: Path) -> None:
    line = {"prompt": "the", "seed": None, "stop": None, "temperature": None, "adapter": None}
    assert answers(run, jsonl(line), "--seed", 2) == sampled(run, "-p", "the", "--seed", 2)


def test_a_line_with_a_seed_gives_the_same_text_at_every_position(run: Path) -> None:
    line = {"prompt": "the old", "seed": 11}
    (expected,) = answers(run, jsonl(line), "-n", 30, "--seed", 1)
    others = [{"prompt": "no"}, {"prompt": "a", "num_samples": 3}, {"prompt": "joy", "seed": 5}]
    for count in range(1, len(others) + 1):
        assert answers(run, jsonl(*others[:count], line), "-n", 30, "--seed", 2)[-1] == expected
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


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"max_token": 3, "x": 1},
            "unknown key 'max_token', 'x'; the known ones are: prompt, messages, tools, ",
        ),
        ({"max_tokens": 0}, "'max_tokens' is 0; it must be from 1 to 2147483647."),
        ({"max_tokens": 2.5}, "'max_tokens' is 2.5; it must be a whole number."),
        ({"max_tokens": True}, "'max_tokens' is True; it must be a whole number."),
        ({"max_tokens": HUGE}, "'max_tokens' is a number of more than 40 digits; it must be"),
        ({"num_samples": 65537}, "'num_samples' is 65537; it must be from 1 to 65536."),
        ({"temperature": "0.5"}, "'temperature' is '0.5'; it must be a number."),
        ({"temperature": -1}, "'temperature' is -1; it must be from 0 to 100."),
        ({"temperature": HUGE}, "'temperature' is a number of more than 40 digits;"),
        ({"temperature": float("nan")}, "'temperature' is nan; it must be from 0 to 100."),
        ({"top_k": -1}, "'top_k' is -1;"),
        ({"top_p": 0}, "'top_p' is 0; it must be greater than 0 and at most 1."),
        ({"min_p": 1}, "'min_p' is 1; it must be at least 0 and below 1."),
        ({"repeat_penalty": float("inf")}, "'repeat_penalty' is inf;"),
        ({"seed": -1}, "'seed' is -1; it must be at least 0 and below 9223372036854775808."),
        ({"stop": 3}, "'stop' is 3; it must be a string or a list of strings."),
        ({"stop": ["a", ""]}, "'stop' is empty;"),
        ({"stop": [["a"]]}, "'stop' is a list; it must be a string or"),
        ({"adapter": 3}, "'adapter' is 3; it must be a string."),
    ],
)
def test_an_invalid_value_is_reported_with_file_line_and_key(
    keys: dict[str, Any], words: str, run: Path, here: Path
) -> None:
    (here / "p.jsonl").write_text(jsonl({"prompt": "the"}, {"prompt": "the", **keys}))
    assert_error(tinylm("sample", "-m", run, "-f", "p.jsonl"), 2, f"p.jsonl, line 2: {words}")


def test_an_invalid_prompt_is_reported_with_its_line(run: Path) -> None:
    text = jsonl({"prompt": "é"})
    stdin = ("sample", "-m", run, "-p", "-", "--format")
    assert_error(
        tinylm(*stdin, "jsonl", stdin=text), 2, "Standard input, line 1 has a character", "'é' (U+00E9) at offset 0"
    )
    assert_error(tinylm(*stdin, "lines", "--strict", stdin="a" * 17), 2, "Standard input, line 1 has 17 tokens")
    assert_usage_error(tinylm("sample", "-m", run, "-f", "a\0b"), "'--prompt-file'", "null byte")


# Stop sequences and separators


def test_stop_and_separator_may_contain_escapes(run: Path) -> None:
    options = ("-m", run, "-n", 200, "--seed", 4)
    whole = records(run_ok("sample", *options, "--json"))[0]["text"]
    assert "\n" in whole
    (record,) = records(run_ok("sample", *options, "--stop", r"\n", "--json"))
    assert (record["text"], record["finish_reason"]) == (whole[: whole.index("\n")], "stop")
    assert records(run_ok("sample", *options, "--stop", "\n", "--json")) == [record]
    texts = [one["text"] for one in sampled(run, "-n", 5, "--seed", 4, "--num-samples", 2)]
    for written, meant in ((r"\n", "\n"), (r"\t|\t", "\t|\t"), (r"\\n", r"\n"), ("", ""), ("\n", "\n"), ("é", "é")):
        result = run_ok("sample", "-m", run, "-n", 5, "--seed", 4, "--num-samples", 2, "--separator", written)
        assert result.stdout == meant.join(texts) + "\n"


@pytest.mark.parametrize("name", ["stop", "separator"])
@pytest.mark.parametrize(
    ("text", "where"),
    [
        (r"\d", "before 'd'"),
        ("\\", "at its end"),
        ("\\\\\\", "at its end"),
        ("\\\n", r"before '\n'"),
        (r"\N", "before 'N'"),
    ],
)
def test_any_other_escape_is_an_error(name: str, text: str, where: str, run: Path) -> None:
    message = rf"--{name} has a backslash {where}; write \n (line feed), \t (tab) or \\ (backslash)."
    assert_error(tinylm("sample", "-m", run, f"--{name}", text), 2, message)


def test_an_empty_stop_sequence_is_an_error(run: Path) -> None:
    assert_error(
        tinylm("sample", "-m", run, "--stop", "", "--stop", "a"), 2, "--stop is empty; give the text to stop at"
    )


def test_samples_can_be_printed_one_per_line(run: Path) -> None:
    options = ("-N", 4, "--no-echo", "--stop", r"\n", "--separator", r"\n", "--seed", 3)
    names = [record["text"] for record in sampled(run, *options)]
    assert len(names) == 4
    assert run_ok("sample", "-m", run, *options).stdout == "".join(name + "\n" for name in names)


def test_prompts_of_a_file_are_separated_in_the_same_way_as_samples(run: Path) -> None:
    text = jsonl({"prompt": "the", "num_samples": 2}, {"prompt": "a"}, {"prompt": ""})
    texts = [record["prompt"] + record["text"] for record in answers(run, text, "-n", 9, "--seed", 1)]
    options = ("sample", "-m", run, "-f", "-", "--format", "jsonl", "-n", 9, "--seed", 1)
    assert run_ok(*options, stdin=text).stdout == "\n---\n".join(texts) + "\n"
    assert run_ok(*options, "--separator", r"\n", "--no-stream", stdin=text).stdout == "\n".join(texts) + "\n"


# The seed


def test_the_printed_random_seed_reproduces_the_text(run: Path) -> None:
    first = run_ok("sample", "-m", run, "-n", 30)
    (note,) = (line for line in first.stderr.splitlines() if line.startswith("Seed "))
    seed = note.removeprefix("Seed ").removesuffix(".")
    assert run_ok("sample", "-m", run, "-n", 30, "--seed", seed).stdout == first.stdout


# Numbers


NUMBER_OPTIONS = (
    *("temperature", "top-k", "top-p", "min-p", "repeat-penalty", "max-tokens", "num-samples", "seed"),
    *("beams", "length-penalty"),
)
NUMBERS = ("nan", "inf", "-inf", "-1", "1e308", "-1e-300", "9" * 400, str(2**63), "1" * 5000)


@pytest.mark.parametrize(
    "name",
    NUMBER_OPTIONS,
)
@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: value[:9])
def test_a_number_out_of_range_is_reported_with_its_flag(name: str, value: str, run: Path) -> None:
    result = tinylm("sample", "-m", run, f"--{name}={value}", "-q")
    if name == "length-penalty" and value in ("-1", "-1e-300"):  # in range, but without effect on a decoder
        assert_error(result, 2, "leave out --length-penalty.")
    else:
        assert result.exit_code == 2, result.output
        assert f"--{name}" in result.stderr and len(result.stderr) < 7000
        assert "Traceback" not in result.stderr and "Internal error" not in result.stderr


COUNTS = st.one_of(st.integers(1, 20), st.integers(0, 2**31 - 1), st.sampled_from([-1, 2**31, 2**63, HUGE]))
NUMBER = st.one_of(st.floats(0.01, 0.99), st.sampled_from([0.5, 1, 1e-300, 5e-324, -0.0, 2]), st.floats())
FEW = st.integers(1, 20)
TEXTS = st.sampled_from(["", "\ud800", "e", r"\n", r"\q", "\\", "the ", "é", "\0", "日本", "-"])
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "--prompt": st.sampled_from(["", "the", "a\nb", "é", "a" * 40, "\0", "\ud800", '{"prompt": "the", "seed": 3}']),
    "--format": st.sampled_from(["text", "jsonl", "lines", "csv"]),
    "--unknown": st.sampled_from(["error", "skip", ""]),
    "--temperature": NUMBER,
    "--top-k": COUNTS,
    "--top-p": NUMBER,
    "--min-p": NUMBER,
    "--repeat-penalty": NUMBER,
    "--max-tokens": FEW,
    "--num-samples": st.integers(1, 4),
    "--stop": TEXTS,
    "--separator": TEXTS,
    "--seed": COUNTS,
    "--quantize": st.sampled_from(["none", "int8", "int4"]),
    "--draft": st.sampled_from(["auto", "ngram", "none"]),
    "--dtype": st.sampled_from(["auto", "fp32", "bf16", "fp16"]),
}
SWITCHES = ("--strict", "--stream", "--no-stream", "--echo", "--no-echo", "--no-cache", "--json", "--quiet")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.fixed_dictionaries({}, optional=OPTIONS),
    st.lists(st.sampled_from(SWITCHES), max_size=4, unique=True),
)
def test_no_combination_of_options_causes_an_internal_error(
    run: Path, options: dict[str, Any], switches: list[str]
) -> None:
    words = [f"{name}={value}" for name, value in options.items()]
    length = () if "--max-tokens" in options else ("-n", 8)
    result = tinylm("sample", "-m", run, *length, *words, *switches)
    assert result.exit_code in (0, 2), result.output
    assert "Traceback" not in result.stderr and "Internal error" not in result.stderr
    if result.exit_code == 0 and "--json" in switches:
        assert all(0 <= record["seed"] < 2**63 for record in records(result))
