"""Muon and NorMuon, optimizers for the weight matrices of linear layers with orthogonalised momentum."""

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tinylm.kernels.graphs import Optimizer
from tinylm.training.parallel import apply_to_full_matrices, as_shard, local, sum_over_ranks

# (a, b, c): the polynomial a x + b x^3 + c x^5, applied five times, maps [0.002, 1] into [0.68, 1.21].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ROW_BETA = 0.95  # Li et al. 2025
TINY = 1e-20  # minimum of means and sums of squares, against division by zero


class Muon(Optimizer):
    """w <- (1 - lr * decay) * w - lr * 0.2 * sqrt(max(rows, columns)) * orthogonalise(u), with Nesterov momentum u
    (Jordan et al. 2024).

    The factor 0.2 * sqrt(max(rows, columns)) gives updates the RMS of AdamW's, so that both optimizers can use the same
    learning rate (Liu et al. 2025). `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` computes the same, one
    matrix at a time; here, matrices of the same shape are batched (decision 011).

    matrices: weights, each (R, C). If they are sharded among ranks, so is the momentum, and each matrix is gathered on
        one rank to be orthogonalised.
    momentum: decay rate of the gradient average, from 0 up to but not including 1
    precision: dtype of the Newton-Schulz iteration; `torch.optim.Muon` uses bf16
    """

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float, precision: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._precision = precision

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch.optim.Optimizer takes a closure
        """Update the matrices that have a gradient. `closure` is not supported."""
        for group in self.param_groups:
            matrices = [matrix for matrix in group["params"] if matrix.grad is not None]
            if not matrices:
                continue
            directions = []
            for matrix in matrices:
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state.update(self.first_state(matrix))
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                directions.append(matrix.grad.lerp(momentum, group["momentum"]).to(self._precision))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
            compute = functools.partial(orthogonalise, precision=self._precision)
            updates = apply_to_full_matrices(compute, directions)
            self._apply(matrices, updates, group)

    def first_state(self, matrix: Tensor) -> dict[str, Tensor]:
        """The state of a matrix before its first update."""
        return {"momentum_buffer": torch.zeros_like(matrix)}

    def _apply(self, matrices: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Subtract the orthogonalised updates, scaled, from the matrices of a parameter group."""
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


class NorMuon(Muon):
    """Muon with updates that are divided, row by row, by a running average of the row's size (Li et al. 2025).

    For a matrix (R, C) with the orthogonalised direction o: v <- 0.95 v + 0.05 * (mean of o^2 in each row), and
    w <- (1 - lr * decay) * w - lr * 0.2 * sqrt(R * C) * o' / |o'|, where o' is o with its rows divided by sqrt(v), and
    |o'| is its Frobenius norm. Rows whose gradient has always been zero are only decayed.
    """

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float, precision: torch.dtype
    ) -> None:
        super().__init__(matrices, lr, weight_decay, momentum, precision)
        for group in self.param_groups:
            group["row_beta"] = ROW_BETA

    def first_state(self, matrix: Tensor) -> dict[str, Tensor]:
        rows = torch.zeros_like(local(matrix)[:, 0], memory_format=torch.contiguous_format)
        return {**super().first_state(matrix), "row_moment": as_shard(rows, matrix)}

    def _apply(self, matrices: Sequence[Tensor], updates: Sequence[Tensor], group: dict[str, Any]) -> None:
        factors, sums = [], []
        for matrix, update in zip(matrices, updates, strict=True):
            moment = local(self.state[matrix]["row_moment"])  # (R,), rows of this rank
            squares = torch.linalg.vector_norm(local(update), dim=1, dtype=moment.dtype).square_()  # (R,)
            moment.lerp_(squares / matrix.shape[1], 1 - group["row_beta"])
            factors.append(moment.clamp(min=TINY).rsqrt_())  # (R,)
            sums.append(squares @ factors[-1].square())
        norms = sum_over_ranks(torch.stack(sums), matrices[0]).clamp_(min=TINY).sqrt_()
        for matrix, update, factor, norm in zip(matrices, updates, factors, norms, strict=True):
            scale = factor * (0.2 * matrix.numel() ** 0.5 / norm)  # (R,)
            local(matrix).addcmul_(local(update), scale[:, None], value=-group["lr"])


def orthogonalise(matrices: Sequence[Tensor], precision: torch.dtype) -> list[Tensor]:
    """The matrices, each (R, C), with their singular values replaced by values between about 0.7 and 1.2.

    Singular values below 0.002 times the Frobenius norm are raised less; zeros stay zero.
    """
    # Transposed if R > C, so that the square matrices of the iteration have the smaller of the two sizes.
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
