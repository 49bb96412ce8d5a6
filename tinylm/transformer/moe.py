"""Mixture-of-experts feed-forward layers: a router selects a few experts per token (Shazeer et al. 2017)."""

import typing
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tinylm.transformer.feedforward import FeedForward, GatedFeedForward, Projection
from tinylm.transformer.routing import Routing

Expert = FeedForward | GatedFeedForward


class RoutedExperts(nn.Module):
    """Sum over the top K experts of p_e expert_e(x), where p = softmax(x R^T) and R is the router's weight.

    The cost grows with K, not with the number of experts.

    normalise: divide p by its sum over the top K. With K = 1, p would be the constant 1, and the router would get no
        gradient through the output (Fedus et al. 2021).
    balance_weight: weight of the load-balancing loss.
    """

    def __init__(
        self, width: int, experts: Sequence[Expert], per_token: int, normalise: bool, balance_weight: float
    ) -> None:
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.per_token = per_token
        self.normalise = normalise
        self.balance_weight = balance_weight

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """(B, T, D) -> (B, T, D), and the routing (`None` in evaluation)."""
        probabilities = self.router(x).softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))  # (B, T, E)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)  # (B, T, K)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        dispatch = _Dispatch(
            weights.flatten(0, 1), chosen.flatten(0, 1), len(self.experts), skip_unused=not self.training
        )
        y = self._combine(x.flatten(0, 1), dispatch).view_as(x)  # (B, T, D)
        return y, Routing(probabilities, chosen, self.balance_weight) if self.training else None

    def _combine(self, x: Tensor, dispatch: "_Dispatch") -> Tensor:
        """(N, D) -> (N, D), where N = B T."""
        return dispatch.gather(
            self._compose(dispatch.scatter(x), lambda name, rows: self._project(name, rows, dispatch))
        )

    def _project(self, name: str, rows: Tensor, dispatch: "_Dispatch") -> Tensor:
        """Apply the projection `name` of each row's expert: (N*K, in) -> (N*K, out)."""
        return dispatch.apply([expert.get_submodule(name) for expert in self.experts], rows)

    def _compose(self, x: Tensor, project: Projection) -> Tensor:
        """The feed-forward formula, which all experts share."""
        return typing.cast(Expert, self.experts[0]).compose(x, project)


class MergedExperts(RoutedExperts):
    """One expert per token, whose weights and biases are the router-weighted sums of those of the top K experts.

    Projections are linear, so each is computed as the weighted sum of the experts' projections of the token, at the
    cost of `RoutedExperts`. Router weights are computed per token, so that the layer is causal.
    """

    def _combine(self, x: Tensor, dispatch: "_Dispatch") -> Tensor:
        return self._compose(
            x, lambda name, rows: dispatch.gather(self._project(name, dispatch.scatter(rows), dispatch))
        )


class _Dispatch:
    """Computes sum_e p_e f_e(x) for N rows x, given the K chosen experts of each row and their weights p, both (N, K).

    Rows are sorted by expert, so that every expert runs once, on contiguous rows. skip_unused: do not run experts
    without rows (in training they run on empty inputs, so that each parameter has a gradient).
    """

    def __init__(self, weights: Tensor, chosen: Tensor, n_experts: int, skip_unused: bool) -> None:
        order = chosen.flatten().argsort(stable=True)  # (N*K,)
        self._rows = order // chosen.shape[1]  # (N*K,)
        self._weights = weights.flatten().index_select(0, order).unsqueeze(1)  # (N*K, 1)
        self._rows_per_expert: list[int] = torch.bincount(chosen.flatten(), minlength=n_experts).tolist()
        self._n_rows = len(chosen)
        self._skip_unused = skip_unused

    def scatter(self, x: Tensor) -> Tensor:
        """Copy each row once per chosen expert, sorted by expert: (N, in) -> (N*K, in)."""
        return x.index_select(0, self._rows)

    def apply(self, modules: Sequence[nn.Module], rows: Tensor) -> Tensor:
        """Apply modules[e] to the rows of each expert e: (N*K, in) -> (N*K, out)."""
        parts = zip(modules, rows.split(self._rows_per_expert), strict=True)
        outputs = [module(part) for module, part in parts if len(part) or not self._skip_unused]
        return torch.cat(outputs)  # (N*K, out)

    def gather(self, rows: Tensor) -> Tensor:
        """The weighted sum over each row's experts: (N*K, out) -> (N, out)."""
        sums = rows.new_zeros(self._n_rows, rows.shape[1])  # (N, out)
        return sums.index_add(0, self._rows, rows * self._weights.to(rows.dtype))
