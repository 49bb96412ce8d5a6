"""No option of a model is ignored: each changes the model, or is an error that names it."""

import dataclasses
from typing import Any

import pytest
import torch

from tinylm.config.model import ACTIVATIONS, ARCHITECTURES, ModelConfig, ModelSettings
from tinylm.config.presets import PRESETS, make_model_config
from tinylm.errors import UsageError
from tinylm.transformer.build import build_model

# For each option, values to try, each with other options that it may need.
VALUES: dict[str, tuple[tuple[Any, dict[str, Any]], ...]] = {
    "layers": ((3, {}),),
    "encoder_layers": ((3, {}),),
    "heads": ((4, {"kv_heads": 2}),),
    "kv_heads": ((1, {}),),
    "width": ((24, {}),),
    "ffn_width": ((20, {}),),
    "context": ((40, {"position": "learned"}), (40, {})),
    "position": (("none", {}), ("relative", {})),
    "rope_theta": ((100.0, {}), (100.0, {"position": "rope"}), (100.0, {"position": "learned"})),
    "norm": (("none", {"norm_bias": None}), ("layernorm", {"norm_bias": False}), ("rmsnorm", {})),
    "norm_placement": (("post", {}), ("pre", {}), ("sandwich", {}), ("post", {"norm": "none"})),
    "norm_gain": ((False, {}), (False, {"norm": "none"})),
    "norm_bias": ((True, {}), (False, {}), (True, {"norm": "none"})),
    "residual": ((False, {}), (False, {"norm_placement": "post"})),
    "attention_scale": ((False, {}), (False, {"position": "relative"})),
    "qk_norm": ((True, {}), (False, {}), (True, {"norm": "none"})),
    "bias": ((True, {}), (False, {})),
    "relative_clip": ((2, {"position": "relative"}), (2, {}), (2000, {"position": "relative"})),
    "local_window": ((3, {}), (16, {}), (3, {"position": "relative"})),
    "local_layers": (((1,), {"local_window": 3}), ((1,), {})),
    "experts": ((3, {}),),
    "experts_per_token": ((1, {"experts": 3}), (3, {"experts": 3}), (1, {})),
    "expert_mode": (("merge", {"experts": 3}), ("merge", {})),
    "expert_balance": ((0.5, {}), (0.5, {"experts": 3}), (0.5, {"experts": 3, "expert_mode": "merge"})),
    "activation": tuple((name, {}) for name in ACTIVATIONS),
    "tie": ((False, {}),),
    "scale_embedding": ((True, {}), (False, {})),
    "initialisation": (("modern", {}), ("gpt2", {}), ("original", {})),
    "dropout": ((0.5, {}), (0.5, {"residual": False}), (0.5, {"norm_placement": "post", "residual": False})),
    "attention_dropout": ((0.5, {}), (0.5, {"position": "relative"}), (0.5, {"local_window": 3})),
}


def test_every_option_of_a_model_is_tested() -> None:
    assert set(VALUES) == {f.name for f in dataclasses.fields(ModelSettings)} - {"architecture"}


def config_of(preset: str, architecture: str, choices: dict[str, Any]) -> ModelConfig:
    """A small model of a preset with these choices."""
    shape = {"layers": 2, "heads": 2, "kv_heads": 2, "width": 16, "context": 16, "ffn_width": 12, "vocab_size": 13}
    return make_model_config(preset=preset, size="nano", architecture=architecture, **{**shape, **choices})


def traces(config: ModelConfig) -> list[torch.Tensor]:
    """All that a choice may change: initial weights, logits in training mode, auxiliary loss, and the context."""
    model = build_model(config, seed=1).train()
    drawn = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(3)
    with torch.no_grad():  # weights that are initialised to zero would hide the layers before them
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    output = model.probe(torch.arange(24).view(2, 12) % 13)
    return [*drawn.values(), model.logits(output.hidden).detach(), output.aux.detach(), torch.zeros(config.context)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all shapes and values are equal."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("preset", PRESETS)
def test_an_option_changes_the_model_or_is_a_usage_error(preset: str, architecture: str) -> None:
    for name, value, beside in ((name, *choice) for name, choices in VALUES.items() for choice in choices):
        if PRESETS[preset].get(name) == value:
            continue
        try:
            changed = traces(config_of(preset, architecture, {**beside, name: value}))
        except UsageError as error:
            assert any(f"`{option}`" in str(error) for option in (name, *beside))
            continue
        plain = make_model_config(vocab_size=13, preset=preset, size="nano", architecture=architecture, **beside)
        if getattr(plain, name) == value:
            continue  # the default of this model
        before = traces(config_of(preset, architecture, beside))
        assert not equal(before, changed), f"--{name} {value} beside {beside} changes nothing"


HIDDEN: dict[str, tuple[Any, ...]] = {  # settings that `effective` can leave out: other values
    "rope_theta": (100.0,),
    "relative_clip": (3,),
    "local_layers": ((0,),),
    "norm_unit_offset": (True,),
    **dict.fromkeys(("norm_gain", "norm_bias", "qk_norm", "normalise_top_k", "scale_embedding"), (True, False)),
    "experts_per_token": (1,),
    "expert_mode": ("merge",),
    "expert_balance": (0.5,),
    "labels": (("a", "b"),),
}


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"position": "learned"},
        {"position": "relative"},
        {"norm": "none", "qk_norm": False},
        {"embedding_scale": 2.0},
        {"experts": 3, "local_window": 3, "local_layers": (1,)},
    ],
    ids=str,
)
def test_a_setting_that_is_not_shown_has_no_effect(shape: dict[str, Any]) -> None:
    sizes = {"layers": 2, "heads": 2, "kv_heads": 2, "width": 16, "context": 16, "ffn_width": 12, "vocab_size": 13}
    config = ModelConfig(**{**sizes, "norm_bias": False, **shape})
    shown, before = config.effective(), traces(config)
    given = {field.name for field in dataclasses.fields(config) if getattr(config, field.name) is not None}
    assert given - set(shown) <= {*HIDDEN, "experts"}
    for name, values in HIDDEN.items():
        for value in values:
            try:
                changed = traces(dataclasses.replace(config, **{name: value}))
            except UsageError:
                continue
            if name not in shown and getattr(config, name) is not None:
                assert equal(before, changed), f"{name}={value} changes the model"
