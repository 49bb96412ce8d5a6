"""A running average of the weights. It often has a lower validation loss than the current weights."""

import contextlib
from collections.abc import Iterator

import torch

from tinylm.training.sharded_tensors import local


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
