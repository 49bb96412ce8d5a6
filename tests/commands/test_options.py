"""Options: values from flags, TINYLM_ variables and a --config file, and their fields of the plan."""

import dataclasses
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import tinylm
from tests.shell import TINY, environment, records, run_child, run_ok
from tests.shell import tinylm as shell
from tinylm.cli import app
from tinylm.commands.train import train
from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.run_directory.loading import load_model, read_config

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


def test_settings_of_other_texts_are_ignored_from_the_environment_and_an_error_as_options(corpus: Path) -> None:
    planned(env={"TINYLM_TRAIN_PACK": "true", "TINYLM_TRAIN_BPE_DROPOUT": "0.1"})
    for option in (("--pack",), ("--bpe-dropout", 0.1)):
        assert shell("train", "corpus.txt", "--dry-run", *TINY, *option).exit_code == 2


def test_a_command_with_a_hyphen_has_environment_variables(run: Path) -> None:
    def adapter(**env: str) -> int:
        options = ("--model", run, "--steps", 1, "--batch-size", 4, "--dry-run")
        said = run_ok("finetune-lora", "corpus.txt", *options, env=env).stdout
        return int(re.findall(r"adapter: .*: ([\d,]+) parameters", said)[0].replace(",", ""))

    assert adapter(TINYLM_FINETUNE_LORA_RANK="6") == 3 * adapter(TINYLM_FINETUNE_LORA_RANK="2")


def test_a_file_names_options_with_hyphens_or_underscores_and_sets_lists_and_switches(here: Path, run: Path) -> None:
    lines = ("steps = 1", "batch-size = 7", "micro_batch = 3", "lr = 1", "norm-gain = false", "seed = 4", 'out = "o"')
    (here / "my.toml").write_text("\n".join(lines))
    run_ok("train", "corpus.txt", *TINY[:-2], "--config", "my.toml")
    _, config, *_ = load_model(here / "o")
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
        said = all(part in result.stderr for part in ("Invalid value for '", line.split()[0], "my.toml"))
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
        options = (p for p in command.params if p.param_type_name == "option" and p.expose_value)
        named |= {prefix + str(option.name).upper() for option in options}
    others = {name: "" for name in named if not name.startswith("TINYLM_RUNS_")}
    assert "Warning" not in run_ok("runs", env=others).stderr


def test_shell_completion_prints_no_warning() -> None:
    program = "import sys; from tinylm.__main__ import main; sys.argv = ['tinylm']; main()"
    completing = {"_TINYLM_COMPLETE": "complete_bash", "COMP_WORDS": "tinylm tr", "COMP_CWORD": "1"}
    env = {**environment(), "TINYLM_TRAIN_STEP": "1", **completing}
    result = run_child([sys.executable, "-c", program], env=env)
    assert (result.stdout.split(), result.stderr) == (["train", "train-tokenizer"], "")


PLANNED: dict[str, dict[str, dict[str, Any]]] = {  # what the flags set, by section of the plan
    "--kv-heads 1 --ffn-width 20 --position learned --no-norm-gain --no-qk-norm --bias --activation relu --no-tie": {
        "model": {"kv_heads": 1, "ffn_width": 20, "position": "learned", "norm_gain": False, "qk_norm": False}
        | {"bias": True, "activation": "relu", "tie": False}
    },
    "--norm layernorm --norm-bias --norm-placement post --dropout 0.25 --attention-dropout 0.125 --no-residual": {
        "model": {"norm": "layernorm", "norm_bias": True, "norm_placement": "post", "dropout": 0.25, "residual": False}
        | {"attention_dropout": 0.125}
    },
    "--rope-theta 500 --no-attention-scale --scale-embedding --initialisation gpt2 --local-window 5 --local-layers 1": {
        "model": {"rope_theta": 500.0, "attention_scale": False, "scale_embedding": True, "initialisation": "gpt2"}
        | {"local_window": 5, "local_layers": [1]}
    },
    "--position relative --relative-clip 3 --experts 3 --expert-mode merge": {
        "model": {"relative_clip": 3, "experts": 3, "expert_mode": "merge"}
    },
    "--experts 3 --experts-per-token 1 --expert-balance 0.5": {
        "model": {"experts": 3, "experts_per_token": 1, "expert_balance": 0.5}
    },
    "--batch-size 6 --micro-batch 2 --lr 0.01 --min-lr 0.001 --warmup-steps 1 --schedule linear --optimizer adam": {
        "training": {"batch_size": 6, "micro_batch": 2, "lr": 0.01, "min_lr": 0.001, "warmup": 0.5}
        | {"schedule": "linear", "optimizer": "adam"}
    },
    "--weight-decay 0.2 --beta1 0.8 --beta2 0.9 --grad-clip 0.5 --average 0.2 --label-smoothing 0.3 --compile off": {
        "training": {"weight_decay": 0.2, "beta1": 0.8, "beta2": 0.9, "grad_clip": 0.5, "average": 0.2}
        | {"label_smoothing": 0.3},
        "runtime": {"compile": False},
    },
    "--mtp-weight 0.2 --sequence-growth 2 --eval-every 3 --save-every 5 --patience 7 --seed 9": {
        "training": {"mtp_weight": 0.2, "sequence_growth": 2, "eval_every": 3}
        | {"save_every": 5, "patience": 7, "seed": 9}
    },
}


def test_an_option_sets_its_field_of_the_plan(corpus: Path) -> None:
    wrong = []
    for flags, sections in PLANNED.items():
        options = ("--steps", 2, "--dry-run", "--json", *TINY, "--layers", 2, *flags.split())
        (plan,) = records(run_ok("train", corpus, *options))
        for section, expected in sections.items():
            found = {name: plan[section][name] for name in expected}
            wrong += [] if found == expected else [f"{flags}: {found}, not {expected}"]
    assert not wrong, "\n".join(wrong)


def test_a_choice_that_equals_another_default_counts_as_given(here: Path) -> None:
    (here / "pairs.tsv").write_text("a b\tb a\n" * 40)
    command = ("train", "pairs.tsv", "--architecture", "encoder-decoder", "--steps", 1, *TINY)
    for flags, expected in (((), 0.1), (("--label-smoothing", 0), 0.0)):
        (plan,) = records(run_ok(*command, *flags, "--dry-run", "--json"))
        assert plan["training"]["label_smoothing"] == expected


def test_a_run_records_the_settings_of_its_plan(corpus: Path, here: Path) -> None:
    command = ("train", corpus, "--time", "1.5h", *TINY, "--position", "learned", "--beta2", 0.9)
    (plan,) = records(run_ok(*command, "--dry-run", "--json"))
    assert plan["training"]["budget"]["time"] == 5400
    run_ok("train", corpus, "--steps", 1, *command[4:])
    config = read_config(here / "checkpoints/corpus")
    assert (config.model.position, config.training.beta2, config.training.budget.steps) == ("learned", 0.9, 1)


def test_every_field_of_the_model_and_training_configuration_has_an_option() -> None:
    """Except fields that follow from the text, the preset, the architecture or another option, or from an import."""
    options = set(inspect.signature(train).parameters)
    imported = {"head_dim", "rotary_dim", "rope_scaling", "local_rope_theta", "norm_epsilon", "norm_unit_offset"}
    imported |= {"qkv_bias", "output_bias", "ffn_bias", "parallel_residual", "embedding_scale"}
    imported |= {"attention_multiplier", "normalise_top_k", "labels"}
    assert {field.name for field in dataclasses.fields(ModelConfig)} - options == imported
    without = {"budget", "warmup", "eval_tokens", "epsilon", "keep"}
    assert {field.name for field in dataclasses.fields(TrainingConfig)} - options == without
