"""--help: short texts in the field's terms, and examples that work. Shell completion."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import typer.main

from tests.shell import TINY, copied, environment, records, run_child, run_ok, story
from tinylm.cli import app

COMMANDS = typer.main.get_command(app).commands
SHAPE = {"LAYERS": "1", "HEADS": "2", "WIDTH": "16", "CONTEXT": "16", "BATCH_SIZE": "4"}
PRIVATE = ("sight", "told", "strangers", "wilder", "bolder", "writes on", "rhythm", "memory of", "knows its place")

COMPLETING = """
import sys
sys.argv = ["tinylm"]
from tinylm.__main__ import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_help_texts_are_short_and_name_the_default_seed_and_both_lengths(corpus: Path) -> None:
    for command, found in COMMANDS.items():
        for parameter in found.params:
            assert len(parameter.help) <= 105, (command, parameter.name)
            assert parameter.help.endswith("."), (command, parameter.name)
            assert not any(word in parameter.help.lower() for word in PRIVATE), (command, parameter.name)
    for name, default in (("train", "0"), ("sample", "a random one"), ("finetune-lora", "0")):
        (help_,) = (parameter.help for parameter in COMMANDS[name].params if parameter.name == "seed")
        assert f"(default: {default}" in help_
    (plan,) = records(run_ok("train", corpus, "--steps", 1, *TINY, "--dry-run", "--json"))
    assert plan["training"]["seed"] == 0
    options = {flag: parameter for parameter in COMMANDS["sample"].params for flag in parameter.opts}
    assert options["-n"] is options["--max-tokens"] and options["-N"] is options["--num-samples"]
    assert "-N is the number of samples" in options["-n"].help


def test_the_help_of_an_option_ends_with_its_default() -> None:
    for command, found in COMMANDS.items():
        for option in (parameter for parameter in found.params if parameter.param_type_name == "option"):
            if option.default is not None and option.default is not False:
                shown = "yes" if option.default is True else str(option.default).removesuffix(".0")
                assert option.help.endswith(f" (default: {shown})."), (command, option.name)


def test_the_short_help_is_one_screen_with_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert "--resume" in run_ok("train", "-h").stdout
    monkeypatch.setenv("COLUMNS", "80")
    for command, found in COMMANDS.items():
        lines = run_ok(command, "-h").stdout.splitlines()
        assert len(lines) <= 50 and max(map(len, lines)) <= 80, command
        flags = {flag for parameter in found.params for flag in parameter.opts}
        shown = {
            flag for line in lines if line.startswith("  -") for flag in re.findall(r"(?<![\w-])--?[a-z-]+", line[:26])
        }
        assert shown and shown <= flags, command
        first = getattr(sys.modules[found.callback.__module__], "FIRST_OPTIONS", "").split()
        known = {
            p.name
            for other in COMMANDS.values()
            if other.callback.__module__ == found.callback.__module__
            for p in other.params
        }
        assert set(first) <= known
        assert lines[-1] == f"All options: tinylm {command} --help"
        assert sum(line.startswith("  -") for line in lines) <= 22, command


# Examples


def examples(name: str, columns: int = 80) -> list[str]:
    shown = run_ok(name, "--help", env={"COLUMNS": str(columns)}).stdout.split("Examples:")[1]
    return [line.strip() for line in shown.splitlines() if line.startswith(" tinylm ")]


def run_example(line: str, env: dict[str, str] | None = None) -> str:
    program, *words = shlex.split(line)
    assert program == "tinylm"
    return run_ok(*words, env=env).stdout


def test_the_examples_of_train_work(here: Path) -> None:
    (here / "texts").mkdir()
    for path in ("book.txt", "texts/one.txt", "texts/two.txt"):
        (here / path).write_text(story(2000))
    tiny = {f"TINYLM_TRAIN_{name}": value for name, value in SHAPE.items()}
    first, epochs, timed, resumed = examples("train")
    assert run_example(first, {**tiny, "TINYLM_TRAIN_STEPS": "2"}).endswith("book\n")
    del tiny["TINYLM_TRAIN_CONTEXT"]  # the --size of the example sets it
    assert "time:      about 30m 00s" in run_example(f"{timed} --dry-run", tiny)
    run_example(resumed)
    (record,) = records(run_ok("runs", "--json"))
    assert record["step"] > 2
    run_example(f"{epochs} --force", tiny)


def test_the_examples_of_sample_work_and_fit_into_80_columns(here: Path) -> None:
    (here / "book.txt").write_text("Once upon a time\n" + story(2000))
    run_ok("train", "book.txt", "--steps", 30, *TINY)
    continued, by_name, many, names = examples("sample")
    (line,) = re.findall(r"\{.*\}", run_ok("sample", "--help").stdout)
    (here / "prompts.jsonl").write_text(line.replace("The sea", "Once") + "\n")
    assert run_example(f"{continued} --seed 1").startswith("Once upon a time")
    assert run_example(by_name) == run_example(by_name)
    (record,) = (json.loads(text) for text in run_example(f"{many} --seed 1").splitlines())
    assert (record["prompt"], record["tokens"]) == ("Once", 50)
    assert len(run_example(f"{names} -n 20 --seed 1").splitlines()) == 9
    for name in ("train", "sample"):
        assert examples(name, 80) == examples(name, 400)


# Completion


def completed(words: str) -> list[str]:
    """The completions that bash is offered for the last of the words, which may be empty."""
    return complete("bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1)).split()


def complete(shell: str, **variables: str) -> str:
    """The answer to a shell that asks by these variables."""
    env = {**environment(), **variables, "_TINYLM_COMPLETE": f"complete_{shell}"}
    result = run_child([sys.executable, "-c", COMPLETING], env=env)
    assert result.stderr == ""
    return result.stdout


def test_every_option_with_a_list_of_values_completes_them() -> None:
    for command, found in COMMANDS.items():
        for parameter in found.params:
            values = [word for word in (parameter.metavar or "").split("|") if not word.isupper()]
            if len(values) > 1:
                context = typer.Context(found, info_name=command)
                offered = [item.value for item in parameter.shell_complete(context, "")]
                assert offered == values, parameter.name


def test_the_shell_completes_values_and_names_of_runs_without_torch(run: Path, adapter: Path, here: Path) -> None:
    assert completed("tinylm finetune-lora --target e") == ["experts", "embedding"]
    assert completed("tinylm sample --model ") == []
    for name, source in (("first", run), ("second", run), ("bent", adapter)):
        copied(source, here / "checkpoints" / name)
    (here / "checkpoints/.first.new").mkdir()
    assert completed("tinylm sample -m ") == ["first", "second"]
    assert completed("tinylm sample --adapter ") == ["bent"]
    assert completed("tinylm info s") == ["second"]


def test_a_description_of_any_length_is_one_line_of_completions() -> None:
    """Regression: fish took the lines after the first for candidates."""
    words = {"_TYPER_COMPLETE_ARGS": "tinylm train --", "_TYPER_COMPLETE_FISH_ACTION": "get-args", "COLUMNS": "40"}
    options = [option for option in COMMANDS["train"].params if option.param_type_name == "option"]
    flags = {flag: option.help for option in options for flag in (*option.opts, *option.secondary_opts)}
    long = {flag: text for flag, text in flags.items() if flag.startswith("--")}
    shown = dict(line.split("\t") for line in complete("fish", **words).splitlines())
    assert shown == {**long, "--help": "Show this message and exit."} and max(map(len, long.values())) > 80
    assert len(complete("zsh", **words).splitlines()) == len(shown)
