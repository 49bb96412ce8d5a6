"""`torch.optim.Adam` and `AdamW` without the wrappers that import torch's compiler (decision 018).

torch wraps `add_param_group` and `zero_grad` in `torch._disable_dynamo` and `step` in `_use_grad_for_differentiable`.
Both import `torch._dynamo` (about 1 s) at the first call. For `step`, `torch.no_grad` replaces the wrapper.
`inspect.unwrap` returns methods without wrappers unchanged.
"""

import inspect

import torch


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
