"""An average of the weights over the steps of a run, which is often better than the last of them."""

import contextlib
from collections.abc import Iterator

import torch


class WeightAverage:
    """After t steps, weights w_1 ... w_t averaged so that their mean age is `share` of t, whatever t is.

    a_t = a_(t-1) + (n + 1) / (t + n) * (w_t - a_(t-1)), with n = 1 / share - 2: polynomial-decay averaging (Shamir and
    Zhang 2013). A share of 1/2 is the plain mean. The average lies in the optimizer's memory of each parameter, and is
    saved and restored with it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, share: float) -> None:
        self._optimizer = optimizer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._emphasis = 1 / share - 2

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step number `step`, from 1."""
        memory = [self._optimizer.state[parameter] for parameter in self._parameters]
        for parameter, held in zip(self._parameters, memory, strict=True):
            if "average" not in held:
                held["average"] = parameter.detach().clone()
        weight = (self._emphasis + 1) / (step + self._emphasis)
        torch._foreach_lerp_([held["average"] for held in memory], self._parameters, weight)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averaged weights; before the first step, its own."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter in self._parameters:
            held = self._optimizer.state[parameter]
            if "average" in held:
                held["average"], parameter.data = parameter.data, held["average"]
