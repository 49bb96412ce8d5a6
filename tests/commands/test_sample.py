"""tinylm sample with a decoder."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
import torch

import tinylm
from tests.shell import copied, records, run_ok
from tinylm.cli import app
from tinylm.run_directory.loading import load_model

PROMPT = "the old man"


def sampled(*arguments: object, **how: str | bytes) -> str:
    """The stdout of tinylm sample with seed 1 and 40 tokens, unless the arguments say otherwise."""
    return run_ok("sample", "--seed", 1, "-n", 40, *arguments, **how).stdout


def texts(*arguments: object) -> list[str]:
    """The texts of the same."""
    return [json.loads(line)["text"] for line in sampled(*arguments, "--json").splitlines()]


# Output


def test_stdout_is_the_prompt_the_text_and_a_line_break(run: Path) -> None:
    (text,) = texts("-m", run, "-p", PROMPT)
    assert sampled("-m", run, "-p", PROMPT) == PROMPT + text + "\n"
    assert sampled("-m", run, "-p", PROMPT, "--no-echo") == text + "\n"
    assert sampled("-m", run, "-p", "") == sampled("-m", run) != "\n"


def test_stderr_has_device_seed_and_speed(run: Path) -> None:
    stderr = run_ok("sample", "-m", run, "-n", 5, "--seed", 7, "--device", "cpu").stderr
    assert stderr.startswith("On cpu (1 thread): requested; fp32: exact.\n") and "\nSeed 7.\n" in stderr
    assert "tokens in " in stderr and stderr.endswith(" per second.\n")
    assert run_ok("sample", "-m", run, "-n", 5, "-q").stderr == ""


def test_json_has_the_documented_keys(run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", run, "-p", PROMPT, "-n", 6, "--seed", 3, "--json"))
    assert list(record) == ["prompt", "text", "tokens", "seed", "finish_reason"]
    assert (record["prompt"], record["tokens"], record["seed"], record["finish_reason"]) == (PROMPT, 6, 3, "length")
    assert len(record["text"]) == 6


def test_the_random_seed_in_a_record_reproduces_the_text(run: Path) -> None:
    first = run_ok("sample", "-m", run, "-n", 40, "--json")
    (record,), (again,) = records(first), records(run_ok("sample", "-m", run, "-n", 40, "--json"))
    assert record["seed"] != again["seed"] and f"Seed {record['seed']}." in first.stderr
    assert sampled("-m", run, "--seed", record["seed"]) == record["text"] + "\n"


def test_a_sample_depends_on_its_seed_and_not_on_the_number_of_samples(run: Path) -> None:
    one, three, five = (texts("-m", run, "--num-samples", n) for n in (1, 3, 5))
    assert five[:3] == three and three[:1] == one == texts("-m", run)
    assert len({*five, *texts("-m", run, "--seed", 2)}) == 6


class Chunks(io.StringIO):
    """A stream that keeps what each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)


def test_tokens_are_printed_as_they_are_generated(run: Path) -> None:
    command = ["sample", "-q", "-m", str(run), "-p", PROMPT, "-n", "10", "--seed", "1"]
    found = []
    for options in ([], ["--no-stream"]):
        with contextlib.redirect_stdout(Chunks()) as stdout:
            app([*command, *options], standalone_mode=False)
        found.append(stdout.written)
    streamed, whole = found
    assert streamed[0] == PROMPT
    assert len(streamed) == 12 and streamed[-1] == "\n"
    assert len(whole) == 2 and "".join(whole) == "".join(streamed)


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
def test_neither_streaming_nor_the_cache_changes_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """At temperature 10, byte tokens are almost uniform, so that most of the text is invalid UTF-8."""
    options = ("-m", request.getfixturevalue(kind), "-p", PROMPT, "-n", 120, "-t", 10)
    for engine in ("torch", "llama.cpp"):
        streamed, whole = (sampled(*options, how, "--engine", engine) for how in ("--stream", "--no-stream"))
        assert streamed == whole
        assert engine == "llama.cpp" or whole == sampled(*options, "--no-cache")
        assert "\ufffd" in whole or kind == "run"


# Choice of tokens


def test_temperature_0_takes_the_most_likely_token_with_every_seed(run: Path) -> None:
    text = sampled("-m", run, "-t", 0, "--no-echo", "-p", PROMPT)
    assert text == sampled("-m", run, "-t", 0, "--seed", 99, "--no-echo", "-p", PROMPT)
    model, _, tokenizer, _ = load_model(run)
    ids = torch.tensor([tokenizer.encode(PROMPT).tolist()])
    with torch.inference_mode():
        most_likely = int(model.logits(model(ids).hidden[0, -1]).argmax())
    assert text[0] == tokenizer.decode([most_likely])
    for option, value in (("-k", 1), ("--top-p", 0.0001), ("--min-p", 0.9999)):
        assert sampled("-m", run, option, value, "--no-echo", "-p", PROMPT) == text
    assert sampled("-m", run, "--no-echo", "-p", PROMPT) != text


def test_every_number_format_can_sample(run: Path) -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        result = run_ok("sample", "-m", run, "-n", 5, "--dtype", dtype, "--quantize", "int8")
        assert f"; {dtype}: requested." in result.stderr


# The end of a text


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
def test_a_stop_sequence_ends_the_text_before_it(kind: str, request: pytest.FixtureRequest) -> None:
    options = ("-m", request.getfixturevalue(kind), "--seed", 4, "-n", 80)
    whole = records(run_ok("sample", *options, "--json"))[0]["text"]
    for stops in ([whole[10:12]], [whole[20:27]], [whole[30:33], whole[12:15]]):
        words = [word for stop in stops for word in ("--stop", stop)]
        (record,) = records(run_ok("sample", *options, *words, "--json"))
        assert record["finish_reason"] == "stop"
        assert record["text"] == whole[: min(map(whole.index, stops))]
        assert run_ok("sample", *options, *words).stdout == record["text"] + "\n"


def test_a_stop_sequence_in_the_prompt_is_ignored(run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", run, "-p", "sea", "--stop", "sea", "-n", 2, "--seed", 1, "--json"))
    assert (record["tokens"], record["finish_reason"]) == (2, "length")


def test_the_end_of_text_token_ends_a_sample(run: Path) -> None:
    """At temperature 9, every token is sampled now and then. The end token counts, with its log-probability."""
    options = ("-p", "sea", "--no-echo", "-n", 12, "-t", 9, "--num-samples", 16, "--seed", 0, "--logprobs", 1, "--json")
    found = records(run_ok("sample", "-m", run, *options))
    model = tinylm.load(run, device="cpu")
    assert "end" in {record["finish_reason"] for record in found}
    for record in found:
        ends = record["finish_reason"] == "end"
        assert ends or record["tokens"] == 12
        assert len(record["text"]) == record["tokens"] - ends
        ids = [token["id"] for token in record["logprobs"]]
        assert len(ids) == record["tokens"] and (ids[-1] == model.tokenizer.end_of_text_id) == ends
        text = [*model.encode("sea"), *ids]
        expected = model.logits([text[:-1]])[0].double().log_softmax(-1)[2:].gather(1, torch.tensor(ids)[:, None])
        assert sum(token["logprob"] for token in record["logprobs"]) == pytest.approx(float(expected.sum()), abs=1e-3)


# Prompts


def test_a_prompt_may_be_an_argument_or_come_from_a_file_or_standard_input(run: Path, here: Path) -> None:
    """One line break is dropped from its end."""
    expected = sampled("-m", run, "-p", PROMPT)
    assert sampled(PROMPT, "-m", run) == expected
    for end in ("", "\n", "\r\n"):
        (here / "prompt.txt").write_bytes((PROMPT + end).encode())
        assert sampled("-m", run, "-f", "prompt.txt") == expected
        assert sampled("-m", run, "-f", "-", stdin=PROMPT + end) == expected
        for dash in (("-p", "-"), ("-",)):
            assert sampled("-m", run, *dash, stdin=(PROMPT + end).encode()) == expected
    assert sampled("-m", run, "-p", "-", stdin="sea\n\n").startswith("sea\n")


def test_unknown_skip_drops_unknown_characters_with_a_warning(run: Path) -> None:
    result = run_ok("sample", "-m", run, "-p", "the é old ü man", "--unknown", "skip", "--seed", 1, "-n", 40)
    assert result.stdout == sampled("-m", run, "-p", "the  old  man")
    assert "Warning: " in result.stderr
    assert "'é' (U+00E9), 'ü' (U+00FC)" in result.stderr
    assert sampled("-m", run, "-p", "éü", "--unknown", "skip") == sampled("-m", run)


def test_a_byte_level_bpe_model_accepts_any_character_and_reads_special_tokens_as_text(bpe_run: Path) -> None:
    assert sampled("-m", bpe_run, "-p", "日本 é<|endoftext|>", "-n", 3).startswith("日本 é<|endoftext|>")


def test_a_prompt_longer_than_the_context_is_continued_from_its_tail_with_a_warning(run: Path) -> None:
    prompt = "the old man said it was cold"
    result = run_ok("sample", "-m", run, "-p", prompt, "-n", 40, "-t", 0)
    assert "The prompt has 28 tokens, and the context of 16 has no room for them and the next token: " in result.stderr
    tail = prompt[-15:]
    assert result.stdout.removeprefix(prompt) == sampled("-m", run, "-p", tail, "-t", 0).removeprefix(tail)
    assert "Warning" not in run_ok("sample", "-m", run, "-p", "a" * 15, "-n", 1, "--strict").stderr


# The model


def test_an_adapter_changes_the_text_and_finds_its_base(adapter: Path, run: Path) -> None:
    with_it = sampled("--adapter", adapter, "-t", 0.5, "-n", 100)
    assert with_it != sampled("-m", run, "-t", 0.5, "-n", 100)
    assert with_it == sampled("--adapter", adapter, "-m", run, "-t", 0.5, "-n", 100)


def test_the_default_is_the_newest_model_and_never_an_adapter(run: Path, adapter: Path, here: Path) -> None:
    for age, (name, source) in enumerate({"hidden": run, "adapter": adapter, "group/new": run, "old": run}.items()):
        path = copied(source, here / "checkpoints" / name)
        for file in path.glob("*.safetensors"):
            os.utime(file, (1e9 - age, 1e9 - age))
    (here / "checkpoints/hidden").rename(here / "checkpoints/.unfinished.new")
    assert "Using checkpoints/group/new, the newest model.\n" in run_ok("sample", "-n", 3, "--seed", 1).stderr
