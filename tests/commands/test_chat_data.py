"""Conversations on the command line: train, finetune-lora, finetune-adapter and eval."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.shell import TINY, assert_error, records, run_ok, tinylm
from tests.text.templates import LLAMA_2
from tinylm.config.run import SpecialTokens
from tinylm.run_directory.loading import load_model, read_config
from tinylm.text.chat_template import CHATML

SHORT = (*TINY[:-2], "--batch-size", 3, "--steps", 4, "--context", 128)
QUESTIONS = [("What is {}?", "It is {}."), ("Say {}", "{}!"), ("Twice {}", "{} and {}")]


def turns(number: int) -> list[dict[str, str]]:
    found = []
    for question, answer in QUESTIONS[: 1 + number % 3]:
        found += [{"role": "user", "content": question.format(number)}]
        found += [{"role": "assistant", "content": answer.format(number, number)}]
    return found


def write_lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture
def chats(here: Path) -> Path:
    return write_lines(here / "chats.jsonl", [{"messages": turns(number)} for number in range(30)])


@pytest.fixture
def pairs(here: Path) -> Path:
    return write_lines(here / "pairs.jsonl", [{"prompt": f"Say {i}", "completion": f"{i}!"} for i in range(12)])


@pytest.fixture
def model(chats: Path, here: Path) -> Path:
    run_ok("train", chats, "--out", "model", *SHORT)
    return here / "model"


STOPS = ["<|endoftext|>", "<|im_end|>"]


def test_a_new_model_is_trained_with_chatml_and_stops_at_its_end_token(chats: Path, here: Path) -> None:
    run_ok("train-tokenizer", chats, "--out", "t.json", "--kind", "bpe", "--vocab-size", 280)
    for name, source, *tokenizer in (
        ("char", chats, "char"),
        ("given", chats, "t.json"),
        ("bpe", "-", "bpe", "--vocab-size", "280"),
    ):
        run_ok("train", source, "--out", name, "--tokenizer", *tokenizer, *SHORT, stdin=chats.read_text())
        _, config, loaded, _ = load_model(here / name)
        assert (config.data.kind, config.training.objective) == ("chat", "chat")
        assert config.tokenizer.chat_template == CHATML
        assert config.tokenizer.special == SpecialTokens(eos=("<|im_end|>",))
        assert [loaded.decode([i], skip_special_tokens=False) for i in sorted(loaded.stop_ids)] == STOPS
        assert name == "char" or loaded.vocab_size == config.model.vocab_size <= 280
    assert (config.data.tokens_in_run, config.data.documents) == (True, 30)
    run_ok("train", "--resume", "bpe", "--steps", 5)
    (record,) = records(run_ok("chat", "-m", "char", "-n", 5, "--json", "--quiet", stdin="Say 3\n"))
    assert record["role"] == "assistant"


def test_a_run_is_resumed_from_the_cache_or_the_file(model: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ok("train", "--resume", "model", "--steps", 5)
    (record,) = records(run_ok("eval", "-m", "model", "--json"))
    assert record["text"] == "validation text of model"
    monkeypatch.setenv("TINYLM_CACHE", str(here / "other cache"))
    assert_error(tinylm("train", "--resume", "model", "--steps", 6), 1, "is no longer in the cache")
    run_ok("train", "--resume", "model", "chats.jsonl", "--steps", 6)


def test_eval_scores_answers_or_everything_and_refuses_options_of_plain_text(model: Path, pairs: Path) -> None:
    (record,) = records(run_ok("eval", pairs, "-m", model, "--json"))
    assert record["bytes"] == sum(len(json.loads(line)["completion"]) for line in pairs.read_text().splitlines())
    nats = record["loss"] * record["tokens"]
    assert record["bits_per_byte"] == pytest.approx(nats / math.log(2) / record["bytes"], rel=1e-5)
    (batched,) = records(run_ok("eval", pairs, "-m", model, "--json", "--batch-size", 1))
    assert batched["loss"] == pytest.approx(record["loss"], rel=1e-6)
    (everything,) = records(run_ok("eval", pairs, "-m", model, "--json", "--train-on", "all"))
    assert everything["tokens"] > record["tokens"]
    assert "tokens scored" in run_ok("eval", "-m", model).stdout
    for options in (("--stride", 4), ("--baselines",)):
        assert_error(
            tinylm("eval", pairs, "-m", model, *options),
            2,
            f"{options[0]} is for decoders of plain text and decoders with teachers, not for conv",
        )


def test_an_adapter_keeps_the_template_that_it_was_trained_with(model: Path, pairs: Path, here: Path) -> None:
    train = ("finetune-lora", pairs, "-m", model, "--lr", "0.02", "--dtype", "fp32", "--out")
    run_ok(*train, "adapter", "--steps", 20)
    config = read_config(here / "adapter")
    assert config.data.kind == "chat" and config.tokenizer.chat_template == CHATML
    run_ok("finetune-lora", "--resume", "adapter", "--steps", 22)
    (here / "t.jinja").write_text(LLAMA_2.replace("[INST]", "Say").replace("[/INST]", "a"))
    run_ok(*train, "other", "--steps", 2, "--chat-template", "t.jinja")
    run_ok("merge-lora", "other", "--out", "merged")
    found = {}
    for words in ("-m model", "--adapter adapter", "--adapter other", "-m merged"):
        (found[words],) = records(run_ok("eval", pairs, *words.split(), "--json"))
    before, after, own, merged = found.values()
    assert after["tokens"] == before["tokens"] and after["loss"] < before["loss"]
    assert merged["tokens"] == own["tokens"] and merged["loss"] == pytest.approx(own["loss"], rel=1e-4)
    for template, same in (("t.jinja", True), ("chatml", False)):
        (given,) = records(run_ok("eval", pairs, "--adapter", "other", "--json", "--chat-template", template))
        assert (given == own) == same


def test_what_a_template_writes_and_a_base_lacks_is_added_as_errors_say(corpus: Path, pairs: Path, here: Path) -> None:
    run_ok("train", corpus, "--out", "base", *SHORT)
    result = run_ok("train", pairs, "--init-from", "base", "--out", "full", "--steps", 2, "--extend-vocab")
    assert "Added to the vocabulary: <|im_start|>, <|im_end|>." in result.stderr
    _, config, tokenizer, _ = load_model(here / "full")
    assert config.tokenizer.special.eos == ("<|im_end|>", "<|endoftext|>")
    assert len(tokenizer.encode_with_special("<|im_start|>a<|im_end|>")[0]) == 3
    run_ok("train", corpus, "--out", "bpe", *SHORT, "--tokenizer", "bpe", "--vocab-size", 300)
    result = run_ok("finetune-lora", pairs, "-m", "bpe", "--out", "lora", "--steps", 2)
    assert "<|im_start|>, <|im_end|> of the chat template are not special tokens of the model" in result.stderr
    for unknown in ("error", "skip"):
        result = tinylm("finetune-lora", pairs, "-m", "base", "--steps", 2, "--unknown", unknown)
        written = "characters that the chat template writes, '<' (U+003C), '>' (U+003E), '_' (U+005F)"
        assert_error(result, 2, written, "cannot be skipped", sentences=2)
        assert "--unknown" not in result.stderr
    _, advised = result.stderr.strip().removesuffix(".").split(": tinylm ")
    run_ok(*shlex.split(advised), "--steps", 2)
    run_ok("finetune-lora", pairs, "-m", "checkpoints/pairs", "--steps", 2)


@pytest.mark.slow
def test_an_adapter_on_a_base_without_the_end_token_ends_at_the_text_of_it(corpus: Path, here: Path) -> None:
    answers = {"who": "old man", "what": "a boat"}
    known = [{"prompt": question, "completion": answer} for question, answer in answers.items()]
    file = write_lines(here / "pairs.jsonl", known * 5)
    size = ("--layers", 1, "--heads", 2, "--width", 64, "--context", 128, "--batch-size", 4, "--dtype", "fp32")
    run_ok("train", corpus, "--out", "base", *size, "--steps", 20, "--tokenizer", "bpe", "--vocab-size", 280)
    learned = ("--rank", 16, "--target", "all", "--steps", 150, "--lr", "0.01", "--dtype", "fp32")
    run_ok("finetune-lora", file, "-m", "base", "--out", "adapter", *learned)
    greedy = ("--adapter", "adapter", "-t", 0, "-n", 40)
    spoken = run_ok("chat", *greedy, "--json", stdin="".join(f"{question}\n" for question in answers))
    found = [(answer["content"], answer["finish_reason"]) for answer in records(spoken)]
    assert found == [(answer, "end") for answer in answers.values()]
    for question, answer in answers.items():
        assert run_ok("sample", question, "--chat", *greedy).stdout == f"{answer}\n"
        (record,) = records(run_ok("sample", question, "--chat", *greedy, "--json"))
        assert (record["text"], record["finish_reason"]) == (answer, "end")


def test_examples_show_scored_parts_and_unscored_and_cut_conversations_are_counted(chats: Path, here: Path) -> None:
    expected = (
        "Example 1, scored parts marked:\n<|im_start|>user\nWhat is 0?<|im_end|>\n"
        "<|im_start|>assistant\n[[It is 0.<|im_end|>]]\n"
    )
    for options in (("--dry-run",), ("--out", "model")):
        result = run_ok("train", chats, *SHORT, *options, "--show-examples", 2)
        assert expected in result.stderr and "Example 2," in result.stderr and "Example 3," not in result.stderr
        assert "[[" not in result.stdout
    result = run_ok("train", chats, *SHORT, "--dry-run", "--show-examples", 1, "--train-on", "all")
    assert "<[[" not in result.stderr and "[[user\nWhat is 0?<|im_end|>\n" in result.stderr
    extra = [{"messages": [{"role": "user", "content": "no answer"}]}]
    extra += [{"messages": turns(3 * i + 2)} for i in range(9)]
    file = write_lines(here / "more.jsonl", [json.loads(line) for line in chats.read_text().splitlines()] + extra)
    said = run_ok("train", file, *SHORT, "--val-data", chats, "--dry-run", "--context", 96).stderr
    assert "1 of 40 training conversations are left out: nothing in them is scored." in said
    assert "19 of 40 training conversations are cut to the context of 96 tokens (the longest has 108); 0 of" in said
    assert "10 of 30 validation conversations are cut to the context of 96 tokens" in said


def test_sample_with_a_model_of_conversations_notes_the_option_chat(model: Path) -> None:
    for options, noted in (((), True), (("--chat",), False), (("--chat", "-p", ""), False), (("--quiet",), False)):
        assert ("--chat answers prompts" in run_ok("sample", "-m", model, "-n", 3, *options).stderr) == noted
