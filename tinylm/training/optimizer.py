"""The optimizers: Adam and AdamW, with weight decay on matrices only, and Muon for the matrices in layers."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.config import TrainingConfig
from tinylm.errors import UsageError
from tinylm.model.block import PreNormBlock
from tinylm.training.eager import Adam, AdamW, Optimizer
from tinylm.training.muon import Muon

ADAMS: dict[str, type[Adam | AdamW]] = {"adamw": AdamW, "adam": Adam}


class MuonAdamW(Optimizer):
    """Muon for some matrices, and AdamW for groups of other parameters, at one learning rate."""

    def __init__(
        self,
        matrices: list[Tensor],
        others: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        precision: torch.dtype,
    ) -> None:
        muon = Muon(matrices, lr, weight_decay, precision)
        adamw = AdamW(others, lr=lr, betas=betas, eps=epsilon, fused=True)
        super().__init__([*muon.param_groups, *adamw.param_groups], {"lr": lr, "fused": True})
        muon.param_groups, adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        muon.state = adamw.state = self.state
        self.parts = (muon, adamw)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def build_optimizer(model: nn.Module, config: TrainingConfig, dtype: str = "fp32") -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), Adam (Kingma and Ba 2015, decay as part of the gradient), or Muon.

    Where the model computes in bf16, so do Muon's products; fp16 has too small a range for gradients.
    Gains, biases and other vectors are never decayed. Only parameters that require a gradient are trained.
    Raises UsageError for Muon where no matrix of a layer is trained.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (config.beta1, config.beta2)
    if config.optimizer != "muon":
        groups = _decayed(trained, config.weight_decay)
        return ADAMS[config.optimizer](groups, lr=config.lr, betas=betas, eps=config.epsilon, fused=True)
    matrices = layer_matrices(model)
    if not matrices:
        raise UsageError("--optimizer muon is for the matrices of layers, and none is trained here; use adamw.")
    chosen = {id(matrix) for matrix in matrices}
    others = _decayed((parameter for parameter in trained if id(parameter) not in chosen), config.weight_decay)
    precision = torch.bfloat16 if dtype == "bf16" else torch.float32
    return MuonAdamW(matrices, others, config.lr, betas, config.epsilon, config.weight_decay, precision)


def layer_matrices(model: nn.Module) -> list[Tensor]:
    """The trained weights of all linear layers in blocks, but for routers: a router's rows are a choice, and no map."""
    return [
        module.weight
        for block in model.modules()
        if isinstance(block, PreNormBlock)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith("router") and module.weight.requires_grad
    ]


def _decayed(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: what has rows is decayed, vectors are not."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each parameter the state that `optimizer`'s first step would, so that no step runs out of memory for it.

    Parameters that have their state keep it. Optimizers other than Adam, AdamW and Muon are left alone.
    """
    if isinstance(optimizer, MuonAdamW):
        for part in optimizer.parts:
            allocate_state(part)
    if not isinstance(optimizer, Adam | AdamW | Muon):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = _first_state(optimizer, parameter)


def _first_state(optimizer: Adam | AdamW | Muon, parameter: Tensor) -> dict[str, Tensor]:
    """As the optimizers' own steps make it; Adam's is that of the fused kernel."""
    if isinstance(optimizer, Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
