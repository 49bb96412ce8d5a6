"""Messages name flags and the command to run next, and names of other tools lead to those of tinylm."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.shell import TINY, assert_error, run_ok, story, tinylm
from tinylm.cli import COMMANDS, app, load_command
from tinylm.commands.console import Console
from tinylm.commands.next_steps import next_step, resume_command
from tinylm.commands.option_sources import settings_to_flags
from tinylm.commands.suggestions import OTHER_ARGUMENTS, OTHER_COMMANDS
from tinylm.config.similar_names import OTHER_OPTIONS, suggest_options
from tinylm.errors import (
    AdapterNotModelError,
    NoRunError,
    NotMergeableError,
    NotResumableError,
    NotTrainedError,
    OtherRunKindError,
    RunExistsError,
    SaveError,
    TinyLMError,
    UnknownCharactersError,
    UsageError,
)

BUILT: dict[str, Any] = typer.main.get_command(app).commands


def context_of(command: str) -> Any:
    """The Typer context of a command that was called without arguments."""
    return typer.Context(BUILT[command], info_name=command)


TRAIN = context_of("train")


def test_settings_of_the_command_become_flags_and_other_words_stay() -> None:
    for command, message, shown in (
        ("train", "`kv_heads` is 3.", "--kv-heads is 3."),
        ("train", "choose `bias=False`, `bias=True` or `bias`.", "choose --no-bias, --bias or --bias."),
        ("train", '`position="rope"` rotates', "--position rope rotates"),
        ("train", "`warmup_steps=5` is", "--warmup-steps 5 is"),
        ("train", "`fill_mask` and `rank` are no options here", "`fill_mask` and `rank` are no options here"),
        ("train", "`a b`, ``, `x and y`, `Layers`", "`a b`, ``, `x and y`, `Layers`"),
        ("train", "`corpus` is an argument", "CORPUS is an argument"),
        ("finetune-lora", "`rank` and `heads`", "--rank and `heads`"),
        ("runs", "`rank` and `heads`", "`rank` and `heads`"),
    ):
        assert settings_to_flags(context_of(command), message) == shown
        assert settings_to_flags(context_of(command), shown) == shown


@given(st.text())
def test_text_without_settings_is_shown_as_it_is(text: str) -> None:
    assume("`" not in text)
    assert settings_to_flags(TRAIN, text) == text


def test_notes_and_warnings_name_flags_and_results_do_not(capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(rewrite=lambda message: settings_to_flags(context_of("train"), message))
    console.note("a larger `time`")
    console.warn("a smaller `lr`")
    console.result("`lr`")
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("`lr`\n", "a larger --time\nWarning: a smaller --lr\n")


def test_every_name_of_another_tool_leads_to_something_that_exists_and_is_not_a_name_of_tinylm() -> None:
    flags = [
        [o.removeprefix("--") for p in command.params for o in (*p.opts, *p.secondary_opts) if o.startswith("--")]
        for command in BUILT.values()
    ]
    for ours, others in OTHER_OPTIONS.items():
        having = [options for options in flags if ours in options]
        assert having, ours
        for options in having:
            assert all(name in options or ours in suggest_options(name, options) for name in others.split()), ours
    arguments = {p.name for c in BUILT.values() for p in c.params if p.param_type_name == "argument"}
    assert arguments >= set(OTHER_ARGUMENTS)
    typed = " ".join(OTHER_COMMANDS.values()).split()
    assert not set(typed) & set(BUILT) and len(typed) == len(set(typed))
    named = {line.split()[1] for line in OTHER_COMMANDS if line.startswith("tinylm ")}
    assert named <= {*BUILT, "--help", "--version"}


def test_a_name_like_no_other_gets_no_suggestion_and_an_address_may_be_a_prompt(bpe_run: Path) -> None:
    assert "Did you mean" not in tinylm("train", "a.txt", "--zzz").output
    assert "Did you mean" not in tinylm("zzz").output
    assert run_ok("sample", "https://x.org", "-m", bpe_run, "-n", 1).stdout.startswith("https://x.org")


def test_a_run_is_resumed_by_the_command_that_created_it_if_it_has_a_last_save(tmp_path: Path) -> None:
    assert next_step(RunExistsError(tmp_path)) == ""
    assert "continue" not in next_step(RunExistsError(tmp_path), ("tinylm", "import", "a", "--out", str(tmp_path)))
    (run := tmp_path / "my run").mkdir()
    for config, command in (
        ('{"adapter": null}', "train"),
        ('{"adapter": {"kind": "lora"}}', "finetune-lora"),
        ('{"adapter": {"kind": "bottleneck"}}', "finetune-adapter"),
        ('{"adapter": {"kind": []}}', "train"),
        ("[]", "train"),
        ("", "train"),
    ):
        (run / "config.json").write_text(config)
        assert resume_command(run) == f"tinylm {command} --resume '{run}'"


def test_the_next_step_is_a_sentence_with_a_command_that_reads_the_same_text() -> None:
    A, unknown = Path("a"), ("my b.txt",)
    for error, words in (
        (NoRunError("There is no run."), "tinylm runs."),
        (AdapterNotModelError(A, "lora"), "tinylm merge-lora a "),
        (NotResumableError("It is damaged.", A, is_adapter=False), "tinylm train --init-from a "),
        (SaveError("Cannot write a.", A, resumable=True), "tinylm train --resume a."),
        (NotTrainedError(A), "tinylm train --init-from a "),
        (OtherRunKindError(A), "tinylm train --resume a."),
        (NotMergeableError(A, "bottleneck"), "--adapter, in tinylm sample and tinylm eval"),
        (UnknownCharactersError("No id.", A, unknown), "tinylm train 'my b.txt' --init-from a --extend-vocab"),
        (TinyLMError("It is damaged."), ""),
        (UsageError("`lr` is 0."), ""),
        (AdapterNotModelError(A, "bottleneck"), ""),
        (NotResumableError("It is damaged.", A, is_adapter=True), ""),
        (SaveError("Cannot write a.", A, resumable=False), ""),
    ):
        sentence = next_step(error)
        assert words in sentence and sentence.endswith(".") if words else sentence == ""
        assert "tinylm " not in str(error)
    error = UnknownCharactersError("It has no id.", Path("a"), ("b.jsonl",))
    command = ("finetune-lora", "b.jsonl", "--train-on", "last", "--unknown=skip", "--chat-template=c", "--rank", "4")
    expected = "tinylm train b.jsonl --train-on last --chat-template=c --init-from a --extend-vocab."
    assert next_step(error, command).endswith(f": {expected}")


@pytest.mark.parametrize("out", [(), ("--out", "checkpoints/my book"), ("--out=checkpoints/my book",)])
def test_where_a_run_exists_the_commands_to_keep_replace_or_continue_it_work(out: tuple[str, ...], here: Path) -> None:
    (here / "my book.txt").write_text(story(2000))
    command = ("train", "my book.txt", "--steps", "1", *out, *TINY)
    run_ok(*command)
    (here / "checkpoints/my book-2").mkdir()
    result = tinylm(*command)
    message = "checkpoints/my book already holds a run; --force replaces it, and another --out keeps both."
    assert_error(result, 2, message)
    ways = r"To keep both: tinylm (.*); to replace it: tinylm (.*); to continue it: tinylm (.*)\.$"
    found = re.search(ways, result.stderr)
    keep, replace, resume = map(shlex.split, found.groups())
    assert keep == ["train", "my book.txt", "--steps", "1", *TINY, "--out", "checkpoints/my book-3"]
    assert replace == [*command, "--force"]
    assert resume == ["train", "--resume", "checkpoints/my book"]
    for words in (keep, replace, [*resume, "--steps", "2"]):
        run_ok(*words)


def test_every_command_adds_the_next_step_to_errors() -> None:
    for name in COMMANDS:
        assert hasattr(load_command(name).callback.__wrapped__, "__wrapped__"), name  # Typer wraps each as well


def test_an_advised_run_that_exists_has_a_free_name(here: Path) -> None:
    (here / "checkpoints/b").mkdir(parents=True)
    step = next_step(UnknownCharactersError("No id.", Path("a"), ("b.jsonl",)))
    assert step.endswith("tinylm train b.jsonl --init-from a --extend-vocab --out checkpoints/b-2.")
