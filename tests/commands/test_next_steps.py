"""Messages name the command to run next."""

import re
import shlex
from pathlib import Path

import pytest

from tests.shell import TINY, assert_error, run_ok, story, tinylm
from tinylm.cli import COMMANDS, load_command
from tinylm.commands.next_steps import next_step, resume_command
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
    assert_error(
        result, 2, "checkpoints/my book already holds a run; --force replaces it, and another --out keeps both."
    )
    found = re.search(
        r"To keep both: tinylm (.*); to replace it: tinylm (.*); to continue it: tinylm (.*)\.$", result.stderr
    )
    assert found is not None
    keep, replace, resume = map(shlex.split, found.groups())
    assert keep == ["train", "my book.txt", "--steps", "1", *TINY, "--out", "checkpoints/my book-3"]
    assert replace == [*command, "--force"]
    assert resume == ["train", "--resume", "checkpoints/my book"]
    for words in (keep, replace, [*resume, "--steps", "2"]):
        run_ok(*words)


def test_every_command_adds_the_next_step_to_errors() -> None:
    for name in COMMANDS:
        assert hasattr(load_command(name).callback.__wrapped__, "__wrapped__"), name  # Typer wraps each as well
