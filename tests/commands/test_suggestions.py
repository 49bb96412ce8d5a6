"""Errors for names of other tools, abbreviations and addresses lead to what tinylm has."""

from pathlib import Path

import pytest
import typer.main

from tests.shell import assert_error, assert_usage_error, run_ok, tinylm
from tinylm.cli import app
from tinylm.commands.suggestions import OTHER_ARGUMENTS, OTHER_COMMANDS, OTHER_OPTIONS, suggest_options

COMMANDS = typer.main.get_command(app).commands
OPTIONS = {
    name: [o.removeprefix("--") for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
    for name, command in COMMANDS.items()
}


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("train a.txt --learning-rate 1", "--lr"),
        ("train a.txt --learning_rate=1", "--lr"),
        ("train a.txt --max_iters 5", "--steps"),
        ("train a.txt --iters 5", "--steps"),
        ("train a.txt --epoch 5", "--epochs"),
        ("train a.txt --num-epochs 5", "--epochs"),
        ("train a.txt --n-layer 5", "--layers"),
        ("train a.txt --n-head 5", "--heads"),
        ("train a.txt --n_embd 5", "--width"),
        ("train a.txt --batch 5", "--batch-size"),
        ("train a.txt --output x", "--out"),
        ("train a.txt --block-size 64", "--context or --sequence-length"),
        ("train a.txt --random-seed 1", "--seed"),
        ("train a.txt --base-model x", "--init-from"),
        ("train a.txt --widht 8", "--width"),
        ("finetune-lora a.txt --block-size 64", "--sequence-length"),
        ("finetune-lora a.txt --lora-r 8", "--rank"),
        ("sample --temp 0.5", "--temperature"),
        ("sample --max-new-tokens 5", "--max-tokens"),
        ("sample --max-length 5", "--max-tokens"),
        ("sample --n-predict 5", "--max-tokens"),
        ("sample --model-path x", "--model"),
        ("sample --prom x", "--prompt or --prompt-file"),
        ("chat --temp 0", "--temperature"),
        ("eval --temp 0", "--temperature"),
    ],
)
def test_an_unknown_option_leads_to_that_of_tinylm(typed: str, meant: str) -> None:
    option = next(word for word in typed.split() if word.startswith("--")).partition("=")[0]
    assert_usage_error(tinylm(*typed.split()), f"No such option: {option}. Did you mean {meant}?")


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("train --data a.txt", "tinylm train CORPUS."),
        ("eval --dataset a.txt", "tinylm eval TEXT."),
        ("info --model a", "tinylm info RUN."),
        ("export --model a", "tinylm export MODEL."),
    ],
)
def test_an_option_for_an_argument_is_explained(typed: str, meant: str) -> None:
    assert_usage_error(tinylm(*typed.split()), f"It is an argument without a flag: {meant}")


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    assert "Did you mean" not in tinylm("train", "a.txt", "--zzz").output
    assert "Did you mean" not in tinylm("zzz").output


def test_every_name_in_the_tables_leads_to_something_that_exists_and_is_not_a_name_of_tinylm() -> None:
    for ours, others in OTHER_OPTIONS.items():
        having = [options for options in OPTIONS.values() if ours in options]
        assert having, ours
        for options in having:
            assert all(name in options or ours in suggest_options(name, options) for name in others.split()), ours
    arguments = {p.name for c in COMMANDS.values() for p in c.params if p.param_type_name == "argument"}
    assert arguments >= set(OTHER_ARGUMENTS)
    typed = " ".join(OTHER_COMMANDS.values()).split()
    assert not set(typed) & set(COMMANDS) and len(typed) == len(set(typed))
    named = {line.split()[1] for line in OTHER_COMMANDS if line.startswith("tinylm ")}
    assert named <= {*COMMANDS, "--help", "--version"}


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("generate", "tinylm sample"),
        ("finetune", "tinylm finetune-lora"),
        ("fine_tune", "tinylm finetune-lora"),
        ("lora", "tinylm finetune-lora"),
        ("merge", "tinylm merge-lora"),
        ("convert", "tinylm import or tinylm export"),
        ("serve", "tinylm export --to gguf, then llama-server -m FILE"),
        ("trian", "tinylm train"),
        ("sam", "tinylm sample"),
        ("my book.txt", "tinylm train 'my book.txt'"),
    ],
)
def test_an_unknown_command_leads_to_that_of_tinylm(typed: str, meant: str, here: Path) -> None:
    (here / "my book.txt").touch()
    assert_usage_error(tinylm(typed), f"No such command '{typed}'. Did you mean: {meant}?")


@pytest.mark.parametrize(
    "typed, sentence",
    [
        ("sample once upon", 'Quote a prompt of several words: tinylm sample "Once upon a time".'),
        ("chat hello", 'To answer a single question: tinylm sample --chat "QUESTION".'),
        ("export a b --to gguf --out c", "The path to write is given with --out."),
        ("doctor now", "Got unexpected extra argument(s) (now)"),
    ],
)
def test_too_many_arguments_are_explained(typed: str, sentence: str) -> None:
    assert_usage_error(tinylm(*typed.split()), sentence)


@pytest.mark.parametrize(
    "typed, advice",
    [
        ("train https://x.org/a.txt", "fetch and pipe it: curl -fL https://x.org/a.txt | tinylm train -."),
        ("train b.txt https://x.org/a?b&c", "curl -fL 'https://x.org/a?b&c' | tinylm train -."),
        ("eval FTP://x.org/a.txt", "curl -fL ftp://x.org/a.txt | tinylm eval -."),
        ("train a.txt --val-data https://x.org/b", "fetch it first: curl -fLO https://x.org/b."),
        ("sample -m https://huggingface.co/a/b-1.5", "a model of the Hugging Face hub is written hf:a/b-1.5."),
        ("import hf://a/b --out c", "a model of the Hugging Face hub is written hf:a/b."),
        ("info https://x.org/m.gguf", "fetch it first: curl -fLO https://x.org/m.gguf."),
    ],
)
def test_an_address_in_place_of_a_path_says_how_to_fetch_it(typed: str, advice: str) -> None:
    assert_error(tinylm(*typed.split()), 2, " is an address", advice, sentences=9)


def test_an_address_may_be_a_prompt(bpe_run: Path) -> None:
    assert run_ok("sample", "https://x.org", "-m", bpe_run, "-n", 1).stdout.startswith("https://x.org")


def test_an_unknown_key_in_a_file_leads_to_that_of_tinylm(here: Path) -> None:
    (here / "my.toml").write_text("learning_rate = 1")
    message = "my.toml sets learning_rate, which tinylm train does not have; use lr."
    assert message in tinylm("train", "a.txt", "--config", "my.toml").stderr
