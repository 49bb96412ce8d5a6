"""tinylm train: options, and errors for values that are not valid."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from tests.shell import (
    TINY,
    assert_error,
    assert_usage_error,
    records,
    run_ok,
    snapshot,
    tinylm,
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


OUT_OF_RANGE = (
    ("--steps 0", "--steps is 0"),
    ("--batch-size 0", "--batch-size is 0"),
    ("--batch-size -3", "--batch-size is -3"),
    ("--micro-batch 0", "--micro-batch is 0"),
    ("--micro-batch 5", "--micro-batch is 5; it must be at most --batch-size (4)"),
    ("--vocab-size 0", "--vocab-size is 0"),
    ("--vocab-size 256 --tokenizer bpe", "--vocab-size is 256; a BPE tokenizer needs 257"),
    ("--seed -1", "--seed is -1"),
    ("--seed 9223372036854775808", "--seed is 9223372036854775808"),
    ("--eval-every 0", "--eval-every is 0"),
    ("--save-every 0", "--save-every is 0"),
    ("--log-every 0", "--log-every is 0"),
    ("--patience 0", "--patience is 0"),
    ("--lr 0", "--lr is 0.0"),
    ("--lr nan", "--lr is nan"),
    ("--min-lr 1", "--min-lr is 1.0; it must be at most --lr ("),
    ("--warmup-steps 3", "--warmup-steps is more than the whole run"),
    ("--warmup-steps -1", "--warmup-steps is -1"),
    ("--grad-clip -1", "--grad-clip is -1.0"),
    ("--weight-decay -1", "--weight-decay is -1.0"),
    ("--beta1 1", "--beta1 is 1.0"),
    ("--val-fraction 0", "--val-fraction is 0.0"),
    ("--val-fraction 1", "--val-fraction is 1.0"),
    ("--val-fraction nan", "--val-fraction is nan"),
    ("--dropout 1", "--dropout is 1.0"),
    ("--layers 0", "--layers is 0"),
    ("--heads 0", "--heads is 0"),
    ("--heads 3", "--heads is 3; it must divide --width (16)"),
    ("--kv-heads 3", "--kv-heads is 3; it must divide --heads (2)"),
    ("--width 0", "--width is 0"),
    ("--context 0", "--context is 0"),
    ("--rope-theta 0", "--rope-theta is 0.0"),
    ("--preset bert", "--preset is 'bert'; it must be one of: modern, gpt2, original"),
    ("--size huge", "--size is 'huge'"),
    ("--position fourier", "--position is 'fourier'; it must be one of: rope"),
    ("--norm batchnorm", "--norm is 'batchnorm'"),
    ("--norm-placement middle", "--norm-placement is 'middle'"),
    ("--activation tanh", "--activation is 'tanh'"),
    ("--schedule step", "--schedule is 'step'"),
    ("--optimizer sgd", "--optimizer is 'sgd'"),
    ("--compile maybe", "--compile is 'maybe'; it must be one of: auto, on, off"),
    ("--device tpu", "--device is 'tpu'; it must be one of: auto, cuda, mps, cpu"),
    ("--dtype int8", "--dtype is 'int8'; it must be one of: auto, fp32, bf16, fp16"),
    ("--dtype fp16 --device cpu", "--dtype fp16 needs a GPU"),
    ("--encoding utf-9", "--encoding is 'utf-9', which is unknown"),
    ("--tokenizer missing.json", "--tokenizer is 'missing.json'; it must be auto"),
)
CONTRADICTIONS = (
    ("--epochs 1", "--steps and --epochs contradict each other"),
    ("--time 5m", "--steps and --time contradict each other"),
    ("--val-data corpus.txt --val-fraction 0.5", "--val-data and --val-fraction contradict each other"),
    ("--tokenizer char --vocab-size 300", "--vocab-size is for BPE"),
)


@pytest.mark.parametrize("flags, message", OUT_OF_RANGE + CONTRADICTIONS)
def test_invalid_values_are_reported_with_their_flags_and_nothing_is_written(
    flags: str, message: str, corpus: Path, here: Path
) -> None:
    before = snapshot(here)
    assert_error(tinylm("train", corpus.name, "--steps", 2, *TINY, *flags.split()), 2, message)
    assert snapshot(here) == before


@pytest.mark.parametrize(
    "flags, message",
    [("--time 0", "--time is 0.0"), ("--epochs 0", "--epochs is 0.0"), ("--epochs nan", "--epochs is nan")],
)
def test_a_budget_that_is_not_positive_is_an_error(flags: str, message: str, corpus: Path) -> None:
    assert_error(tinylm("train", corpus.name, *TINY, *flags.split()), 2, message, "greater than 0")


@pytest.mark.parametrize("time", ["soon", "1h2h", ".", "5 minutes", "-5", "h"])
def test_an_invalid_duration_is_a_usage_error_with_an_example(time: str, corpus: Path) -> None:
    assert_usage_error(
        tinylm("train", corpus.name, *TINY, f"--time={time}"), f"{time!r} is not a length of time", "1h30m"
    )


@pytest.mark.parametrize("flags", ["--steps many", "--layers 1.5", "--time soon", "--no-layers 1", "--lr fast"])
def test_values_of_the_wrong_type_are_usage_errors(flags: str, corpus: Path, here: Path) -> None:
    before = snapshot(here)
    assert_usage_error(tinylm("train", corpus, *TINY, *flags.split()), flags.split()[0])
    assert snapshot(here) == before


def test_without_a_text_the_error_has_an_example_command() -> None:
    assert_error(tinylm("train"), 2, "tinylm train corpus.txt", "standard input")
