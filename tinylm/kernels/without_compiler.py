"""Optimizers without the wrappers that import torch's compiler, and running compiled modules eagerly (decision 018).

torch wraps `add_param_group` and `zero_grad` in `torch._disable_dynamo` and `step` in `_use_grad_for_differentiable`.
Both import `torch._dynamo` (about 1 s) at the first call. For `step`, `torch.no_grad` replaces the wrapper.
`inspect.unwrap` returns methods without wrappers unchanged.
"""

import inspect
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


def force_eager() -> AbstractContextManager[object]:
    """Context manager in which compiled modules run eagerly.

    It does nothing if `torch._dynamo` has not been imported, because then no module is compiled; importing it would
    take a second.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def discard_compiled(modules: Iterable[nn.Module]) -> None:
    """Undo `Module.compile` of these modules; torch has no public function for it.

    If this version of torch has no `Module._compiled_call_impl`, all compiled code of this process runs eagerly.
    """
    torch.compiler.reset()
    if not hasattr(nn.Module, "_compiled_call_impl"):
        torch.compiler.set_stance("force_eager")
        return
    for module in modules:
        module._compiled_call_impl = None


class Optimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer` without the wrappers of `add_param_group` and `zero_grad`."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Adam(Optimizer, torch.optim.Adam):
    """`torch.optim.Adam` without the wrapper of `step`."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(Optimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` without the wrapper of `step`."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
