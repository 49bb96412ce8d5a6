"""Errors of the library name settings; the command line shows them as flags."""

import inspect
import math
import typing
from typing import Any

import pytest
import typer
import typer.main
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.shell import assert_error
from tests.shell import tinylm as shell
from tinylm.cli import app
from tinylm.commands.flags import long_flag, settings_to_flags
from tinylm.console import Console
from tinylm.errors import UsageError
from tinylm.presets import make_model_config
from tinylm.training_config import Budget
from tinylm.validation import RANGES, check_numbers

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands


def number_type(command: str, name: str) -> type | None:
    """int or float for an option that takes a number, else `None`."""
    annotation = inspect.signature(COMMANDS[command].callback).parameters[name].annotation
    found = {int, float} & {annotation.__origin__, *typing.get_args(annotation.__origin__)}
    return found.pop() if found else None


OPTIONS = [
    (command, option, kind)
    for command in sorted(COMMANDS)
    for option in COMMANDS[command].params
    if option.param_type_name == "option" and (kind := number_type(command, option.name)) is not None
]
NUMBERS = [
    (command, option.name, long_flag(option), kind) for command, option, kind in OPTIONS if option.name in RANGES
]


def context_of(command: str) -> Any:
    """The Typer context of a command that was called without arguments."""
    return typer.Context(COMMANDS[command], info_name=command)


@st.composite
def numbers_out_of_range(draw: st.DrawFn) -> tuple[str, str, str, float]:
    """A command, the name and the flag of one of its options, and a number outside of its range."""
    command, name, flag, kind = draw(st.sampled_from(NUMBERS))
    bounds = RANGES[name]
    finite = {"allow_nan": name != "time", "allow_infinity": name != "time"}
    values = st.integers() if kind is int else st.floats(**finite)
    beyond = [bounds.low - 1, bounds.high + 1] if kind is int else [math.nextafter(bounds.low, -math.inf)]
    value = draw(values | st.sampled_from(beyond))
    assume(not bounds.contains(value))
    assume(name != "time" or value >= 0)  # the parser of durations rejects a sign
    return command, name, flag, value


@given(case=numbers_out_of_range())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_number_out_of_range_names_the_flag_on_the_command_line_and_the_setting_in_python(
    case: tuple[str, str, str, float],
) -> None:
    command, name, flag, value = case
    with pytest.raises(UsageError) as caught:
        check_numbers({name: value})
    assert str(caught.value).startswith(f"`{name}` is ")
    assert "--" not in str(caught.value)
    typed = f"{value:.20f}s" if name == "time" else repr(value)
    arguments = [one for one in COMMANDS[command].params if one.param_type_name == "argument"]
    positional = ["nowhere"] * max(len(arguments[:1]), sum(one.required for one in arguments))
    result = shell(command, *positional, f"{flag}={typed}")
    assert_error(result, 2, f"{flag} is ", f"; it must be {RANGES[name]}.")
    assert "`" not in result.stderr


def test_every_number_option_of_every_command_has_a_range() -> None:
    assert {(command, option.name) for command, option, _ in OPTIONS if option.name not in RANGES} == set()


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("`kv_heads` is 3.", "--kv-heads is 3."),
        ("choose `bias=False`, `bias=True` or `bias`.", "choose --no-bias, --bias or --bias."),
        ('`position="rope"` rotates', "--position rope rotates"),
        ("`warmup_steps=5` is", "--warmup-steps 5 is"),
        ("write to another `out`", "write to another --out"),
        ("`fill_mask` and `rank` are no options here", "`fill_mask` and `rank` are no options here"),
        ("`a b`, ``, `x and y`, `Layers`", "`a b`, ``, `x and y`, `Layers`"),
        ("`corpus` is an argument", "`corpus` is an argument"),
    ],
)
def test_settings_of_the_command_become_flags_and_other_words_stay(message: str, shown: str) -> None:
    assert settings_to_flags(context_of("train"), message) == shown
    assert settings_to_flags(context_of("train"), shown) == shown


def test_a_setting_becomes_a_flag_only_in_commands_that_have_it() -> None:
    assert settings_to_flags(context_of("finetune-lora"), "`rank` and `heads`") == "--rank and `heads`"
    assert settings_to_flags(context_of("runs"), "`rank` and `heads`") == "`rank` and `heads`"


@given(st.text())
def test_text_without_settings_is_shown_as_it_is(text: str) -> None:
    assume("`" not in text)
    assert settings_to_flags(context_of("train"), text) == text


def test_notes_and_warnings_name_flags_and_results_do_not(capfd: pytest.CaptureFixture[str]) -> None:
    console = Console(rewrite=lambda message: settings_to_flags(context_of("train"), message))
    console.note("a larger `time`")
    console.warn("a smaller `lr`")
    console.result("`lr`")
    printed = capfd.readouterr()
    assert printed.err == "a larger --time\nWarning: a smaller --lr\n"
    assert printed.out == "`lr`\n"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_model_config(vocab_size=9, preset="modern", size="nano", kv_heads=2, heads=3),
            "`kv_heads` is 2; ",
        ),
        (
            lambda: make_model_config(vocab_size=9, preset="modern", size="nano", width=33),
            "`position=",
        ),
        (lambda: Budget(steps=1, epochs=2.0), "`steps` and `epochs` "),
    ],
)
def test_an_error_in_python_names_settings(make: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert "--" not in str(caught.value)


def test_an_error_on_the_command_line_names_flags_with_their_values(tmp_path: Any) -> None:
    (tmp_path / "a.txt").write_text("ab ba " * 500)
    options = (tmp_path / "a.txt", "--out", tmp_path / "run", "--steps", 1)
    assert_error(
        shell("train", *options, "--width", 33, "--heads", 11),
        2,
        "--position rope needs an even head dimension",
        "--width 33 divided",
    )
    assert_error(shell("train", *options, "--epochs", 1), 2, "--steps and --epochs contradict each other")
