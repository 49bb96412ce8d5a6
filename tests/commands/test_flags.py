"""Settings in messages become flags, and names of other tools lead to those of tinylm (messages: test_errors.py)."""

from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.shell import run_ok, tinylm
from tinylm.cli import app
from tinylm.commands.flags import settings_to_flags
from tinylm.commands.suggestions import OTHER_ARGUMENTS, OTHER_COMMANDS, OTHER_OPTIONS, suggest_options
from tinylm.console import Console

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands


def context_of(command: str) -> Any:
    """The Typer context of a command that was called without arguments."""
    return typer.Context(COMMANDS[command], info_name=command)


TRAIN = context_of("train")


def test_settings_of_the_command_become_flags_and_other_words_stay() -> None:
    for command, message, shown in (
        ("train", "`kv_heads` is 3.", "--kv-heads is 3."),
        ("train", "choose `bias=False`, `bias=True` or `bias`.", "choose --no-bias, --bias or --bias."),
        ("train", '`position="rope"` rotates', "--position rope rotates"),
        ("train", "`warmup_steps=5` is", "--warmup-steps 5 is"),
        ("train", "`fill_mask` and `rank` are no options here", "`fill_mask` and `rank` are no options here"),
        ("train", "`a b`, ``, `x and y`, `Layers`", "`a b`, ``, `x and y`, `Layers`"),
        ("train", "`corpus` is an argument", "`corpus` is an argument"),
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
        for command in COMMANDS.values()
    ]
    for ours, others in OTHER_OPTIONS.items():
        having = [options for options in flags if ours in options]
        assert having, ours
        for options in having:
            assert all(name in options or ours in suggest_options(name, options) for name in others.split()), ours
    arguments = {p.name for c in COMMANDS.values() for p in c.params if p.param_type_name == "argument"}
    assert arguments >= set(OTHER_ARGUMENTS)
    typed = " ".join(OTHER_COMMANDS.values()).split()
    assert not set(typed) & set(COMMANDS) and len(typed) == len(set(typed))
    named = {line.split()[1] for line in OTHER_COMMANDS if line.startswith("tinylm ")}
    assert named <= {*COMMANDS, "--help", "--version"}


def test_a_name_like_no_other_gets_no_suggestion_and_an_address_may_be_a_prompt(bpe_run: Path) -> None:
    assert "Did you mean" not in tinylm("train", "a.txt", "--zzz").output
    assert "Did you mean" not in tinylm("zzz").output
    assert run_ok("sample", "https://x.org", "-m", bpe_run, "-n", 1).stdout.startswith("https://x.org")
