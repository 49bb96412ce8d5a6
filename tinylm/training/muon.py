"""Muon, an optimizer for the weight matrices of linear layers with orthogonalised momentum (Jordan et al. 2024)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tinylm.kernels.optimizers import Optimizer
from tinylm.training.sharded_tensors import apply_to_full_matrices

MOMENTUM = 0.95
# (a, b, c): the polynomial a x + b x^3 + c x^5, applied five times, maps singular values in (0, 1] to about 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class Muon(Optimizer):
    """w <- (1 - lr * decay) * w - lr * 0.2 * sqrt(max(rows, columns)) * orthogonalise(u), with Nesterov momentum u.

    The factor 0.2 * sqrt(max(rows, columns)) gives updates the RMS of AdamW's, so that both optimizers can use the same
    learning rate (Liu et al. 2025). torch.optim.Muon computes the same (with `adjust_lr_fn="match_rms_adamw"`), one
    matrix at a time; here, matrices of the same shape are batched (decision 011).

    matrices: weights, each (R, C). If they are sharded among ranks, so is the momentum, and each matrix is gathered on
        one rank to be orthogonalised.
    precision: dtype of the Newton-Schulz products; torch.optim.Muon uses bf16
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, precision: torch.dtype) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._precision = precision

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices that have a gradient. `closure` is not supported."""
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if not matrices:
                continue
            directions = []
            for matrix in matrices:
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - MOMENTUM)
                directions.append(matrix.grad.lerp(momentum, MOMENTUM).to(self._precision))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
            updates = apply_to_full_matrices(self._orthogonalise, directions)
            for matrix, update in zip(matrices, updates, strict=True):
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)

    def _orthogonalise(self, directions: Sequence[Tensor]) -> list[Tensor]:
        return orthogonalise(directions, self._precision)


def orthogonalise(matrices: Sequence[Tensor], precision: torch.dtype) -> list[Tensor]:
    """The matrices, each (R, C), with their singular values replaced by values between about 0.7 and 1.2."""
    # Transposed if R > C: the iteration multiplies matrices of the smaller size (R, R).
    wide = {index: matrix if len(matrix) <= matrix.shape[1] else matrix.T for index, matrix in enumerate(matrices)}
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in wide.items():
        by_shape[matrix.shape].append(index)
    for indices in by_shape.values():
        batch = _newton_schulz(torch.stack([wide[index].to(precision) for index in indices]))  # (N, R, C)
        wide.update(zip(indices, batch.unbind(), strict=True))
    return [wide[index].T if len(matrix) > matrix.shape[1] else wide[index] for index, matrix in enumerate(matrices)]


def _newton_schulz(x: Tensor) -> Tensor:
    """Orthogonalise a batch by the Newton-Schulz iteration: (N, R, C) with R <= C -> (N, R, C)."""
    a, b, c = COEFFICIENTS
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT  # (N, R, R)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)  # (N, R, R)
        x = torch.baddbmm(x, polynomial, x, beta=a)  # (N, R, C)
    return x
