import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.shell import copied, done, misused, records, refused, snapshot, tinylm
from tests.variants import small
from tinylm.cache import cache_root
from tinylm.checkpoint import RunFolder, load_model, read_config
from tinylm.commands.compiling import choose_code
from tinylm.commands.model import open_model
from tinylm.console import Console
from tinylm.device import can_compile
from tinylm.errors import TinyLMError, UsageError
from tinylm.inference.compiled import CompiledDecoder, load_compiled
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder

PROMPT = "the old man"


def written(*arguments: object, **how: object) -> str:
    return done("sample", "--seed", 1, "-n", 40, *arguments, **how).stdout


def test_stdout_is_the_prompt_and_the_text_and_a_line_end(run: Path) -> None:
    (record,) = records(done("sample", "-m", run, "-p", PROMPT, "-n", 40, "--seed", 1, "--json"))
    assert written("-m", run, "-p", PROMPT) == PROMPT + record["text"] + "\n"
    assert written("-m", run, "-p", PROMPT, "--no-echo") == record["text"] + "\n"


def test_stderr_says_device_and_why_seed_and_speed(run: Path) -> None:
    stderr = done("sample", "-m", run, "-n", 5, "--seed", 7, "--device", "cpu").stderr
    assert stderr.startswith("On cpu (1 threads): asked for; fp32: exact.\nSeed 7.\n")
    assert "tokens in " in stderr and stderr.endswith(" a second.\n")


def test_quiet_leaves_stderr_empty(run: Path) -> None:
    assert done("sample", "-m", run, "-n", 5, "-q").stderr == ""


def test_json_has_the_promised_keys(run: Path) -> None:
    (record,) = records(done("sample", "-m", run, "-p", PROMPT, "-n", 6, "--seed", 3, "--json"))
    assert list(record) == ["prompt", "text", "tokens", "seed", "finish_reason"]
    assert (record["prompt"], record["tokens"], record["seed"], record["finish_reason"]) == (PROMPT, 6, 3, "length")
    assert len(record["text"]) == 6


def test_without_a_seed_one_is_drawn_and_said_and_repeats_the_text(run: Path) -> None:
    (record,) = records(done("sample", "-m", run, "-n", 40, "--json"))
    (again,) = records(done("sample", "-m", run, "-n", 40, "--json"))
    assert record["seed"] != again["seed"]
    assert written("-m", run, "--seed", record["seed"]) == record["text"] + "\n"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(run: Path) -> None:
    assert written("-m", run) == written("-m", run)
    assert written("-m", run) != written("-m", run, "--seed", 2)


def test_sample_i_is_the_same_whatever_the_number_of_samples(run: Path) -> None:
    one, three, five = (
        [r["text"] for r in records(done("sample", "-m", run, "-n", 40, "--seed", 1, "--json", "--num-samples", n))]
        for n in (1, 3, 5)
    )
    assert five[:3] == three
    assert three[:1] == one
    assert len(set(five)) == 5


def test_several_samples_are_separated(run: Path) -> None:
    options = ("-m", run, "-p", PROMPT, "--num-samples", 3)
    texts = [record["text"] for record in records(done("sample", "-n", 40, "--seed", 1, *options, "--json"))]
    assert written(*options) == "\n---\n".join(PROMPT + text for text in texts) + "\n"


def test_temperature_0_takes_the_likeliest_token_whatever_the_seed(run: Path) -> None:
    text = written("-m", run, "-t", 0, "--no-echo", "-p", PROMPT)
    assert text == written("-m", run, "-t", 0, "--seed", 99, "--no-echo", "-p", PROMPT)
    model, _, tokenizer, _ = load_model(run)
    ids = torch.tensor([tokenizer.encode(PROMPT).tolist()])
    with torch.inference_mode():
        likeliest = int(model.logits(model(ids).hidden[0, -1]).argmax())
    assert text[0] == tokenizer.decode([likeliest])
    assert text == written("-m", run, "--top-k", 1, "--no-echo", "-p", PROMPT)


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
@pytest.mark.parametrize("seed", range(3))
def test_streamed_text_equals_text_printed_at_once(kind: str, seed: int, request: pytest.FixtureRequest) -> None:
    """Bytes drawn almost evenly are mostly broken UTF-8."""
    options = ("-m", request.getfixturevalue(kind), "-p", PROMPT, "-n", 120, "--seed", seed, "-t", 10)
    streamed, whole = (done("sample", *options, how).stdout for how in ("--stream", "--no-stream"))
    assert streamed == whole
    assert "\ufffd" in whole or kind == "run"


@pytest.mark.parametrize("choice", [("-t", 0), ("-t", 1.0, "--repeat-penalty", 1.2), ("--quantize", "int8")], ids=str)
@pytest.mark.usefixtures("shelf_cache")
def test_a_draft_changes_no_text(choice: tuple[object, ...], run: Path) -> None:
    """600 tokens are enough for a draft by itself, and go far past the context."""
    texts = [
        written("-m", run, "-n", 600, *choice, *draft) for draft in ((), ("--draft", "ngram"), ("--draft", "none"))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_without_the_training_text_there_is_a_draft_only_where_it_was_not_asked_for(run: Path, here: Path) -> None:
    alone = copied(run, here / "alone")
    config = read_config(alone)
    assert config.data is not None
    data = replace(config.data, fingerprint="0" * 64)
    RunFolder(alone).write_config(replace(config, data=data))
    assert written("-m", alone, "-n", 600) == written("-m", run, "-n", 600)
    refused(
        tinylm("sample", "-m", alone, "--draft", "ngram"), 2, "--draft ngram is not possible", "is not here any more"
    )


@pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")
def test_compiled_code_changes_no_text_and_is_kept_for_next_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written("-m", run, "-n", 200, "--compile", "off")
    first = done("sample", "-m", run, "-n", 200, "--seed", 1, "--compile", "on")
    assert first.stdout == expected and "Compiling, once for models of this shape" in first.stderr
    (kept,) = (cache_root() / "compiled").iterdir()
    monkeypatch.setattr("tinylm.inference.compiled.compile_decoder", None)
    used: list[Path] = []

    def load(decoder: Decoder, file: Path) -> CompiledDecoder:
        used.append(file)
        return load_compiled(decoder, file)

    monkeypatch.setattr("tinylm.inference.compiled.load_compiled", load)
    again = done("sample", "-m", run, "-n", 200, "--seed", 1)
    assert again.stdout == expected and "ompil" not in again.stderr
    assert used == [kept]
    written("-m", run, "-n", 127)
    written("-m", run, "-n", 200, "--num-samples", 2)
    assert used == [kept]


def compiling_by(outcome: Exception | None, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """In place of a compiler, one that notes what it was to write."""
    asked: list[Path] = []

    def compile_decoder(decoder: object, file: Path) -> None:
        asked.append(file)
        if outcome is not None:
            raise outcome

    monkeypatch.setattr("tinylm.inference.compiled.compile_decoder", compile_decoder)
    monkeypatch.setattr("tinylm.inference.compiled.load_compiled", lambda decoder, file: None)
    monkeypatch.setattr("tinylm.device.can_compile", lambda device: True)
    monkeypatch.setattr("tinylm.commands.compiling.COMPILE_FROM", 300)
    return asked


@pytest.mark.parametrize(
    "flags, compiles",
    [
        ("-n 299", False),
        ("-n 300", True),
        ("-n 300 --compile off", False),
        ("-n 300 --num-samples 2", False),
        ("-n 300 --no-cache", False),
        ("-n 299 --quantize int8", False),
        ("-n 300 --quantize int8", True),
        ("-n 5 --compile on", True),
    ],
)
def test_many_tokens_of_one_sample_are_worth_compiling(
    flags: str, compiles: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = compiling_by(None, monkeypatch)
    done("sample", "-m", run, *flags.split())
    assert bool(asked) == compiles


def test_prompts_of_a_file_are_counted_together_where_compiling_is_weighed(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = compiling_by(None, monkeypatch)
    for prompts, times in ((2, 0), (3, 1)):
        (here / "prompts.jsonl").write_text('{"prompt": "the"}\n' * prompts)
        done("sample", "-m", run, "-f", here / "prompts.jsonl", "-n", 100)
        assert len(asked) == times


def test_a_compiler_that_fails_is_an_error_where_it_was_asked_for_and_a_warning_elsewhere(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written("-m", run, "-n", 300)
    compiling_by(TinyLMError("It failed."), monkeypatch)
    text = done("sample", "-m", run, "-n", 300, "--seed", 1)
    assert text.stdout == expected and "Warning: It failed.\n" in text.stderr
    refused(tinylm("sample", "-m", run, "--compile", "on"), 1, "It failed.")


def test_compiling_without_a_compiler_is_refused_where_it_was_asked_for(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = compiling_by(None, monkeypatch)
    monkeypatch.setattr("tinylm.device.can_compile", lambda device: False)
    done("sample", "-m", run, "-n", 300)
    refused(tinylm("sample", "-m", run, "--compile", "on"), 2, "there is no C++ compiler here; leave it out")
    assert not asked


def test_what_is_not_compiled_is_refused_where_that_was_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(Console(quiet=True), run, None, "cpu")
    given = {"int8": False, "tokens": 10**6, "samples": 1, "cache": True}
    others = {
        "merge-lora": replace(opened, adapters=(object(),)),
        "write on from a prompt": replace(opened, network=build_model(small(architecture="encoder"))),
    }
    for reason, other in others.items():
        assert choose_code(other, "auto", **given) is None
        with pytest.raises(UsageError, match=f"--compile on is not possible: .*{reason}.*; leave it out"):
            choose_code(other, "on", **given)

    def homeless(name: str) -> Path:
        raise TinyLMError("There is no home folder for a cache; set TINYLM_CACHE to a folder.")

    monkeypatch.setattr("tinylm.cache.private_folder", homeless)
    assert choose_code(opened, "auto", **given) is None
    with pytest.raises(UsageError, match="There is no home folder for a cache; set TINYLM_CACHE to a folder"):
        choose_code(opened, "on", **given)


def test_text_is_printed_while_it_is_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("tinylm.console.Console.result", lambda self, text, end="\n": pieces.append(text + end))
    done("sample", "-m", run, "-p", PROMPT, "-n", 10, "--seed", 1)
    assert pieces[0] == PROMPT
    assert len(pieces) == 12 and pieces[-1] == "\n"
    pieces.clear()
    done("sample", "-m", run, "-p", PROMPT, "-n", 10, "--seed", 1, "--no-stream")
    assert len(pieces) == 2


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
def test_a_stop_text_ends_the_text_before_it(kind: str, request: pytest.FixtureRequest) -> None:
    options = ("-m", request.getfixturevalue(kind), "--seed", 4, "-n", 80)
    whole = records(done("sample", *options, "--json"))[0]["text"]
    for stop in (whole[10:12], whole[20:27]):
        (record,) = records(done("sample", *options, "--stop", stop, "--json"))
        assert record["finish_reason"] == "stop"
        assert record["text"] == whole[: whole.index(stop)]
        assert done("sample", *options, "--stop", stop).stdout == record["text"] + "\n"


def test_stop_may_be_given_several_times(run: Path) -> None:
    options = ("-m", run, "--seed", 4, "-n", 80)
    whole = records(done("sample", *options, "--json"))[0]["text"]
    (record,) = records(done("sample", *options, "--stop", whole[30:33], "--stop", whole[12:15], "--json"))
    assert record["text"] == whole[: min(whole.index(whole[30:33]), whole.index(whole[12:15]))]


def test_a_stop_text_in_the_prompt_does_not_count(run: Path) -> None:
    (record,) = records(done("sample", "-m", run, "-p", "sea", "--stop", "sea", "-n", 2, "--seed", 1, "--json"))
    assert (record["tokens"], record["finish_reason"]) == (2, "length")


def test_the_end_of_text_ends_the_text(run: Path) -> None:
    """At a temperature this high, every token comes up."""
    reasons = {}
    for record in records(done("sample", "-m", run, "-n", 200, "-t", 9, "--num-samples", 8, "--seed", 0, "--json")):
        reasons.setdefault(record["finish_reason"], record)
    assert "end" in reasons
    assert reasons["end"]["tokens"] < 200
    assert len(reasons["end"]["text"]) == reasons["end"]["tokens"]


def test_an_empty_prompt_works(run: Path) -> None:
    assert written("-m", run, "-p", "") == written("-m", run)
    assert len(written("-m", run, "-p", "")) > 1


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_prompt_from_a_file_or_standard_input_is_the_prompt(end: str, run: Path, here: Path) -> None:
    expected = written("-m", run, "-p", PROMPT)
    (here / "prompt.txt").write_bytes((PROMPT + end).encode())
    assert written("-m", run, "-f", "prompt.txt") == expected
    assert written("-m", run, "-f", "-", stdin=PROMPT + end) == expected
    assert written("-m", run, "-p", "-", stdin=(PROMPT + end).encode()) == expected


def test_only_one_line_end_is_dropped(run: Path) -> None:
    (record,) = records(done("sample", "-m", run, "-p", "-", "-n", 1, "--json", stdin="sea\n\n"))
    assert record["prompt"] == "sea\n"


@pytest.mark.parametrize("where", ["file", "stdin", "argument"])
def test_a_prompt_of_invalid_utf_8_names_the_place(where: str, run: Path, here: Path) -> None:
    (here / "p.txt").write_bytes(b"the \xff sea")
    how = {"file": ("-f", "p.txt"), "stdin": ("-p", "-"), "argument": ("-p", "the \udcff sea")}[where]
    name = {"file": "p.txt", "stdin": "Standard input", "argument": "The prompt"}[where]
    refused(
        tinylm("sample", "-m", run, *how, stdin=b"the \xff sea"),
        2,
        f"{name} is not valid UTF-8 (byte 0xff at offset 4)",
    )


def test_a_missing_prompt_file_is_named(run: Path) -> None:
    refused(tinylm("sample", "-m", run, "-f", "no.txt"), 2, "--prompt-file no.txt", "No such file")


def test_a_character_the_model_never_saw_is_named_with_code_point_and_offset(run: Path) -> None:
    refused(tinylm("sample", "-m", run, "-p", "the sea é"), 2, "'é' (U+00E9) at offset 8", "--unknown skip")


def test_unknown_skip_leaves_such_characters_out_and_says_so(run: Path) -> None:
    result = done("sample", "-m", run, "-p", "the é old ü man", "--unknown", "skip", "--seed", 1, "-n", 40)
    assert result.stdout == written("-m", run, "-p", "the  old  man")
    assert "Warning: " in result.stderr
    assert "'é' (U+00E9), 'ü' (U+00FC)" in result.stderr
    nothing = done("sample", "-m", run, "-p", "éü", "--unknown", "skip", "--seed", 1, "-n", 40)
    assert nothing.stdout == written("-m", run)


def test_a_bpe_model_takes_any_character(bpe_run: Path) -> None:
    assert done("sample", "-m", bpe_run, "-p", "日本 é", "-n", 3).stdout.startswith("日本 é")


def test_text_like_a_special_token_stays_text(bpe_run: Path) -> None:
    (record,) = records(done("sample", "-m", bpe_run, "-p", "<|endoftext|>", "-n", 3, "--json"))
    assert record["prompt"] == "<|endoftext|>"


def test_a_prompt_longer_than_the_context_goes_on_from_its_tail_with_a_warning(run: Path) -> None:
    prompt = "the old man said it was cold"
    result = done("sample", "-m", run, "-p", prompt, "-n", 40, "--seed", 1)
    assert (
        "Warning: The prompt has 28 tokens, and the model sees 16 at a time: it goes on from the tail." in result.stderr
    )
    assert result.stdout.startswith(prompt)
    assert len(result.stdout) > len(prompt) + 20


def test_strict_refuses_a_prompt_longer_than_the_context(run: Path) -> None:
    refused(tinylm("sample", "-m", run, "-p", "a" * 17, "--strict"), 2, "17 tokens", "sees 16", "--strict")
    done("sample", "-m", run, "-p", "a" * 16, "--strict", "-n", 1)


def test_generation_runs_on_past_the_context(run: Path) -> None:
    for record in records(done("sample", "-m", run, "-n", 100, "--num-samples", 6, "--seed", 2, "--json")):
        assert record["tokens"] == 100 or record["finish_reason"] == "end"


@pytest.mark.parametrize("kind", ["run", "bpe_run"])
def test_the_cache_changes_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    options = ("-m", request.getfixturevalue(kind), "-p", PROMPT, "-n", 60, "--num-samples", 2)
    assert written(*options) == written(*options, "--no-cache")


def test_quantized_weights_write_nearly_the_same(run: Path) -> None:
    exact, rough = (written("-m", run, "-t", 0, "-n", 12, "--quantize", how) for how in ("none", "int8"))
    assert rough[:4] == exact[:4]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_number_format_samples(dtype: str, run: Path) -> None:
    result = done("sample", "-m", run, "-n", 5, "--dtype", dtype, "--quantize", "int8")
    assert f"; {dtype}: asked for." in result.stderr


def test_top_k_top_p_and_min_p_narrow_the_choice_to_the_likeliest(run: Path) -> None:
    greedy = written("-m", run, "-t", 0)
    for option, value in (("-k", 1), ("--top-p", 0.0001), ("--min-p", 0.9999)):
        assert written("-m", run, option, value) == greedy
        assert written("-m", run) != greedy


def test_a_repeat_penalty_makes_repetition_rarer(run: Path) -> None:
    plain, penalised = (written("-m", run, "-n", 12, "-t", 0.2, "--repeat-penalty", x) for x in (1, 50))
    assert len(set(penalised)) > len(set(plain))


def test_an_adapter_changes_the_text_and_finds_its_base(adapter: Path, run: Path) -> None:
    with_it = written("--adapter", adapter, "-t", 0.5, "-n", 100)
    assert with_it != written("-m", run, "-t", 0.5, "-n", 100)
    assert with_it == written("--adapter", adapter, "-m", run, "-t", 0.5, "-n", 100)


def test_a_model_is_no_adapter_and_an_adapter_no_model(run: Path, adapter: Path) -> None:
    refused(tinylm("sample", "--adapter", run), 2, "is a model, not an adapter", "--model")
    refused(tinylm("sample", "--model", adapter), 2, "is an adapter, not a model", "--adapter", "merge-lora")


def test_the_newest_model_is_chosen_and_said_and_never_an_adapter(run: Path, adapter: Path, here: Path) -> None:
    for age, (name, source) in enumerate({"hidden": run, "adapter": adapter, "new": run, "old": run}.items()):
        path = copied(source, here / "checkpoints" / name)
        for file in path.glob("*.safetensors"):
            os.utime(file, (1e9 - age, 1e9 - age))
    (here / "checkpoints/hidden").rename(here / "checkpoints/.unfinished.new")
    result = done("sample", "-n", 3, "--seed", 1)
    assert f"Using {Path('checkpoints/new')}, the newest model.\n" in result.stderr


def test_no_model_at_all_says_how_to_get_one() -> None:
    refused(tinylm("sample"), 2, "no trained model under checkpoints/", "tinylm train corpus.txt", "--model")


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
            "--draft ngram is not possible: it is for one sample at a time; leave it out",
        ),
        ("--draft ngram --no-cache", "it needs the cache"),
        ("--compile yes", "--compile is 'yes'; it must be one of: auto, on, off"),
        ("--compile on --num-samples 2", "--compile on is not possible: it is for one sample at a time; leave it out"),
        ("--compile on --no-cache", "it needs the cache"),
        ("--prompt a --prompt-file b", "--prompt and --prompt-file contradict each other"),
        ("--device tpu", "--device is 'tpu'"),
        ("--dtype int8", "--dtype is 'int8'"),
    ],
)
def test_values_that_cannot_be_used_are_named(flags: str, message: str, run: Path) -> None:
    refused(tinylm("sample", "-m", run, *flags.split()), 2, message)


def test_values_of_the_wrong_kind_are_refused(run: Path) -> None:
    misused(tinylm("sample", "-m", run, "-n", "many"), "--max-tokens", "integer")


def test_sampling_writes_no_file(run: Path, here: Path) -> None:
    before = snapshot(run), snapshot(here)
    written("-m", run)
    assert (snapshot(run), snapshot(here)) == before
