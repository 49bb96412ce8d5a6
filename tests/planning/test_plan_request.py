"""A request with an invalid value, or with choices that contradict each other, is an error that names the setting."""

from typing import Any

from tests.planning.planned import adapter, data, planned
from tests.variants import small
from tinylm.errors import UsageError
from tinylm.planning.plan_request import PlanRequest
from tinylm.presets import SIZES
from tinylm.training_config import Budget


def request(**choices: Any) -> PlanRequest:
    return PlanRequest(data=data(1000), vocab_size=100, **choices)


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"training": {"micro_batch": -1}}, "`micro_batch` is -1; it must be from 1 to"),
    ({"training": {"batch_size": 4, "micro_batch": 5}}, "`micro_batch` is 5; it must be at most `batch_size` (4)"),
    ({"training": {"lr": 1e-3, "min_lr": 1e-2}}, "`min_lr` is 0.01; it must be at most `lr` (0.001)"),
    ({"training": {"schedule": "constant", "min_lr": 1e-5}}, '`min_lr` has no effect with `schedule="constant"`'),
    ({"training": {"warmup_steps": -1}}, "`warmup_steps` is -1; it must be from 0 to"),
    ({"training": {"warmup_steps": 101}}, "`warmup_steps` is more than the whole run"),
    ({"training": {"eval_every": 0}}, "`eval_every` is 0"),
    ({"training": {"optimizer": "sgd"}}, "`optimizer` is 'sgd'"),
    ({"training": {"optimizer": "adamw", "momentum": 0.9}}, '`momentum` has no effect with `optimizer="adamw"`'),
    ({"training": {"pack": True}}, "`pack` is for conversations"),
    ({"training": {"sequence_growth": 3}}, "`sequence_growth` is 3; it must be 1, 2 or 4"),
    ({"training": {"sequence_growth": 4}, "model": {"context": 30}}, "must divide the length of the sequences, 30"),
    ({"model": {"preset": "bert"}}, "`preset` is 'bert'; it must be one of: modern, gpt2, original"),
    ({"model": {"size": "vast"}}, "`size` is 'vast'; it must be one of: auto, nano, micro"),
    ({"model": {"size": "nano", **SIZES["micro"]}}, "`size` sets `layers`, `heads`, `width`, `context`"),
    ({"model": {"width": 97, "heads": 4}}, "`heads` is 4; it must divide `width` (97)"),
    ({"model": {"context": 0}}, "`context` is 0"),
    ({"compile": "yes"}, "`compile` is 'yes'; it must be one of: auto, on, off"),
]


def test_settings_that_are_invalid_or_contradict_each_other_are_refused_by_name() -> None:
    wrong = []
    for choices, words in INVALID:
        try:
            planned(budget=Budget(steps=100), **choices)
            wrong.append(f"{choices}: no error")
        except UsageError as error:
            if words not in str(error):
                wrong.append(f"{choices}: {error}")
    assert not wrong, "\n".join(wrong)


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
