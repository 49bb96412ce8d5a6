"""The optimizers: Adam and AdamW, with weight decay on matrices only."""

from typing import Any

import torch
from torch import nn

from tinylm.config import TrainingConfig

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or Adam (Kingma and Ba 2015, decay as part of the gradient).

    Gains, biases and other vectors are never decayed. Only parameters that require a gradient are trained.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return OPTIMIZERS[config.optimizer](  # type: ignore[call-arg]
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
