"""Data-parallel training: every rank has a replica of the model, and computes the gradient of a part of each batch.

Gradients are sums over scored tokens, divided by the number of scored tokens of the whole batch, so their sum over the
ranks is the gradient of the batch. The sum is the same on all ranks, and on equal machines
so are clipping, update and weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinylm.ranks import Ranks


@torch.no_grad()
def sum_gradients(parameters: Sequence[Tensor], missing: Sequence[Sequence[int]], ranks: Ranks) -> None:
    """Replace the gradients of this rank by their sum over all ranks.

    missing: for each rank, the indices of the parameters that have no gradient there. A parameter without a gradient on
    every rank is left without one.
    """
    if ranks.size == 1:
        return
    without = set(range(len(parameters))).intersection(*missing)
    shared = [parameter for index, parameter in enumerate(parameters) if index not in without]
    for parameter in shared:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    ranks.add([parameter.grad for parameter in shared if parameter.grad is not None])
