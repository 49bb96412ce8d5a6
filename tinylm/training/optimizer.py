"""Adam and AdamW with weight decay on matrices only, and Muon and NorMuon for the weight matrices of layers.

Also the learning-rate schedules, and the running average of the weights, which often has a lower validation loss.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.config.training import MUON_OPTIMIZERS, TrainingConfig
from tinylm.errors import UsageError
from tinylm.kernels.graphs import Adam, AdamW, Optimizer
from tinylm.training.muon import Muon, NorMuon
from tinylm.training.parallel import local
from tinylm.transformer.blocks import PreNormBlock

# Each maps progress after the warmup, from 0 to 1, to the fraction of `lr - min_lr` that is left.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    # One half period (Loshchilov and Hutter 2017).
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    # Constant for the first half, then linear (Hägele et al. 2024).
    "trapezoid": lambda progress: min(1.0, 2.0 * (1.0 - progress)),
}


def learning_rate(progress: float, config: TrainingConfig) -> float:
    """The learning rate at `progress`, from 0 to 1: linear warmup from 0 to `lr`, then the decay of `config.schedule`.

    The schedules in DECAYS end at `min_lr`, except for `constant`, which stays at `lr`. `inverse-sqrt` is
    `lr * sqrt(warmup / progress)`, and at least `min_lr` (Vaswani et al. 2017); without a warmup, it is `lr` up to a
    progress of 0.001.
    """
    if config.warmup > 0 and progress < config.warmup:
        return config.lr * progress / config.warmup
    if config.schedule == "inverse-sqrt":
        return max(config.min_lr, config.lr * math.sqrt((config.warmup or 1e-3) / max(progress, config.warmup or 1e-3)))
    after_warmup = min(1.0, (progress - config.warmup) / (1.0 - config.warmup)) if config.warmup < 1 else 0.0
    return config.min_lr + (config.lr - config.min_lr) * DECAYS[config.schedule](after_warmup)


class MuonAdamW(Optimizer):
    """Muon or NorMuon for the matrices of layers and fused AdamW for the other parameters, as one optimizer."""

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {"fused": True})
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state
        self.members = (muon, adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch.optim.Optimizer takes a closure
        """Update the parameters that have a gradient. `closure` is not supported."""
        for member in self.members:
            member.step()


def build_optimizer(model: nn.Module, config: TrainingConfig, dtype: str) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), Adam (Kingma and Ba 2015) with L2 regularisation, or Muon or NorMuon
    with AdamW.

    Only parameters with `requires_grad` are trained. Gains, biases and other vectors have no weight decay.

    dtype: number format in which the model computes. Muon orthogonalises in bf16 if it is bf16, else in fp32: the range
        of fp16 is too small for gradients.

    Raises UsageError for Muon and NorMuon if no weight matrix of a layer is trained.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (float(config.beta1), float(config.beta2))  # torch accepts no mixture with int
    if config.optimizer not in MUON_OPTIMIZERS:
        adam = Adam if config.optimizer == "adam" else AdamW
        groups = _decay_groups(trained, config.weight_decay)
        return adam(groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=True)
    matrices = layer_matrices(model)
    if not matrices:
        raise UsageError(
            f'`optimizer="{config.optimizer}"` needs weight matrices of layers, and none is trained here; use adamw.'
        )
    chosen = {id(matrix) for matrix in matrices}
    others = _decay_groups((parameter for parameter in trained if id(parameter) not in chosen), config.weight_decay)
    precision = torch.bfloat16 if dtype == "bf16" else torch.float32
    kind = NorMuon if config.optimizer == "normuon" else Muon
    return MuonAdamW(
        kind(matrices, config.lr, config.weight_decay, config.momentum, precision),
        AdamW(others, lr=config.lr, betas=betas, eps=config.epsilon, fused=True),
    )


def layer_matrices(model: nn.Module) -> list[Tensor]:
    """The trainable weights, each (out, in), of the linear layers in blocks, without routers, which are classifiers."""
    return [
        module.weight
        for block in model.modules()
        if isinstance(block, PreNormBlock)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("router") and module.weight.requires_grad
    ]


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: `weight_decay` for parameters of two or more dimensions, 0 for vectors; no empty group."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def updaters(optimizer: torch.optim.Optimizer) -> dict[Tensor, Adam | AdamW | Muon]:
    """The optimizer that updates each parameter, of a MuonAdamW one of its two; empty for other classes."""
    members = optimizer.members if isinstance(optimizer, MuonAdamW) else (optimizer,)
    return {
        parameter: member
        for member in members
        if isinstance(member, Adam | AdamW | Muon)
        for group in member.param_groups
        for parameter in group["params"]
    }


def first_state(updater: Adam | AdamW | Muon, parameter: Tensor) -> dict[str, Tensor]:
    """The zero state that the optimizer's first step creates; for Adam, as the fused implementation does."""
    if isinstance(updater, Muon):
        return updater.first_state(parameter)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


@torch.no_grad()
def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that the optimizer's first step would create. Existing state is kept.

    If memory runs out here, no weight has changed; in the step, some might have.
    """
    for parameter, updater in updaters(optimizer).items():
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = first_state(updater, parameter)


class WeightAverage:
    """Polynomial-decay averaging (Shamir and Zhang 2013).

    The average of the weights w_1 ... w_t after step t is a_t = a_(t-1) + (eta + 1) / (t + eta) * (w_t - a_(t-1)). With
    eta = 1 / mean_age - 2, the mean age of the averaged weights is `mean_age * (t - 1)` steps at every t; a `mean_age`
    of 1/2 is the plain mean. The average is part of the optimizer's state, and is saved and restored with it.

    mean_age: from MIN_AVERAGE of `tinylm.config.training` to 0.5
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mean_age: float) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._eta = 1 / mean_age - 2

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the current weights: those after `step` steps."""
        weight = (self._eta + 1) / (step + self._eta)
        states = [self._optimizer.state[parameter] for parameter in self._parameters]
        for parameter, state in zip(self._parameters, states, strict=True):
            if "average" not in state:
                state["average"] = parameter.detach().clone()
        # All in one call, since on a GPU a kernel per parameter takes longer than its work.
        averages = [local(state["average"]) for state in states]
        torch._foreach_lerp_(averages, [local(parameter) for parameter in self._parameters], weight)

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Context manager in which the model has the averaged weights; before the first update, the current ones."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # Copies values: FSDP gathers from the memory of the shards, so tensors cannot be exchanged.
        for parameter in self._parameters:
            state = self._optimizer.state[parameter]
            if "average" in state:
                average, weights = local(state["average"]), local(parameter)
                current = weights.clone()
                weights.copy_(average)
                average.copy_(current)
