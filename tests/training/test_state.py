"""The saved state of a trainer. Reference: the trainer or optimizer that was never saved."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.trainer_bench import SETTINGS
from tests.variants import small
from tinylm.config.training import MUON_OPTIMIZERS, TrainingConfig
from tinylm.errors import TinyLMError
from tinylm.training.optimizer import build_optimizer
from tinylm.training.state import TrainerState, add_metrics, optimizer_tensors, restore_optimizer
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

number = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.builds(
        TrainerState,
        step=st.integers(0, 1 << 53),
        seconds=st.floats(0, 1e12),
        micro_batch=st.integers(1, 1 << 53),
        best_loss=st.none() | number,
        best_step=st.integers(1, 1 << 53),
        loss_sum=number,
        n_targets=st.integers(0, 1 << 53),
        scaler=st.sampled_from([{}, torch.amp.GradScaler("cpu").state_dict()]),
    )
)
def test_a_state_is_equal_after_json(state: TrainerState) -> None:
    saved = json.loads(json.dumps(state.to_json()))
    assert TrainerState.from_json(saved) == state
    assert saved.keys() == {field.name for field in dataclasses.fields(TrainerState)} | {"rng"}


def test_a_loss_before_training_in_an_older_save_is_not_the_best() -> None:
    old = TrainerState(step=3, best_loss=2.0, best_step=0).to_json()
    assert TrainerState.from_json(old).best_loss is None


SCALER = torch.amp.GradScaler("cpu").state_dict()
DAMAGED: list[dict[str, Any]] = [
    {"unknown": 1},
    *({"rng": value} for value in ({}, {"cpu": "zz"}, {"cpu": "00"}, 5)),
    *({"seconds": 10**400}, {"eval_seconds": 1e308}, {"loss_sum": -(10**400)}, {"loss_sum": None}),
    {"metrics": {"router_entropy": 10**400}},
    {"scaler": {"scale": 1.0}},
    *(
        {"scaler": {**SCALER, **changes}}
        for changes in ({"scale": [1.0]}, {"scale": 1e300}, {"_growth_tracker": 1 << 40})
    ),
]


def test_values_that_are_not_a_state_are_an_error() -> None:
    good = TrainerState(step=3).to_json()
    without = {name: value for name, value in good.items() if name != "rng"}
    for values in ({}, without, *({**good, **changes} for changes in DAMAGED)):
        with pytest.raises(TinyLMError, match="The saved training state is damaged"):
            TrainerState.from_json(values)


def test_metrics_are_added_entry_by_entry_and_those_of_another_shape_are_an_error() -> None:
    sums = add_metrics({"one": 1.0, "many": [[1.0, 2.0]]}, {"many": [[3.0, 4.0]], "new": [5.0]}, weight=2)
    assert sums == {"one": 1.0, "many": [[7.0, 10.0]], "new": [10.0]}
    for saved, found in ((1.0, [1.0]), ([1.0], 1.0), ([1.0], [1.0, 2.0]), ([[1.0]], [1.0])):
        with pytest.raises(TinyLMError, match="its routing metrics have another shape"):
            add_metrics({"expert_shares": saved}, {"expert_shares": found})


def trained(optimizer: str, steps: int) -> tuple[Decoder, torch.optim.Optimizer]:
    model = build_model(small("gpt2", kv_heads=4))
    built = build_optimizer(model, TrainingConfig(**{**SETTINGS, "lr": 0.01, "optimizer": optimizer}), "fp32")
    train(model, built, range(steps))
    return model, built


def train(model: Decoder, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=rng)
        optimizer.step()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "normuon"])
def test_an_optimizer_restored_from_its_tensors_continues_exactly(optimizer: str) -> None:
    model, built = trained(optimizer, 3)
    tensors = {name: tensor.clone() for name, tensor in optimizer_tensors(built, model).items()}
    names = dict(model.named_parameters())
    quantities = dict.fromkeys(names, ("exp_avg", "exp_avg_sq", "step"))
    if optimizer in MUON_OPTIMIZERS:
        of_matrices = ("momentum_buffer", "row_moment") if optimizer == "normuon" else ("momentum_buffer",)
        quantities |= {
            name: of_matrices for name in names if name.startswith("layers") and name.endswith("proj.weight")
        }
    assert tensors.keys() == {f"{name}/{quantity}" for name in names for quantity in quantities[name]}

    fresh, other = trained(optimizer, 0)
    fresh.load_state_dict(model.state_dict())
    restore_optimizer(other, fresh, tensors)
    train(model, built, range(3, 5))
    train(fresh, other, range(3, 5))
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, names[name]), name


def test_optimizer_tensors_of_another_model_or_of_averages_alone_are_an_error() -> None:
    model, optimizer = trained("adamw", 1)
    tensors = optimizer_tensors(optimizer, model)
    for name, value in (("layers.9.norm/step", torch.tensor(1.0)), ("embedding.weight/exp_avg", torch.zeros(3, 3))):
        fresh, other = trained("adamw", 0)
        with pytest.raises(TinyLMError, match=rf"The saved optimizer does not fit the model: (it has )?{name}"):
            restore_optimizer(other, fresh, {**tensors, name: value})
    averages = {f"{name}/average": parameter.detach().clone() for name, parameter in model.named_parameters()}
    for kind in ("adamw", "muon"):
        fresh, other = trained(kind, 0)
        with pytest.raises(TinyLMError, match="The saved optimizer does not fit the model: it lacks"):
            restore_optimizer(other, fresh, averages)
