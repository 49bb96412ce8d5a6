"""Training without torch's compiler where nothing is compiled: importing it takes a second (decision 018)."""

import inspect
import sys
from contextlib import AbstractContextManager, nullcontext

import torch


class Optimizer(torch.optim.Optimizer):
    """torch's, without what it has around its methods, which imports the compiler to tell it to leave them alone."""

    # Off come torch._disable_dynamo here, and below what counts gradients where a step is itself differentiated.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Adam(Optimizer, torch.optim.Adam):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(Optimizer, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def eagerly() -> AbstractContextManager[object]:
    """Inside, what is compiled runs as it was written. Without the compiler imported, nothing is compiled."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
