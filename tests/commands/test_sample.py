"""tinylm sample with a decoder."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tinylm as tinylm_api
from tests.shell import assert_error, assert_usage_error, copied, records, run_ok, snapshot, tinylm
from tinylm.generation.speculative import NGramDraft
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config

PROMPT = "the old man"


def sampled(*arguments: object, **how: object) -> str:
    """The stdout of tinylm sample with seed 1 and 40 tokens, unless the arguments say otherwise."""
    return run_ok("sample", "--seed", 1, "-n", 40, *arguments, **how).stdout


def test_stdout_is_the_prompt_the_text_and_a_line_break(run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", run, "-p", PROMPT, "-n", 40, "--seed", 1, "--json"))
    assert sampled("-m", run, "-p", PROMPT) == PROMPT + record["text"] + "\n"
    assert sampled("-m", run, "-p", PROMPT, "--no-echo") == record["text"] + "\n"


def test_stderr_has_device_seed_and_speed(run: Path) -> None:
    stderr = run_ok("sample", "-m", run, "-n", 5, "--seed", 7, "--device", "cpu").stderr
    assert stderr.startswith("On cpu (1 threads): requested; fp32: exact.\nSeed 7.\n")
    assert "tokens in " in stderr and stderr.endswith(" per second.\n")


def test_quiet_leaves_stderr_empty(run: Path) -> None:
    assert run_ok("sample", "-m", run, "-n", 5, "-q").stderr == ""


def test_json_has_the_documented_keys(run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", run, "-p", PROMPT, "-n", 6, "--seed", 3, "--json"))
    assert list(record) == ["prompt", "text", "tokens", "seed", "finish_reason"]
    assert (record["prompt"], record["tokens"], record["seed"], record["finish_reason"]) == (PROMPT, 6, 3, "length")
    assert len(record["text"]) == 6


def test_the_random_seed_in_a_record_reproduces_the_text(run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", run, "-n", 40, "--json"))
    (again,) = records(run_ok("sample", "-m", run, "-n", 40, "--json"))
    assert record["seed"] != again["seed"]
    assert sampled("-m", run, "--seed", record["seed"]) == record["text"] + "\n"


def test_the_same_seed_gives_the_same_text_and_another_seed_another_text(run: Path) -> None:
    assert sampled("-m", run) == sampled("-m", run)
    assert sampled("-m", run) != sampled("-m", run, "--seed", 2)


def test_a_sample_does_not_depend_on_the_number_of_samples(run: Path) -> None:
    one, three, five = (
        [r["text"] for r in records(run_ok("sample", "-m", run, "-n", 40, "--seed", 1, "--json", "--num-samples", n))]
        for n in (1, 3, 5)
    )
    assert five[:3] == three
    assert three[:1] == one
    assert len(set(five)) == 5


def test_several_samples_are_printed_with_separators(run: Path) -> None:
    options = ("-m", run, "-p", PROMPT, "--num-samples", 3)
    texts = [record["text"] for record in records(run_ok("sample", "-n", 40, "--seed", 1, *options, "--json"))]
    assert sampled(*options) == "\n---\n".join(PROMPT + text for text in texts) + "\n"


def test_temperature_0_takes_the_most_likely_token_with_every_seed(run: Path) -> None:
    text = sampled("-m", run, "-t", 0, "--no-echo", "-p", PROMPT)
    assert text == sampled("-m", run, "-t", 0, "--seed", 99, "--no-echo", "-p", PROMPT)
    model, _, tokenizer, _ = load_model(run)
    ids = torch.tensor([tokenizer.encode(PROMPT).tolist()])
    with torch.inference_mode():
        most_likely = int(model.logits(model(ids).hidden[0, -1]).argmax())
    assert text[0] == tokenizer.decode([most_likely])
    assert text == sampled("-m", run, "--top-k", 1, "--no-echo", "-p", PROMPT)


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_text_equals_text_printed_at_once(kind: str, seed: int, request: pytest.FixtureRequest) -> None:
    """At temperature 10, byte tokens are almost uniform, so that most of the text is invalid UTF-8."""
    options = ("-m", request.getfixturevalue(kind), "-p", PROMPT, "-n", 120, "--seed", seed, "-t", 10)
    streamed, whole = (run_ok("sample", *options, how).stdout for how in ("--stream", "--no-stream"))
    assert streamed == whole
    assert "\ufffd" in whole or kind == "run"


@pytest.mark.parametrize("choice", [("-t", 0), ("-t", 1.0, "--repeat-penalty", 1.2), ("--quantize", "int8")], ids=str)
@pytest.mark.usefixtures("shelf_cache")
def test_speculative_decoding_does_not_change_the_text(choice: tuple[object, ...], run: Path) -> None:
    """600 tokens are enough for `--draft auto`, and go far past the context."""
    texts = [
        sampled("-m", run, "-n", 600, *choice, *draft) for draft in ((), ("--draft", "ngram"), ("--draft", "none"))
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.usefixtures("shelf_cache")
def test_the_ngrams_of_the_training_text_are_counted_once_for_all_prompts(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NGramDraft] = []

    def counted(tokens: np.ndarray) -> NGramDraft:
        made.append(NGramDraft(tokens))
        return made[-1]

    monkeypatch.setattr("tinylm.generation.draft_choice.NGramDraft", counted)
    (here / "prompts.jsonl").write_text('{"prompt": "the"}\n' * 3)
    run_ok("sample", "-m", run, "-f", here / "prompts.jsonl", "-n", 5, "--draft", "ngram")
    assert len(made) == 1


def test_without_the_training_text_draft_ngram_is_an_error_and_auto_works(run: Path, here: Path) -> None:
    alone = copied(run, here / "alone")
    config = read_config(alone)
    assert config.data is not None
    data = replace(config.data, fingerprint="0" * 64)
    RunDirectory(alone).write_config(replace(config, data=data))
    assert sampled("-m", alone, "-n", 600) == sampled("-m", run, "-n", 600)
    assert_error(
        tinylm("sample", "-m", alone, "--draft", "ngram"),
        2,
        "--draft ngram is not possible",
        "is no longer in the cache",
    )


def test_tokens_are_printed_as_they_are_generated(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[str] = []
    monkeypatch.setattr("tinylm.console.Console.result", lambda self, text, end="\n": chunks.append(text + end))
    run_ok("sample", "-m", run, "-p", PROMPT, "-n", 10, "--seed", 1)
    assert chunks[0] == PROMPT
    assert len(chunks) == 12 and chunks[-1] == "\n"
    chunks.clear()
    run_ok("sample", "-m", run, "-p", PROMPT, "-n", 10, "--seed", 1, "--no-stream")
    assert len(chunks) == 2


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
def test_a_stop_sequence_ends_the_text_before_it(kind: str, request: pytest.FixtureRequest) -> None:
    options = ("-m", request.getfixturevalue(kind), "--seed", 4, "-n", 80)
    whole = records(run_ok("sample", *options, "--json"))[0]["text"]
    for stop in (whole[10:12], whole[20:27]):
        (record,) = records(run_ok("sample", *options, "--stop", stop, "--json"))
        assert record["finish_reason"] == "stop"
        assert record["text"] == whole[: whole.index(stop)]
        assert run_ok("sample", *options, "--stop", stop).stdout == record["text"] + "\n"


def test_stop_may_be_given_several_times(run: Path) -> None:
    options = ("-m", run, "--seed", 4, "-n", 80)
    whole = records(run_ok("sample", *options, "--json"))[0]["text"]
    (record,) = records(run_ok("sample", *options, "--stop", whole[30:33], "--stop", whole[12:15], "--json"))
    assert record["text"] == whole[: min(whole.index(whole[30:33]), whole.index(whole[12:15]))]


def test_a_stop_sequence_in_the_prompt_is_ignored(run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", run, "-p", "sea", "--stop", "sea", "-n", 2, "--seed", 1, "--json"))
    assert (record["tokens"], record["finish_reason"]) == (2, "length")


def test_the_end_of_text_token_ends_a_sample(run: Path) -> None:
    """At temperature 9, every token is sampled now and then."""
    reasons = {}
    for record in records(run_ok("sample", "-m", run, "-n", 200, "-t", 9, "--num-samples", 8, "--seed", 0, "--json")):
        reasons.setdefault(record["finish_reason"], record)
    assert "end" in reasons
    assert reasons["end"]["tokens"] < 200
    assert len(reasons["end"]["text"]) == reasons["end"]["tokens"]


def test_an_empty_prompt_works(run: Path) -> None:
    assert sampled("-m", run, "-p", "") == sampled("-m", run)
    assert len(sampled("-m", run, "-p", "")) > 1


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_prompt_may_come_from_a_file_or_standard_input(end: str, run: Path, here: Path) -> None:
    expected = sampled("-m", run, "-p", PROMPT)
    (here / "prompt.txt").write_bytes((PROMPT + end).encode())
    assert sampled("-m", run, "-f", "prompt.txt") == expected
    assert sampled("-m", run, "-f", "-", stdin=PROMPT + end) == expected
    assert sampled("-m", run, "-p", "-", stdin=(PROMPT + end).encode()) == expected


def test_only_one_line_break_is_dropped_from_the_end_of_a_prompt(run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", run, "-p", "-", "-n", 1, "--json", stdin="sea\n\n"))
    assert record["prompt"] == "sea\n"


@pytest.mark.parametrize("where", ["file", "stdin", "argument"])
def test_an_invalid_utf_8_prompt_is_reported_with_source_and_offset(where: str, run: Path, here: Path) -> None:
    (here / "p.txt").write_bytes(b"the \xff sea")
    how = {"file": ("-f", "p.txt"), "stdin": ("-p", "-"), "argument": ("-p", "the \udcff sea")}[where]
    name = {"file": "p.txt", "stdin": "Standard input", "argument": "The prompt"}[where]
    assert_error(
        tinylm("sample", "-m", run, *how, stdin=b"the \xff sea"),
        2,
        f"{name} is not valid UTF-8 (byte 0xff at offset 4)",
    )


def test_a_missing_prompt_file_is_an_error(run: Path) -> None:
    assert_error(tinylm("sample", "-m", run, "-f", "no.txt"), 2, "--prompt-file no.txt", "No such file")


def test_an_unknown_character_is_reported_with_code_point_and_offset(run: Path) -> None:
    assert_error(tinylm("sample", "-m", run, "-p", "the sea é"), 2, "'é' (U+00E9) at offset 8", "--unknown skip")


def test_unknown_skip_drops_unknown_characters_with_a_warning(run: Path) -> None:
    result = run_ok("sample", "-m", run, "-p", "the é old ü man", "--unknown", "skip", "--seed", 1, "-n", 40)
    assert result.stdout == sampled("-m", run, "-p", "the  old  man")
    assert "Warning: " in result.stderr
    assert "'é' (U+00E9), 'ü' (U+00FC)" in result.stderr
    nothing = run_ok("sample", "-m", run, "-p", "éü", "--unknown", "skip", "--seed", 1, "-n", 40)
    assert nothing.stdout == sampled("-m", run)


def test_a_byte_level_bpe_model_accepts_any_character(bpe_run: Path) -> None:
    assert run_ok("sample", "-m", bpe_run, "-p", "日本 é", "-n", 3).stdout.startswith("日本 é")


def test_the_spelling_of_a_special_token_in_a_prompt_is_plain_text(bpe_run: Path) -> None:
    (record,) = records(run_ok("sample", "-m", bpe_run, "-p", "<|endoftext|>", "-n", 3, "--json"))
    assert record["prompt"] == "<|endoftext|>"


def test_a_prompt_longer_than_the_context_is_continued_from_its_tail_with_a_warning(run: Path) -> None:
    prompt = "the old man said it was cold"
    result = run_ok("sample", "-m", run, "-p", prompt, "-n", 40, "--seed", 1)
    assert (
        "Warning: The prompt has 28 tokens, more than the context of 16: only its last tokens are used."
        in result.stderr
    )
    assert result.stdout.startswith(prompt)
    assert len(result.stdout) > len(prompt) + 20


def test_with_strict_a_prompt_longer_than_the_context_is_an_error(run: Path) -> None:
    result = tinylm("sample", "-m", run, "-p", "a" * 17, "--strict")
    assert_error(result, 2, "17 tokens, more than the context of 16", "--strict")
    run_ok("sample", "-m", run, "-p", "a" * 16, "--strict", "-n", 1)


def test_generation_continues_past_the_context(run: Path) -> None:
    for record in records(run_ok("sample", "-m", run, "-n", 100, "--num-samples", 6, "--seed", 2, "--json")):
        assert record["tokens"] == 100 or record["finish_reason"] == "end"


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
def test_the_cache_does_not_change_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    options = ("-m", request.getfixturevalue(kind), "-p", PROMPT, "-n", 60, "--num-samples", 2)
    assert sampled(*options) == sampled(*options, "--no-cache")


def test_int8_weights_give_the_token_that_is_clearly_the_most_likely(run: Path, here: Path) -> None:
    text, expected = "the old man said", {}
    model = tinylm_api.load(run)
    for end in range(1, len(text)):
        best, second = model.logits([model.encode(text[:end])])[0, -1].topk(2).values.tolist()
        if best - second > 1:  # far more than the rounding
            expected[text[:end]] = model.generate(text[:end], max_tokens=1, temperature=0.0)
    assert len(expected) > 4
    (here / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in expected))
    found = run_ok("sample", "-m", run, "-f", here / "prompts.jsonl", "-n", 1, "-t", 0, "--quantize", "int8", "--json")
    assert {record["prompt"]: record["text"] for record in records(found)} == expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_number_format_can_sample(dtype: str, run: Path) -> None:
    result = run_ok("sample", "-m", run, "-n", 5, "--dtype", dtype, "--quantize", "int8")
    assert f"; {dtype}: requested." in result.stderr


def test_extreme_top_k_top_p_and_min_p_leave_only_the_most_likely_token(run: Path) -> None:
    greedy = sampled("-m", run, "-t", 0)
    for option, value in (("-k", 1), ("--top-p", 0.0001), ("--min-p", 0.9999)):
        assert sampled("-m", run, option, value) == greedy
        assert sampled("-m", run) != greedy


def test_a_repeat_penalty_makes_repetition_rarer(run: Path) -> None:
    plain, penalised = (sampled("-m", run, "-n", 12, "-t", 0.2, "--repeat-penalty", x) for x in (1, 50))
    assert len(set(penalised)) > len(set(plain))


def test_an_adapter_changes_the_text_and_finds_its_base(adapter: Path, run: Path) -> None:
    with_it = sampled("--adapter", adapter, "-t", 0.5, "-n", 100)
    assert with_it != sampled("-m", run, "-t", 0.5, "-n", 100)
    assert with_it == sampled("--adapter", adapter, "-m", run, "-t", 0.5, "-n", 100)


def test_a_model_as_adapter_and_an_adapter_as_model_are_errors(run: Path, adapter: Path) -> None:
    assert_error(tinylm("sample", "--adapter", run), 2, "is a model, not an adapter", "--model")
    assert_error(tinylm("sample", "--model", adapter), 2, "is an adapter, not a model", "--adapter", "merge-lora")


def test_the_default_is_the_newest_model_and_never_an_adapter(run: Path, adapter: Path, here: Path) -> None:
    for age, (name, source) in enumerate({"hidden": run, "adapter": adapter, "new": run, "old": run}.items()):
        path = copied(source, here / "checkpoints" / name)
        for file in path.glob("*.safetensors"):
            os.utime(file, (1e9 - age, 1e9 - age))
    (here / "checkpoints/hidden").rename(here / "checkpoints/.unfinished.new")
    result = run_ok("sample", "-n", 3, "--seed", 1)
    assert f"Using {Path('checkpoints/new')}, the newest model.\n" in result.stderr


def test_without_a_model_the_error_says_how_to_train_one() -> None:
    assert_error(tinylm("sample"), 2, "no trained model under checkpoints/", "tinylm train corpus.txt", "--model")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("-n 0", "--max-tokens"),
        ("--num-samples 0", "--num-samples"),
        ("-t -1", "--temperature is -1.0"),
        ("-t nan", "--temperature is nan"),
        ("-k -1", "--top-k is -1"),
        ("--top-p 0", "--top-p is 0.0"),
        ("--top-p 1.1", "--top-p is 1.1"),
        ("--min-p 1", "--min-p is 1.0"),
        ("--min-p -0.1", "--min-p is -0.1"),
        ("--repeat-penalty 0", "--repeat-penalty is 0.0"),
        ("--repeat-penalty inf", "--repeat-penalty is inf"),
        ("--unknown drop", "--unknown is 'drop'; it must be one of: error, skip"),
        ("--quantize int4", "--quantize is 'int4'; it must be one of: none, int8"),
        ("--draft good", "--draft is 'good'; it must be one of: auto, ngram, none"),
        (
            "--draft ngram --num-samples 2",
            "--draft ngram is not possible: speculative decoding is for one sample at a time; leave it out",
        ),
        ("--draft ngram --no-cache", "speculative decoding needs the cache"),
        ("--prompt a --prompt-file b", "--prompt and --prompt-file contradict each other"),
        ("--device tpu", "--device is 'tpu'"),
        ("--dtype int8", "--dtype is 'int8'"),
    ],
)
def test_invalid_values_are_reported_with_their_flags(flags: str, message: str, run: Path) -> None:
    assert_error(tinylm("sample", "-m", run, *flags.split()), 2, message)


def test_values_of_the_wrong_type_are_usage_errors(run: Path) -> None:
    assert_usage_error(tinylm("sample", "-m", run, "-n", "many"), "--max-tokens", "integer")


def test_sampling_writes_no_file(run: Path, here: Path) -> None:
    before = snapshot(run), snapshot(here)
    sampled("-m", run)
    assert (snapshot(run), snapshot(here)) == before
