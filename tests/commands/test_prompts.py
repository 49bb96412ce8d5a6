"""Prompts of tinylm sample from JSONL and lines, with settings of their own, and how samples are separated."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.shell import done, misused, records, refused, tinylm

HUGE = 10**400


def jsonl(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def answers(run: Path, text: str, *options: object) -> list[dict[str, Any]]:
    """The records for prompts of JSONL on standard input."""
    return records(done("sample", "-m", run, "-f", "-", "--format", "jsonl", "--json", "-q", *options, stdin=text))


def alone(run: Path, *options: object) -> list[dict[str, Any]]:
    return records(done("sample", "-m", run, "--json", "-q", *options))


# Formats


def test_jsonl_on_standard_input_is_the_same_as_in_a_file(run: Path, here: Path) -> None:
    text = jsonl({"prompt": "the"}, {"prompt": "no joy"})
    (here / "p.jsonl").write_text(text)
    found = answers(run, text, "-n", 9, "--seed", 1)
    assert [record["prompt"] for record in found] == ["the", "no joy"]
    assert found == alone(run, "-f", "p.jsonl", "-n", 9, "--seed", 1)
    dashed = done("sample", "-m", run, "-p", "-", "--format", "jsonl", "-n", 9, "--seed", 1, "--json", stdin=text)
    assert found == records(dashed)


def test_lines_are_prompts_one_by_one_and_an_empty_line_is_an_empty_prompt(run: Path, here: Path) -> None:
    (here / "p.txt").write_bytes(b"the\r\n\nno joy\n")
    found = alone(run, "-f", "p.txt", "--format", "lines", "-n", 9, "--seed", 1)
    assert [record["prompt"] for record in found] == ["the", "", "no joy"]
    assert found == answers(run, jsonl(*({"prompt": text} for text in ("the", "", "no joy"))), "-n", 9, "--seed", 1)


def test_the_format_is_stronger_than_the_suffix(run: Path, here: Path) -> None:
    (here / "p.jsonl").write_text("the\nsea\n")
    (record,) = alone(run, "-f", "p.jsonl", "--format", "text", "-n", 1)
    assert record["prompt"] == "the\nsea"


@pytest.mark.parametrize("text", ['{"prompt": "the"}\n', '{"prompt": "a"}\n\n{"b": 1}\n'])
def test_standard_input_that_is_jsonl_is_not_continued_as_text(text: str, bpe_run: Path, here: Path) -> None:
    for how in ("-p", "-f"):
        refused(
            tinylm("sample", "-m", bpe_run, how, "-", stdin=text),
            2,
            "Standard input looks like JSONL; read it as that with --format jsonl, or as a single prompt with --format",
        )
    (here / "p.json").write_text(text)
    refused(tinylm("sample", "-m", bpe_run, "-f", "p.json"), 2, "p.json looks like JSONL")
    (record,) = records(
        done("sample", "-m", bpe_run, "-p", "-", "--format", "text", "-n", 1, "--json", "-q", stdin=text)
    )
    assert record["prompt"] == text.removesuffix("\n")


def test_json_over_several_lines_is_not_continued_as_text(bpe_run: Path) -> None:
    for value in ([{"prompt": "a"}, {"prompt": "b"}], {"prompt": "a"}):
        result = tinylm("sample", "-m", bpe_run, "-p", "-", stdin=json.dumps(value, indent=2))
        refused(result, 2, "Standard input looks like JSON; write one object per line for --format jsonl")


@pytest.mark.parametrize("text", ['{"prompt": "the', "[1, 2]", "{}\nand so on", "[" * 100_000, '"the"'])
def test_text_that_only_begins_like_json_is_a_prompt(text: str, bpe_run: Path) -> None:
    done("sample", "-m", bpe_run, "-p", "-", "-n", 1, stdin=text)
    done("sample", "-m", bpe_run, "-p", '{"prompt": "typed"}', "-n", 1)


def test_a_format_that_does_not_exist_is_refused(run: Path) -> None:
    refused(
        tinylm("sample", "-m", run, "--format", "csv"), 2, "--format is 'csv'; it must be one of: text, jsonl, lines"
    )


# Settings of a line


def test_a_line_is_answered_by_its_own_settings_as_by_the_same_options(run: Path) -> None:
    """A line's values are stronger than the options, which are stronger than the defaults."""
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
    expected = [record for _, own in lines for record in alone(run, "-p", "the", *options, *own)]
    assert found == expected
    assert len({record["text"] for record in found}) > 7


def test_null_is_the_option(run: Path) -> None:
    line = {"prompt": "the", "seed": None, "stop": None, "temperature": None, "adapter": None}
    assert answers(run, jsonl(line), "--seed", 2) == alone(run, "-p", "the", "--seed", 2)


def test_a_line_with_a_seed_gives_the_same_text_wherever_it_stands(run: Path) -> None:
    line = {"prompt": "the old", "seed": 11}
    (expected,) = answers(run, jsonl(line), "-n", 30, "--seed", 1)
    others = [{"prompt": "no"}, {"prompt": "a", "num_samples": 3}, {"prompt": "joy", "seed": 5}]
    for count in range(1, len(others) + 1):
        assert answers(run, jsonl(*others[:count], line), "-n", 30, "--seed", 2)[-1] == expected
    plain = answers(run, jsonl({"prompt": "no"}), "-n", 30, "--seed", 2)
    assert answers(run, jsonl(line, {"prompt": "no"}), "-n", 30, "--seed", 2)[1:] == plain


def test_a_record_has_the_seed_that_repeats_its_line(run: Path) -> None:
    first, second = answers(run, jsonl({"prompt": "the"}, {"prompt": "the", "seed": 9}), "-n", 20)
    assert second["seed"] == 9
    assert alone(run, "-p", "the", "--seed", first["seed"], "-n", 20) == [first]
    assert alone(run, "-p", "the", "--seed", 9, "-n", 20) == [second]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_token": 3, "x": 1}, "unknown key 'max_token', 'x'; the known ones are: prompt, adapter, max_tokens,"),
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
        ({"stop": 3}, "'stop' is 3; it must be a text or a list of texts."),
        ({"stop": ["a", ""]}, "'stop' is empty;"),
        ({"stop": [["a"]]}, "'stop' is a list; it must be a text or"),
        ({"adapter": 3}, "'adapter' is 3; it must be a text."),
    ],
)
def test_a_bad_value_is_named_by_file_line_and_key(keys: dict[str, Any], words: str, run: Path, here: Path) -> None:
    (here / "p.jsonl").write_text(jsonl({"prompt": "the"}, {"prompt": "the", **keys}))
    refused(tinylm("sample", "-m", run, "-f", "p.jsonl"), 2, f"p.jsonl, line 2: {words}")


def test_a_prompt_that_cannot_be_read_is_named_by_its_line(run: Path) -> None:
    text = jsonl({"prompt": "é"})
    stdin = ("sample", "-m", run, "-p", "-", "--format")
    refused(
        tinylm(*stdin, "jsonl", stdin=text), 2, "Standard input, line 1 has a character", "'é' (U+00E9) at offset 0"
    )
    refused(tinylm(*stdin, "lines", "--strict", stdin="a" * 17), 2, "Standard input, line 1 has 17 tokens")
    misused(tinylm("sample", "-m", run, "-f", "a\0b"), "'--prompt-file'", "null byte")


# Stop sequences and separators


def test_escapes_in_stop_and_separator(run: Path) -> None:
    options = ("-m", run, "-n", 200, "--seed", 4)
    whole = records(done("sample", *options, "--json"))[0]["text"]
    assert "\n" in whole
    (record,) = records(done("sample", *options, "--stop", r"\n", "--json"))
    assert (record["text"], record["finish_reason"]) == (whole[: whole.index("\n")], "stop")
    assert records(done("sample", *options, "--stop", "\n", "--json")) == [record]
    texts = [one["text"] for one in alone(run, "-n", 5, "--seed", 4, "--num-samples", 2)]
    for written, meant in ((r"\n", "\n"), (r"\t|\t", "\t|\t"), (r"\\n", r"\n"), ("", ""), ("\n", "\n"), ("é", "é")):
        result = done("sample", "-m", run, "-n", 5, "--seed", 4, "--num-samples", 2, "--separator", written)
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
def test_any_other_escape_is_refused(name: str, text: str, where: str, run: Path) -> None:
    message = rf"--{name} has a backslash {where}; write \n (line feed), \t (tab) or \\ (backslash)."
    refused(tinylm("sample", "-m", run, f"--{name}", text), 2, message)


def test_an_empty_stop_sequence_is_refused(run: Path) -> None:
    refused(tinylm("sample", "-m", run, "--stop", "", "--stop", "a"), 2, "--stop is empty; give the text to stop at")


def test_a_list_comes_one_per_line(run: Path) -> None:
    options = ("--num-samples", 4, "--no-echo", "--stop", r"\n", "--separator", r"\n", "--seed", 3)
    names = [record["text"] for record in alone(run, *options)]
    assert len(names) == 4
    assert done("sample", "-m", run, *options).stdout == "".join(name + "\n" for name in names)


def test_prompts_of_a_file_are_separated_in_the_same_way_as_samples(run: Path) -> None:
    text = jsonl({"prompt": "the", "num_samples": 2}, {"prompt": "a"}, {"prompt": ""})
    texts = [record["prompt"] + record["text"] for record in answers(run, text, "-n", 9, "--seed", 1)]
    options = ("sample", "-m", run, "-f", "-", "--format", "jsonl", "-n", 9, "--seed", 1)
    assert done(*options, stdin=text).stdout == "\n---\n".join(texts) + "\n"
    assert done(*options, "--separator", r"\n", "--no-stream", stdin=text).stdout == "\n".join(texts) + "\n"


# The seed


def test_a_random_seed_is_printed_and_repeats_the_text(run: Path) -> None:
    first = done("sample", "-m", run, "-n", 30)
    (said,) = (line for line in first.stderr.splitlines() if line.startswith("Seed "))
    seed = said.removeprefix("Seed ").removesuffix(".")
    assert done("sample", "-m", run, "-n", 30, "--seed", seed).stdout == first.stdout


# Numbers


BOUNDED = (
    *("temperature", "top-k", "top-p", "min-p", "repeat-penalty", "max-tokens", "num-samples", "seed"),
    *("beams", "length-penalty"),
)
NUMBERS = ("nan", "inf", "-inf", "-1", "1e308", "-1e-300", "9" * 400, str(2**63), "1" * 5000)


@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top-k",
        "top-p",
        "min-p",
        "repeat-penalty",
        "max-tokens",
        "num-samples",
        "seed",
        "beams",
        "length-penalty",
    ],
)
@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: value[:9])
def test_a_number_out_of_bounds_is_named(name: str, value: str, run: Path) -> None:
    result = tinylm("sample", "-m", run, f"--{name}={value}", "-q")
    if name == "length-penalty" and value in ("-1", "-1e-300"):  # in bounds, but of no use to this model
        refused(result, 2, "leave out --length-penalty.")
    else:
        assert result.exit_code == 2, result.output
        assert f"--{name}" in result.stderr and len(result.stderr) < 7000
        assert "Traceback" not in result.stderr and "Something went wrong" not in result.stderr


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
def test_no_combination_of_options_is_an_internal_error(
    run: Path, options: dict[str, Any], switches: list[str]
) -> None:
    words = [f"{name}={value}" for name, value in options.items()]
    length = () if "--max-tokens" in options else ("-n", 8)
    result = tinylm("sample", "-m", run, "--compile", "off", *length, *words, *switches)
    assert result.exit_code in (0, 2), result.output
    assert "Traceback" not in result.stderr and "Something went wrong" not in result.stderr
    if result.exit_code == 0 and "--json" in switches:
        assert all(0 <= record["seed"] < 2**63 for record in records(result))
