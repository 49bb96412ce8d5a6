"""tinylm train: each option sets its value of the plan. tests/commands/test_errors.py has values that are not valid."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from tests.shell import TINY, records, run_ok
from tinylm.commands.train import train
from tinylm.model_config import ModelConfig
from tinylm.run_directory.loading import read_config
from tinylm.training_config import TrainingConfig

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
    "--mtp-weight 0.2 --sequence-growth 2 --log-gradients --eval-every 3 --save-every 5 --patience 7 --seed 9": {
        "training": {"mtp_weight": 0.2, "sequence_growth": 2, "log_gradients": True, "eval_every": 3}
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


def test_a_run_records_the_settings_of_its_plan(corpus: Path, here: Path) -> None:
    command = ("train", corpus, "--time", "1.5h", *TINY, "--position", "learned", "--beta2", 0.9)
    (plan,) = records(run_ok(*command, "--dry-run", "--json"))
    assert plan["training"]["budget"]["time"] == 5400
    run_ok("train", corpus, "--steps", 1, *command[4:])
    config = read_config(here / "checkpoints/corpus")
    assert config.training is not None
    assert (config.model.position, config.training.beta2, config.training.budget.steps) == ("learned", 0.9, 1)


def test_every_field_of_the_model_and_training_configuration_has_an_option() -> None:
    """Except fields that follow from the text, the preset, the architecture or another option, or from an import."""
    options = set(inspect.signature(train).parameters)
    imported = {"head_dim", "rotary_dim", "rope_scaling", "local_rope_theta", "norm_epsilon", "norm_unit_offset"}
    imported |= {"qkv_bias", "output_bias", "ffn_bias", "parallel_residual", "embedding_scale"}
    imported |= {"attention_multiplier", "normalise_top_k"}
    assert {field.name for field in dataclasses.fields(ModelConfig)} - options == imported
    without = {"budget", "warmup", "eval_tokens", "epsilon", "objective", "keep"}
    assert {field.name for field in dataclasses.fields(TrainingConfig)} - options == without
