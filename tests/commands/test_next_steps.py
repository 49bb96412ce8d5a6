"""Messages name the command to run next."""

from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("config", "command"),
    [
        ('{"adapter": null}', "train"),
        ('{"adapter": {"kind": "lora"}}', "finetune-lora"),
        ('{"adapter": {"kind": "bottleneck"}}', "finetune-adapter"),
        ('{"adapter": {"kind": []}}', "train"),
        ("[]", "train"),
        ("", "train"),
    ],
)
def test_a_run_is_resumed_by_the_command_that_created_it(config: str, command: str, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.json").write_text(config)
    assert resume_command(run) == f"tinylm {command} --resume '{run}'"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NoRunError("There is no run."), "tinylm runs."),
        (RunExistsError(Path("a")), "tinylm train --resume a."),
        (AdapterNotModelError(Path("a"), "lora"), "tinylm merge-lora a "),
        (NotResumableError("It is damaged.", Path("a"), is_adapter=False), "tinylm train --init-from a "),
        (SaveError("Cannot write a.", Path("a"), resumable=True), "tinylm train --resume a."),
        (NotTrainedError(Path("a")), "tinylm train --init-from a "),
        (OtherRunKindError(Path("a")), "tinylm train --resume a."),
        (NotMergeableError(Path("a"), "bottleneck"), "--adapter, in tinylm sample and tinylm eval"),
        (UnknownCharactersError("It has no id.", Path("a")), "tinylm train --init-from a --extend-vocab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_next_step_is_a_sentence_with_a_command(error: TinyLMError, words: str) -> None:
    sentence = next_step(error)
    assert words in sentence and sentence.endswith(".")
    assert "tinylm " not in str(error)


@pytest.mark.parametrize(
    "error",
    [
        TinyLMError("It is damaged."),
        UsageError("`lr` is 0."),
        AdapterNotModelError(Path("a"), "bottleneck"),
        NotResumableError("It is damaged.", Path("a"), is_adapter=True),
        SaveError("Cannot write a.", Path("a"), resumable=False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_no_command_solves_has_no_next_step(error: TinyLMError) -> None:
    assert next_step(error) == ""


def test_every_command_adds_the_next_step_to_errors() -> None:
    """`with_option_groups` adds the next step, and wraps each command."""
    for name in COMMANDS:
        assert hasattr(load_command(name).callback.__wrapped__, "__wrapped__"), name  # Typer wraps each as well
