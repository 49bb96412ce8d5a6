"""Values of options from flags, TINYLM_ environment variables and a --config file."""

import os
import re
import sys
from pathlib import Path

import pytest
import typer.main

import tinylm
from tests.shell import TINY, environment, run_child, run_ok
from tests.shell import tinylm as shell
from tinylm.cli import app
from tinylm.run_directory.loading import load_model

pytestmark = pytest.mark.usefixtures("corpus")


def planned(*arguments: object, env: dict[str, str] | None = None) -> str:
    return run_ok("train", "corpus.txt", "--dry-run", *TINY, *arguments, env=env).stdout


def test_flag_beats_environment_beats_file_beats_default(here: Path) -> None:
    (here / "my.toml").write_bytes(b"\xef\xbb\xbfsteps = 11\n")  # with a byte-order mark, as Notepad writes it
    (here / "link.toml").symlink_to("my.toml")
    file, variable = ("--config", "my.toml"), {"TINYLM_TRAIN_STEPS": "12"}
    assert "length:    11 steps" in planned(*file)
    assert "length:    11 steps" in planned("--config", "link.toml")
    assert "length:    11 steps" in planned(env={"TINYLM_TRAIN_CONFIG": "my.toml"})
    assert "length:    12 steps" in planned(*file, env=variable)
    assert "length:    12 steps" in planned(env=variable)
    assert "length:    13 steps" in planned(*file, "--steps", 13, env=variable)
    assert re.search(r"length: +[\d,]+ steps, 4\d\.\d passes over the text", planned())


def test_a_command_with_a_hyphen_has_environment_variables(run: Path) -> None:
    def adapter(**env: str) -> int:
        options = ("--model", run, "--steps", 1, "--batch-size", 4, "--dry-run")
        (found,) = re.findall(
            r"adapter: .*: ([\d,]+) parameters", run_ok("finetune-lora", "corpus.txt", *options, env=env).stdout
        )
        return int(found.replace(",", ""))

    assert adapter(TINYLM_FINETUNE_LORA_RANK="6") == 3 * adapter(TINYLM_FINETUNE_LORA_RANK="2")


def test_a_file_names_options_with_hyphens_or_underscores_and_sets_lists_and_switches(here: Path, run: Path) -> None:
    (here / "my.toml").write_text(
        'steps = 1\nbatch-size = 7\nmicro_batch = 3\nlr = 1\nnorm-gain = false\nseed = 4\nout = "o"'
    )
    run_ok("train", "corpus.txt", *TINY[:-2], "--config", "my.toml")
    _, config, *_ = load_model(here / "o")
    assert config.training is not None
    assert (config.training.batch_size, config.training.micro_batch, config.training.seed) == (7, 3, 4)
    assert (config.training.lr, config.model.norm_gain) == (1.0, False)
    (here / "train.toml").write_text('corpus = ["corpus.txt"]\ntime = "5m"\nquiet = true\ndry-run = true\n')
    assert run_ok("train", "--config", "train.toml").stderr == ""
    (here / "train.toml").write_text('corpus = "corpus.txt"\ntime = 300\ndry-run = true\n')
    assert "time:      about 5m 00s" in run_ok("train", "--config", "train.toml").stdout
    (here / "sample.toml").write_text(f'model = "{run.as_posix()}"\nseed = 1\nmax-tokens = 30\njson = true\n')
    text = run_ok("sample", "--config", "sample.toml", "--no-stream").stdout
    for stop in ("stop = 'XY'", "stop = ['X', 'Y']"):
        (here / "stop.toml").write_text((here / "sample.toml").read_text() + stop)
        assert run_ok("sample", "--config", "stop.toml").stdout == text


def test_a_toml_value_that_an_option_cannot_have_is_a_usage_error(here: Path) -> None:
    values = ("1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "true", "[1, 2]", "{n = 1}", "[[1]]", "{a.b.c = 1}")
    lines = [f"{option} = {value}" for option in ("steps", "lr", "time", "preset", "out") for value in values]
    lines += ["quiet = 'perhaps'", "quiet = 1", "steps = 2.5", "steps = 'many'", "lr = 'x'", "out = 5"]
    lines += ['out = "a\\u0000b"', "corpus = [1979-05-27]"]
    wrong = []
    for line in lines:
        (here / "my.toml").write_text(line)
        result = shell("train", "corpus.txt", "--config", "my.toml")
        said = (
            "Invalid value for '" in result.stderr and line.split()[0] in result.stderr and "my.toml" in result.stderr
        )
        wrong += [] if said and result.exit_code == 2 else [f"{line}: {result.stderr}"]
    assert not wrong, "\n".join(wrong)


def test_a_config_file_named_by_a_variable_may_set_debug(here: Path) -> None:
    (here / "my.toml").write_text("debug = true")
    assert "Traceback" in shell("info", "nowhere", env={"TINYLM_INFO_CONFIG": "my.toml"}).stderr


# Unknown variables


def test_unknown_variables_alone_cause_a_warning_with_the_nearest_name() -> None:
    """Every command warns, also about variables of other commands, and with --quiet."""
    nearest = {
        "TINYLM_TRAIN_STEP": "; did you mean TINYLM_TRAIN_STEPS?",
        "TINYLM_STEPS": "; did you mean TINYLM_TRAIN_STEPS?",
        "TINYLM_CACHE_DIR": "; did you mean TINYLM_CACHE?",
        "TINYLM_FINETUNE_LORA_RNAK": "; did you mean TINYLM_FINETUNE_LORA_RANK?",
        "TINYLM_FINETUNE-LORA_RANK": "; did you mean TINYLM_FINETUNE_LORA_RANK?",
        "TINYLM_" + "Q" * 20: ".",
    }
    if os.name != "nt":  # there, variables have no case
        nearest["tinylm_train_steps"] = "; did you mean TINYLM_TRAIN_STEPS?"
    for options in ((), ("--quiet",)):
        result = run_ok("runs", *options, env=dict.fromkeys(nearest, "1"))
        for name, meant in nearest.items():
            warning = f"Warning: tinylm does not read the environment variable {name}{meant}"
            assert warning in result.stderr.splitlines()
        assert result.stdout == ""
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
    env = {**environment(), "TINYLM_TRAIN_STEP": "1", **completing}
    result = run_child([sys.executable, "-c", program], env=env)
    assert (result.stdout.split(), result.stderr) == (["train", "train-tokenizer"], "")
