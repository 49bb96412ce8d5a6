"""A mixture of experts for a feed-forward layer: a router sends each token to a few of them (seed 002)."""

import typing
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tinylm.model.feedforward import FeedForward, GatedFeedForward, Projection
from tinylm.model.routing import Routing

Expert = FeedForward | GatedFeedForward


class RoutedExperts(nn.Module):
    """sum over the K likeliest experts of p_e expert_e(x), where p = softmax(x R^T), renormalised among the K.

    A single expert keeps its p_e, through which alone the router learns (Fedus et al. 2021).
    The work grows with K, not with the number of experts. `balance` is the weight of the load-balancing loss.
    """

    def __init__(self, width: int, experts: Sequence[Expert], per_token: int, balance: float) -> None:
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.per_token = per_token
        self.balance = balance

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """(B, T, D) -> (B, T, D); what the router did is told in training alone."""
        probabilities = self.router(x).softmax(dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))  # (B, T, E)
        weights, chosen = probabilities.topk(self.per_token, dim=-1)  # (B, T, K)
        if self.per_token > 1:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        mixture = _Mixture(weights.flatten(0, 1), chosen.flatten(0, 1), len(self.experts), skip_idle=not self.training)
        y = self._combine(x.flatten(0, 1), mixture).view_as(x)  # (B, T, D)
        return y, Routing(probabilities, chosen, self.balance) if self.training else None

    def _combine(self, x: Tensor, mixture: "_Mixture") -> Tensor:
        """(N, D) -> (N, D)"""
        return mixture.gather(self._compose(mixture.spread(x), lambda name, rows: self._project(name, rows, mixture)))

    def _project(self, name: str, rows: Tensor, mixture: "_Mixture") -> Tensor:
        """(N*K, D) -> (N*K, F), with each row's own expert."""
        return mixture.each([expert.get_submodule(name) for expert in self.experts], rows)

    def _compose(self, x: Tensor, project: Projection) -> Tensor:
        """The formula that all experts have."""
        return typing.cast(Expert, self.experts[0]).compose(x, project)


class MergedExperts(RoutedExperts):
    """One expert a token, whose matrices are the mean of the K likeliest experts' own, weighted by the router.

    The mean is taken of the products, which is the same before the nonlinearity, so that a token costs no more than
    where the experts' outputs are mixed. Each token has its own: a mean over the sequence would see the future.
    """

    def _combine(self, x: Tensor, mixture: "_Mixture") -> Tensor:
        return self._compose(x, lambda name, rows: mixture.gather(self._project(name, mixture.spread(rows), mixture)))


class _Mixture:
    """sum_e p_e f_e(x) for rows (N, ...) by what each row's K experts and their weights are, both (N, K).

    The rows are put in the order of their experts, so that every expert works once, on rows that lie together.
    """

    def __init__(self, weights: Tensor, chosen: Tensor, n_experts: int, skip_idle: bool) -> None:
        order = chosen.flatten().argsort(stable=True)  # (N*K,)
        self._rows = order // chosen.shape[1]
        self._weights = weights.flatten().index_select(0, order).unsqueeze(1)  # (N*K, 1)
        self._counts: list[int] = torch.bincount(chosen.flatten(), minlength=n_experts).tolist()
        self._count = len(chosen)
        self._skip_idle = skip_idle

    def spread(self, x: Tensor) -> Tensor:
        """Each row once for each of its experts, in their order: (N, D) -> (N*K, D)."""
        return x.index_select(0, self._rows)

    def each(self, modules: Sequence[nn.Module], rows: Tensor) -> Tensor:
        """Every expert's module on the rows that are for it: (N*K, D) -> (N*K, F)."""
        parts = zip(modules, rows.split(self._counts), strict=True)
        return torch.cat([module(part) for module, part in parts if len(part) or not self._skip_idle])

    def gather(self, rows: Tensor) -> Tensor:
        """The weighted sum of what the experts of each row made of it: (N*K, F) -> (N, F)."""
        sums = rows.new_zeros(self._count, rows.shape[1])
        return sums.index_add(0, self._rows, rows * self._weights.to(rows.dtype))
