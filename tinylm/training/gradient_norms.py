"""Gradient norms by layer, for the log."""

import math
import re

import torch
from torch import Tensor, nn

from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.training.sharded_tensors import is_sharded, local


def layer_gradient_norms(model: nn.Module, ranks: Ranks = ONE_RANK) -> dict[str, float | None]:
    """The L2 norm of the gradient of each layer (`layers.0`, `encoder.layers.0`) and of each module outside of layers
    (`embedding`), by name.

    A norm is `None` if it is not finite, as in a step that fp16 loss scaling skips. Parameters without a gradient are
    left out. All ranks of a sharded model call this together.
    """
    parts: list[str] = []  # the layer or module of each parameter
    norms: list[Tensor] = []  # each (2,)
    sharded: list[bool] = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = re.match(r"(?:encoder\.)?layers\.\d+", name)
            parts.append(layer[0] if layer else name.rpartition(".")[0])
            norms.append(_scaled_norm(local(parameter.grad.detach())))
            sharded.append(is_sharded(parameter.grad))
    values = [norm * scale for norm, scale in torch.stack(norms).tolist()] if norms else []
    if is_sharded(model):
        by_parameter = zip(sharded, zip(*ranks.gather(values), strict=True), strict=True)
        values = [math.hypot(*of_ranks) if is_shard else of_ranks[0] for is_shard, of_ranks in by_parameter]
    norms_by_part: dict[str, list[float]] = {}
    for part, value in zip(parts, values, strict=True):
        norms_by_part.setdefault(part, []).append(value)
    totals = {part: math.hypot(*values) for part, values in norms_by_part.items()}
    return {part: total if math.isfinite(total) else None for part, total in totals.items()}


def _scaled_norm(gradient: Tensor) -> Tensor:
    """(2,): the norm of the gradient divided by its largest absolute entry, and that entry. Their product is the norm.

    Computed in fp32, since MPS has no float64. Without the division, squares of entries above 1.8e19 overflow.
    """
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    if not gradient.numel():  # all rows are on other ranks
        return gradient.new_zeros(2)
    scale = gradient.abs().max()
    norm = torch.linalg.vector_norm(gradient / scale.clamp(min=torch.finfo(gradient.dtype).tiny))
    return torch.stack([norm, scale])
