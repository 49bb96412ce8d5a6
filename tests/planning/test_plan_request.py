"""A request with an invalid value, or with choices that contradict each other, is an error that names the setting."""

import re
from typing import Any

import pytest

from tests.planning.planned import adapter, data, planned
from tests.variants import small
from tinylm.errors import UsageError
from tinylm.planning.plan_request import PlanRequest
from tinylm.presets import SIZES
from tinylm.training_config import Budget


def request(**choices: Any) -> PlanRequest:
    return PlanRequest(data=data(1000), vocab_size=100, **choices)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"batch_size": 0}, "`batch_size` is 0; it must be from 1 to"),
        ({"micro_batch": -1}, "`micro_batch` is -1; it must be from 1 to"),
        ({"batch_size": 4, "micro_batch": 5}, "`micro_batch` is 5; it must be at most `batch_size` (4)"),
        ({"lr": -1.0}, "`lr` is -1"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "`min_lr` is 0.01; it must be at most `lr` (0.001)"),
        ({"schedule": "constant", "min_lr": 1e-5}, '`min_lr` has no effect with `schedule="constant"`'),
        ({"warmup_steps": -1}, "`warmup_steps` is -1; it must be from 0 to"),
        ({"warmup_steps": 101}, "`warmup_steps` is more than the whole run"),
        ({"eval_every": 0}, "`eval_every` is 0"),
        ({"save_every": 0}, "`save_every` is 0"),
        ({"optimizer": "sgd"}, "`optimizer` is 'sgd'"),
        ({"momentum": 1.0}, "`momentum` is 1"),
        ({"optimizer": "adamw", "momentum": 0.9}, '`momentum` has no effect with `optimizer="adamw"`'),
        ({"schedule": "sudden"}, "`schedule` is 'sudden'"),
        ({"patience": 0}, "`patience` is 0"),
        ({"grad_clip": -1.0}, "`grad_clip` is -1"),
    ],
)
def test_invalid_training_settings_are_refused_by_name(training: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        planned(training=training, budget=Budget(steps=100))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"preset": "bert"}, "`preset` is 'bert'; it must be one of: modern, gpt2, original"),
        ({"size": "vast"}, "`size` is 'vast'; it must be one of: auto, nano, micro"),
        ({"size": "nano", **SIZES["micro"]}, "`size` sets `layers`, `heads`, `width`, `context`"),
        ({"width": 97, "heads": 4}, "`heads` is 4; it must divide `width` (97)"),
        ({"position": "fourier"}, "`position` is 'fourier'"),
        ({"context": 0}, "`context` is 0"),
    ],
)
def test_invalid_models_are_refused_by_the_setting(model: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        planned(model=model)


def test_compile_is_auto_on_or_off() -> None:
    with pytest.raises(UsageError, match="`compile` is 'yes'; it must be one of: auto, on, off"):
        request(compile="yes")


def test_the_recipe_is_that_of_the_preset_of_the_base_or_of_the_adapter() -> None:
    assert request().recipe_name == "modern"
    assert request(model={"preset": "gpt2"}).recipe_name == "gpt2"
    assert request(base=small("original", kv_heads=4)).recipe_name == "original"
    for kind in ("lora", "bottleneck"):
        assert request(base=small(), adapter=adapter(kind=kind)).recipe_name == kind


def test_the_optimizer_is_that_of_the_recipe_unless_one_is_chosen() -> None:
    assert request().optimizer == "muon"
    assert request(model={"preset": "gpt2"}).optimizer == "adamw"
    assert request(training={"optimizer": "adam"}).optimizer == "adam"
