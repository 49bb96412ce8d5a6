"""Muon, an optimizer for matrices that are maps (Jordan et al. 2024): momentum, made orthogonal."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tinylm.training.eager import Optimizer

MOMENTUM = 0.95
# Of the polynomial a x + b x^3 + c x^5, which takes every singular value from 0 to 1 close to 1 in five rounds.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Muon(Optimizer):
    """w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) orthogonal(u), with Nesterov's momentum u of gradients.

    The factor gives an update the size that AdamW's have, so that a rate means the same for both (Liu et al. 2025).
    torch.optim.Muon computes the same a matrix at a time; here those of one shape are one product (decision 011).
    `precision` is the products' format; torch's is bf16, which is enough.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, precision: torch.dtype) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self._precision = precision

    # torch's steps may be given a closure that computes the loss again; this one is not.
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if not matrices:
                continue
            gradients = [matrix.grad for matrix in matrices]
            for matrix in matrices:
                if "momentum_buffer" not in self.state[matrix]:
                    self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
            momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            for matrix, update in zip(matrices, orthogonalised(directions, self._precision), strict=True):
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalised(matrices: Sequence[Tensor], precision: torch.dtype) -> list[Tensor]:
    """Each (R, C) with its singular vectors, and all singular values near 1 (between 0.7 and 1.2)."""
    wide = {index: matrix if len(matrix) <= matrix.shape[1] else matrix.T for index, matrix in enumerate(matrices)}
    of_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in wide.items():
        of_shape[matrix.shape].append(index)
    for indices in of_shape.values():
        together = _newton_schulz(torch.stack([wide[index].to(precision) for index in indices]))  # (N, R, C)
        wide.update(zip(indices, together.unbind(), strict=True))
    return [wide[index].T if len(matrix) > matrix.shape[1] else wide[index] for index, matrix in enumerate(matrices)]


def _newton_schulz(x: Tensor) -> Tensor:
    """(N, R, C) with R <= C -> (N, R, C)"""
    a, b, c = COEFFICIENTS
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT  # (N, R, R)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)  # (N, R, R)
        x = torch.baddbmm(x, polynomial, x, beta=a)  # (N, R, C)
    return x
