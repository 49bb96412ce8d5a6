"""Option values from a --config file and from TINYLM_ environment variables."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import hypothesis
import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

import tinylm
from tests.shell import TINY, assert_error, assert_usage_error, environment, run_ok
from tests.shell import tinylm as shell
from tinylm import model_config, training_config
from tinylm.cli import app
from tinylm.commands.training_options import IntervalOptions, ModelOptions, OptimizerOptions
from tinylm.presets import PRESETS, SIZES

TOML: dict[str, tuple[str | bytes, str]] = {
    "too large": ("# " + "x" * 100_000, "my.toml is larger than 64 kB"),
    "100,000 deep": ("steps = " + "[" * 100_000, "my.toml is larger than 64 kB"),
    "too deep": ("steps = " + "[" * 60_000, "my.toml is not valid TOML: it is nested too deeply."),
    "a number of 5,000 digits": ("steps = " + "9" * 5000, "my.toml is not valid TOML: "),
    "another config file": (
        'config = "other.toml"',
        "my.toml sets config; a config file cannot name another one.",
    ),
    "an option in two spellings": ("eval-every = 1\neval_every = 2", "sets eval_every twice"),
    "many unknown keys": ("\n".join(f"k{i} = 1" for i in range(999)), "sets k0, k1, k2 and 996 more, which"),
}


@pytest.mark.parametrize("name", TOML)
def test_an_invalid_config_file_is_an_error(name: str, here: Path) -> None:
    content, message = TOML[name]
    (here / "my.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_error(shell("train", "corpus.txt", "--config", "my.toml"), 2, message)


@pytest.mark.parametrize(
    "value",
    ["1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "true", "[1, 2]", "{n = 1}", "[[1]]", "{a.b.c = 1}"],
)
@pytest.mark.parametrize("option", ["steps", "lr", "time", "preset", "out"])
def test_a_toml_value_that_no_option_can_have_is_a_usage_error(option: str, value: str, here: Path) -> None:
    (here / "my.toml").write_text(f"{option} = {value}")
    assert_usage_error(
        shell("train", "corpus.txt", "--config", "my.toml"), f"Invalid value for '--{option}'", "in the file"
    )


@pytest.mark.parametrize("content", ["quiet = 'perhaps'", "quiet = 1", "corpus = [1979-05-27]", 'out = "a\\u0000b"'])
def test_a_toml_value_of_the_wrong_type_for_a_switch_a_list_or_a_path_is_a_usage_error(
    content: str, here: Path
) -> None:
    (here / "my.toml").write_text(content)
    assert_usage_error(shell("train", "corpus.txt", "--config", "my.toml"), "Invalid value for", "my.toml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_or_a_device_as_config_file_is_an_error(here: Path) -> None:
    os.mkfifo(here / "pipe")
    for name in ("pipe", "/dev/zero"):
        assert_error(shell("train", "corpus.txt", "--config", name), 2, f"--config {name}: it is not a regular file.")


def test_a_config_file_may_be_a_link(here: Path, corpus: Path) -> None:
    (here / "mine.toml").write_text("steps = 11")
    (here / "link.toml").symlink_to("mine.toml")
    options = ("--dry-run", *TINY, "--config", "link.toml")
    assert "11 steps" in run_ok("train", corpus, *options).stdout


def test_a_config_file_named_by_a_variable_may_set_debug(here: Path) -> None:
    (here / "my.toml").write_text("debug = true")
    assert "Traceback" in shell("info", "nowhere", env={"TINYLM_INFO_CONFIG": "my.toml"}).stderr


# Numbers out of range, from every source

NUMBERS: dict[str, tuple[str, ...]] = {
    "vocab-size": ("9223372036854775808", "0", "1" + "0" * 400),
    "lr": ("1e308", "0", "inf", "nan", "-1"),
    "steps": ("1" + "0" * 400, "0", "-1", str(2**53 + 1)),
    "epochs": ("1e308", "nan"),
    "time": ("9" * 400 + "h", "0", "400000h"),
    "layers": ("-1", "1048576"),
    "experts": ("1048576",),
    "width": ("1" + "0" * 400,),
    "seed": (str(2**64), str(2**63), "-1"),
    "batch-size": ("1" + "0" * 400, "0"),
    "warmup-steps": ("1" + "0" * 400, "-1"),
    "eval-every": ("0", "1" + "0" * 400),
    "val-fraction": ("0", "1", "nan"),
    "dropout": ("1", "nan"),
    "patience": ("0",),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_an_error_before_anything_is_read(name: str, here: Path) -> None:
    for value in NUMBERS[name]:
        assert_error(shell("train", "nowhere.txt", f"--{name}", value), 2, f"--{name} is ", "; it must be ")
        variable = f"TINYLM_TRAIN_{name.replace('-', '_').upper()}"
        assert_error(shell("train", "nowhere.txt", env={variable: value}), 2, f"environment variable {variable}.")
        (here / "my.toml").write_text(f"{name} = {value!r}")
        assert_error(shell("train", "nowhere.txt", "--config", "my.toml"), 2, f"--{name} comes from the file my.toml.")


@pytest.mark.parametrize("value", ["1e400h", "-5m", "soon", "1.2.3h", "", "x" * 10_000])
def test_an_invalid_duration_is_a_usage_error(value: str) -> None:
    assert_usage_error(shell("train", "corpus.txt", "--time", value), "is not a length of time")


def test_an_integer_of_5000_digits_is_a_usage_error() -> None:
    assert_usage_error(shell("train", "corpus.txt", "--steps", "9" * 5000), "Invalid value for '--steps'")


@pytest.mark.parametrize("command", ["finetune-lora", "finetune-adapter"])
def test_numbers_have_ranges_in_the_other_commands(command: str) -> None:
    for option in ("--seed", "--steps", "--batch-size", "--lr", "--dropout"):
        assert_error(shell(command, "nowhere.txt", option, "1" + "0" * 400), 2, f"{option} is ")
    assert_error(shell("eval", "nowhere.txt", "--batch-size", "1" + "0" * 400), 2, "--batch-size is ")
    assert_error(shell("sample", "--seed", 2**64), 2, "--seed is ")


def test_an_error_names_the_variable_or_file_of_each_option_in_it(here: Path, corpus: Path) -> None:
    (here / "my.toml").write_text("heads = 7")
    env = {"TINYLM_TRAIN_WIDTH": "16"}
    sources = ("--heads comes from the file my.toml", "--width comes from the environment variable TINYLM_TRAIN_WIDTH.")
    assert_error(shell("train", corpus, "--steps", 1, "--config", "my.toml", env=env), 2, *sources)
    typed = shell("train", corpus, "--steps", 1, "--heads", 7, "--width", 16)
    assert_error(typed, 2, "--heads is 7; it must divide --width (16)")
    assert "comes from" not in typed.stderr


@pytest.mark.parametrize(
    ("command", "variable", "value"),
    [
        (("train", "corpus.txt", "--dry-run"), "TINYLM_TRAIN_VAL_DATA", "absent.txt"),
        (("train", "corpus.txt"), "TINYLM_TRAIN_INIT_FROM", "absent"),
        (("train", "corpus.txt"), "TINYLM_TRAIN_OUT", "corpus.txt"),
        (("train", "corpus.txt"), "TINYLM_TRAIN_CONFIG", "absent.toml"),
        (("train", "corpus.txt"), "TINYLM_TRAIN_DEVICE", "tpu"),
        (("sample",), "TINYLM_SAMPLE_MODEL", "absent"),
        (("sample",), "TINYLM_SAMPLE_ADAPTER", "absent"),
        (("info",), "TINYLM_INFO_CONFIG", "absent.toml"),
    ],
)
def test_an_error_names_the_variable_of_a_quoted_value(
    command: tuple[str, ...], variable: str, value: str, corpus: Path
) -> None:
    assert_error(shell(*command, env={variable: value}), 2, value, f"comes from the environment variable {variable}.")


def test_parsing_errors_name_the_variable_of_the_value() -> None:
    for name, value in (("STEPS", "few"), ("TIME", "soon"), ("FORCE", "maybe")):
        result = shell("train", "corpus.txt", env={f"TINYLM_TRAIN_{name}": value, "COLUMNS": "200"})
        assert_usage_error(result, f"'--{name.lower()}'", f"in the environment variable TINYLM_TRAIN_{name}: {value!r}")


# Unknown variables


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TINYLM_TRAIN_STEP", "TINYLM_TRAIN_STEPS"),
        ("TINYLM_STEPS", "TINYLM_TRAIN_STEPS"),
        ("TINYLM_CACHE_DIR", "TINYLM_CACHE"),
        ("TINYLM_FINETUNE_LORA_RNAK", "TINYLM_FINETUNE_LORA_RANK"),
        ("TINYLM_FINETUNE-LORA_RANK", "TINYLM_FINETUNE_LORA_RANK"),
        ("tinylm_train_steps", "TINYLM_TRAIN_STEPS"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_an_unknown_variable_is_a_warning_with_the_nearest_name(
    name: str, meant: str, options: tuple[str, ...]
) -> None:
    """Every command warns, also about variables of other commands."""
    if os.name == "nt" and name.upper() == meant:
        pytest.skip("variables have no case there")
    result = run_ok("runs", *options, env={name: "1"})
    warning = f"Warning: tinylm does not read the environment variable {name}; did you mean {meant}?"
    assert warning in result.stderr.splitlines()
    assert result.stdout == ""


def test_an_unknown_variable_without_a_near_name_is_a_warning() -> None:
    name = "TINYLM_" + "Q" * 20
    stderr = run_ok("runs", env={name: "1"}).stderr
    assert f"Warning: tinylm does not read the environment variable {name}." in stderr.splitlines()


def test_known_variables_cause_no_warning() -> None:
    """Known are the variable of each option of each command, and those that the code reads by name."""
    named = {"TINYLM_VERSION"}
    for path in Path(tinylm.__file__).parent.rglob("*.py"):
        named |= set(re.findall(r'environ(?:\.get\(|\[)"(TINYLM_[A-Z_]+)"', path.read_text(encoding="utf-8")))
    assert "TINYLM_CACHE" in named
    for name, command in typer.main.get_command(app).commands.items():
        prefix = f"TINYLM_{name.replace('-', '_').upper()}_"
        options = (p for p in command.params if p.param_type_name == "option")
        named |= {prefix + str(option.name).upper() for option in options}
    others = {name: "" for name in named if not name.startswith("TINYLM_RUNS_")}
    assert "Warning" not in run_ok("runs", env=others).stderr


def test_shell_completion_prints_no_warning() -> None:
    program = "import sys; from tinylm.__main__ import main; sys.argv = ['tinylm']; main()"
    completing = {"_TINYLM_COMPLETE": "complete_bash", "COMP_WORDS": "tinylm tr", "COMP_CWORD": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(), "TINYLM_TRAIN_STEP": "1", **completing},
    )
    assert result.stdout.split() == ["train", "train-tokenizer"]
    assert result.stderr == ""


# Random options

INTEGERS = st.sampled_from([0, -1, 1, 2, 3, 4, 8, 16, 100, 1 << 16, 1 << 20, 1 << 24, 1 << 53, 1 << 63, 10**400])
FRACTIONS = st.sampled_from([0.0, -1.0, 1e-320, 1e-9, 0.01, 0.5, 0.99, 1.0, 100.0, 1e6, 1e308, math.inf, math.nan])
WORDS: dict[str, Iterable[str]] = {
    "preset": PRESETS,
    "size": ["auto", *SIZES],
    "architecture": model_config.ARCHITECTURES,
    "position": model_config.POSITIONS,
    "norm": model_config.NORMS,
    "norm_placement": model_config.NORM_PLACEMENTS,
    "expert_mode": model_config.EXPERT_MODES,
    "activation": model_config.ACTIVATIONS,
    "initialisation": model_config.INITIALISATIONS,
    "schedule": training_config.SCHEDULES,
    "optimizer": training_config.OPTIMIZERS,
    "dtype": ["auto", "fp32", "bf16", "fp16"],
    "compile": ["auto", "on", "off"],
    "tokenizer": ["auto", "char", "bpe", "none.json"],
    "local_layers": ["0", "0,1", "-1", "x", "0,0", "9" * 30],
    "time": ["10s", "1h30m", "1e400h", "9" * 400 + "h"],
    "val_data": ["corpus.txt", "none.txt"],
    "encoding": ["utf-8", "latin-1", "none"],
}
FLAGS = sorted(
    {field.name for group in (ModelOptions, OptimizerOptions, IntervalOptions) for field in dataclasses.fields(group)}
    | {"steps", "epochs", "time", "patience", "seed", "vocab_size", "tokenizer", "val_fraction", "val_data"}
    | {"dtype", "compile", "encoding"}
)
SWITCHES = {"norm_gain", "norm_bias", "residual", "attention_scale", "qk_norm", "bias", "tie", "scale_embedding"}
FRACTIONAL = {"rope_theta", "dropout", "attention_dropout", "expert_balance", "lr", "min_lr", "weight_decay", "beta1"}
FRACTIONAL |= {
    "beta2",
    "momentum",
    "grad_clip",
    "average",
    "label_smoothing",
    "mtp_weight",
    "r_drop",
    "epochs",
    "val_fraction",
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    line: list[str] = []
    for name in draw(st.lists(st.sampled_from(FLAGS), unique=True, max_size=6)):
        flag = "--" + name.replace("_", "-")
        if name in SWITCHES or name == "log_gradients":
            line.append(draw(st.sampled_from([flag, flag.replace("--", "--no-")])) if name in SWITCHES else flag)
        elif name in WORDS:
            line += [flag, draw(st.sampled_from(sorted(WORDS[name])))]
        else:
            line += [flag, str(draw(FRACTIONS if name in FRACTIONAL else INTEGERS))]
    return line


@given(line=command_lines())
@hypothesis.settings(max_examples=60, suppress_health_check=list(hypothesis.HealthCheck))
def test_random_options_give_a_plan_or_an_error_message(line: list[str], here: Path, corpus: Path) -> None:
    result = shell("train", corpus, "--dry-run", *line)
    assert result.exit_code in (0, 2), result.output
    assert "Internal error" not in result.stderr and "Traceback" not in result.stderr
    assert result.exit_code == 0 or result.stdout == ""
