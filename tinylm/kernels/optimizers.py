"""`torch.optim.Adam` and `AdamW` without the wrappers that import torch's compiler (decision 018).

torch wraps the methods of its optimizers in `torch._disable_dynamo`, which imports `torch._dynamo` (about 1 s) at the
first call, and `step` in `_use_grad_for_differentiable`, which `torch.no_grad` replaces here. `inspect.unwrap` returns
methods without wrappers unchanged.
"""

import inspect

import torch


class Optimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer` without the wrappers of its methods."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Adam(Optimizer, torch.optim.Adam):
    """`torch.optim.Adam` without the wrappers of its methods."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(Optimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` without the wrappers of its methods."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
