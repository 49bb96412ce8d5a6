"""tinylm train: options, and errors for values that are not valid."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from tests.shell import (
    TINY,
    records,
    run_ok,
)
from tinylm.commands.train import train
from tinylm.model_config import ModelConfig
from tinylm.run_directory.loading import read_config
from tinylm.training_config import TrainingConfig


@pytest.mark.parametrize("time, seconds", [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400)])
def test_time_is_given_in_hours_minutes_and_seconds(time: str, seconds: float, corpus: Path) -> None:
    plan = run_ok("train", corpus, "--time", time, *TINY, "--dry-run").stdout
    minutes, rest = divmod(seconds, 60)
    expected = f"{minutes // 60}h {minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m {rest:02d}s"
    assert f"time:      about {expected}\n" in plan


def test_model_options_set_the_model_configuration(corpus: Path, here: Path) -> None:
    flags = "--kv-heads 1 --ffn-width 20 --position learned --norm layernorm --norm-placement post --no-norm-gain"
    flags += " --norm-bias --no-qk-norm --bias --activation relu --no-tie --dropout 0.25 --attention-dropout 0.125"
    run_ok("train", corpus, "--steps", 1, *TINY, *flags.split())
    model = read_config(here / "checkpoints/corpus").model
    assert (model.kv_heads, model.ffn_width, model.position, model.norm, model.norm_placement) == (
        1,
        20,
        "learned",
        "layernorm",
        "post",
    )
    assert (model.norm_gain, model.norm_bias, model.qk_norm, model.bias, model.tie) == (False, True, False, True, False)
    assert (model.activation, model.dropout, model.attention_dropout) == ("relu", 0.25, 0.125)


MODEL_FLAGS = {
    "rope_theta": ("--rope-theta 500", 500.0),
    "relative_clip": ("--position relative --relative-clip 3", 3),
    "residual": ("--no-residual", False),
    "attention_scale": ("--no-attention-scale", False),
    "scale_embedding": ("--scale-embedding", True),
    "initialisation": ("--initialisation gpt2", "gpt2"),
    "local_window": ("--local-window 5", 5),
    "local_layers": ("--local-window 5 --local-layers 1", (1,)),
    "experts": ("--experts 3", 3),
    "experts_per_token": ("--experts 3 --experts-per-token 1", 1),
    "expert_mode": ("--experts 3 --expert-mode merge", "merge"),
    "expert_balance": ("--experts 3 --expert-balance 0.5", 0.5),
}
TRAINING_FLAGS = {
    "average": ("--average 0.2", 0.2),
    "label_smoothing": ("--label-smoothing 0.3", 0.3),
    "mtp_weight": ("--mtp-weight 0.2", 0.2),
    "sequence_growth": ("--sequence-growth 2", 2),
}


@pytest.mark.parametrize("part", [*MODEL_FLAGS, *TRAINING_FLAGS])
def test_an_option_sets_its_field_of_the_plan(part: str, corpus: Path) -> None:
    flags, value = (MODEL_FLAGS | TRAINING_FLAGS)[part]
    (plan,) = records(
        run_ok("train", corpus, "--steps", 1, "--dry-run", "--json", *TINY, "--layers", 2, *flags.split())
    )
    found = plan["model" if part in MODEL_FLAGS else "training"][part]
    assert (tuple(found) if isinstance(found, list) else found) == value


def test_every_field_of_the_model_and_training_configuration_has_an_option() -> None:
    """Except fields that follow from the text, the preset, the architecture or another option, or from an import."""
    options = {name for name, parameter in inspect.signature(train).parameters.items()}
    imported = {"head_dim", "rotary_dim", "rope_scaling", "local_rope_theta", "norm_epsilon", "norm_unit_offset"}
    imported |= {"qkv_bias", "output_bias", "ffn_bias", "parallel_residual", "embedding_scale"}
    imported |= {"attention_multiplier", "normalise_top_k"}
    assert {field.name for field in dataclasses.fields(ModelConfig)} - options == imported
    without = {"budget", "warmup", "eval_tokens", "epsilon", "objective", "keep"}
    assert {field.name for field in dataclasses.fields(TrainingConfig)} - options == without


def test_optimizer_options_set_the_training_configuration(corpus: Path, here: Path) -> None:
    flags = "--batch-size 6 --micro-batch 2 --lr 0.01 --min-lr 0.001 --warmup-steps 1 --schedule linear"
    flags += " --weight-decay 0.2 --beta1 0.8 --beta2 0.9 --grad-clip 0.5 --optimizer adam --compile off"
    run_ok("train", corpus, "--steps", 2, *TINY, *flags.split())
    config = read_config(here / "checkpoints/corpus")
    assert config.training is not None and config.runtime is not None
    t = config.training
    assert (t.batch_size, t.micro_batch, t.lr, t.min_lr, t.warmup) == (6, 2, 0.01, 0.001, 0.5)
    assert (t.schedule, t.weight_decay, t.beta1, t.beta2, t.grad_clip) == ("linear", 0.2, 0.8, 0.9, 0.5)
    assert (t.optimizer, config.runtime.compile) == ("adam", False)
