"""Activation checkpointing: the backward pass computes blocks again (Chen et al. 2016; decision 030)."""

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tinylm.transformer.block import PreNormBlock


def checkpoint_activations(model: nn.Module) -> None:
    """Change each block, in place, to store only its inputs for the backward pass, which computes the block again.

    Losses and gradients do not change: the second pass has the random numbers and the number format of the first. On
    Apple GPUs the random numbers differ (`tinylm.planning.memory_plan.repeats_dropout`).

    `checkpoint` calls the compiled block in both passes. If the call of `checkpoint` were compiled, the second pass
    would draw other dropout masks.
    """
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, PreNormBlock)]
    for block in blocks:
        block.__class__ = _checkpointed(block.__class__)


@functools.cache
def _checkpointed(block: type[nn.Module]) -> type[Any]:
    """A subclass whose calls are checkpointed while gradients are enabled; `forward` and parameters are unchanged."""

    def call(self: nn.Module, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return block.__call__(self, *args)
        return checkpoint(functools.partial(block.__call__, self), *args, use_reentrant=False)

    return type(block.__name__, (block,), {"__call__": call})
