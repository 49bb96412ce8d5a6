"""Transformer blocks: attention and feed-forward, each with a residual connection and a norm (Vaswani et al. 2017).

The position-wise feed-forward layer is dense or a mixture of experts. Shape letters: see `tinylm.transformer`.
"""

import typing
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.transformer.attention import AttentionCache, CrossCache
from tinylm.transformer.layers import Dropout, Linear, as_product_input
from tinylm.transformer.position import Rotation


class Routing(NamedTuple):
    """Routing of one layer.

    probabilities: (B, T, E), the router's softmax over the experts.
    chosen: (B, T, K), indices of the experts of each token.
    balance_weight: weight of the load-balancing loss.
    """

    probabilities: Tensor
    chosen: Tensor
    balance_weight: float


class RoutingSummary(NamedTuple):
    """Routing statistics of a batch of B sequences, over L layers.

    balance_loss: (), weighted load-balancing loss, summed over layers and sequences.
    entropy: (), entropy of the router probabilities in nats, averaged over layers.
    shares: (L, E), fraction of each layer's assignments that each expert received.
    Entropy and shares are averaged over the tokens of each sequence, then over sequences.
    """

    balance_loss: Tensor
    entropy: Tensor
    shares: Tensor


def summarise_routing(layer: Routing, valid: Tensor | None) -> RoutingSummary:
    """Statistics of one layer.

    valid: (B, T), False for padding, with at least one True per row; `None` without padding.

    The loss of a sequence is balance_weight E sum_e f_e P_e, where f_e is the fraction of the sequence's assignments
    that expert e received, and P_e the mean probability of e (Fedus et al. 2021).
    """
    p = layer.probabilities
    counted = p.new_ones(p.shape[:2]) if valid is None else valid.to(p.dtype)  # (B, T)
    token_weights = (counted / counted.sum(dim=1, keepdim=True)).unsqueeze(2)  # (B, T, 1)
    assigned = torch.zeros_like(p).scatter(2, layer.chosen, 1 / layer.chosen.shape[2])  # (B, T, E)
    shares = (assigned * token_weights).sum(dim=1)  # (B, E)
    balance_loss = p.shape[2] * (shares * (p * token_weights).sum(dim=1)).sum()
    entropy = -(torch.special.xlogy(p, p) * token_weights).sum(dim=(1, 2)).mean()
    return RoutingSummary(layer.balance_weight * balance_loss, entropy.detach(), shares.mean(dim=0, keepdim=True))


def merge_summaries(summaries: Sequence[RoutingSummary]) -> RoutingSummary:
    """Combine the statistics of several layers, or of an encoder and a decoder."""
    balance_losses, entropies, shares = zip(*summaries, strict=True)
    layers = torch.cat(shares)  # (L, E)
    entropy = sum(entropy * len(layer) for entropy, layer in zip(entropies, shares, strict=True)) / len(layers)
    return RoutingSummary(torch.stack(balance_losses).sum(), torch.as_tensor(entropy), layers)


Projection = Callable[[str, Tensor], Tensor]


class _FeedForward(nn.Module):
    """Base class of dense feed-forward layers. input_projections: names of the linear layers applied to the input."""

    input_projections: tuple[str, ...]
    up_proj: nn.Linear

    def __init__(
        self,
        width: int,
        ffn_width: int,
        bias: bool,
        activation: Callable[[Tensor], Tensor],
        linear: type[nn.Linear] = Linear,
    ) -> None:
        super().__init__()
        for name in self.input_projections:
            setattr(self, name, linear(width, ffn_width, bias))
        self.down_proj = linear(ffn_width, width, bias)
        self.activation = activation

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """(..., D) -> (..., D), and `None`: a dense layer has no routing."""
        return self.compose(as_product_input(x), lambda name, y: self.get_submodule(name)(y)), None

    @abstractmethod
    def compose(self, x: Tensor, project: Projection) -> Tensor:
        """The layer's formula (..., D) -> (..., D), in which `project(name, x)` applies the projection of that name.

        A mixture of experts passes a `project` that applies the projections of each row's experts.
        """


class FeedForward(_FeedForward):
    """activation(x W1 + b1) W2 + b2, where both biases are optional (Vaswani et al. 2017)."""

    input_projections = ("up_proj",)

    def compose(self, x: Tensor, project: Projection) -> Tensor:
        return project("down_proj", self.activation(project("up_proj", x)))


class GatedFeedForward(_FeedForward):
    """(activation(x Wg) * x W1) W2, with an optional bias after each product (Shazeer 2020)."""

    input_projections = ("gate_proj", "up_proj")
    gate_proj: nn.Linear

    def compose(self, x: Tensor, project: Projection) -> Tensor:
        return project("down_proj", self.activation(project("gate_proj", x)) * project("up_proj", x))


def gelu(x: Tensor) -> Tensor:
    """GELU with the tanh approximation, as in GPT-2 (Hendrycks and Gimpel 2016): (...) -> (...)."""
    return F.gelu(x, approximate="tanh")


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


class Memory(NamedTuple):
    """Encoder output for cross-attention. hidden: (B, S, D). mask: (B, 1, 1, S), False for padding, or `None`."""

    hidden: Tensor
    mask: Tensor | None


class PreNormBlock(nn.Module):
    """x + sublayer(norm(x)) for each sublayer: self-attention, optionally cross-attention, feed-forward.

    Each sublayer's norm is named after it: `attention_norm` for `attention`.
    """

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        make_norm: Callable[[], nn.Module],
        dropout: float,
        cross_attention: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm()
        self.attention = attention
        self.cross_attention_norm = make_norm() if cross_attention is not None else None
        self.cross_attention = cross_attention
        self.feedforward_norm = make_norm()
        self.feedforward = feedforward
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        cache: AttentionCache | None,
        memory: Memory | None = None,
        cross_cache: CrossCache | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """(B, T, D) -> (B, T, D), and the routing of a mixture of experts in training, else `None`."""
        y = self.attention(self._sublayer_input(x, "attention"), rotation, mask, cache)
        x = self._add(x, y, "attention")
        if self.cross_attention is not None:
            assert memory is not None
            y = self.cross_attention(self._sublayer_input(x, "cross_attention"), *memory, cross_cache)
            x = self._add(x, y, "cross_attention")
        y, routing = self.feedforward(self._sublayer_input(x, "feedforward"))
        return self._add(x, y, "feedforward"), routing

    def _sublayer_input(self, x: Tensor, sublayer: str) -> Tensor:
        return self._norm(sublayer, x)

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        """Add the sublayer output y to the residual stream x: (B, T, D) -> (B, T, D)."""
        return x + self.dropout(y)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return getattr(self, f"{name}_norm")(x)


class PostNormBlock(PreNormBlock):
    """norm(x + sublayer(x)) for each sublayer, as in the original transformer (Vaswani et al. 2017)."""

    def _sublayer_input(self, x: Tensor, sublayer: str) -> Tensor:
        return x

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return self._norm(sublayer, x + self.dropout(y))


class SandwichNormBlock(PreNormBlock):
    """x + post_norm(sublayer(norm(x))) for each sublayer (Ding et al. 2021; Gemma 3)."""

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        make_norm: Callable[[], nn.Module],
        dropout: float,
        cross_attention: nn.Module | None = None,
    ) -> None:
        super().__init__(attention, feedforward, make_norm, dropout, cross_attention)
        self.attention_post_norm = make_norm()
        self.cross_attention_post_norm = make_norm() if cross_attention is not None else None
        self.feedforward_post_norm = make_norm()

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return x + self.dropout(self._norm(f"{sublayer}_post", y))


class ParallelBlock(PreNormBlock):
    """x + attention(attention_norm(x)) + feedforward(feedforward_norm(x)) (GPT-NeoX, Black et al. 2022).

    Cross-attention is not supported.
    """

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None,
        mask: Tensor | None,
        cache: AttentionCache | None,
        memory: Memory | None = None,
        cross_cache: CrossCache | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """(B, T, D) -> (B, T, D), and the routing of a mixture of experts in training, else `None`."""
        attended = self.attention(self.attention_norm(x), rotation, mask, cache)
        y, routing = self.feedforward(self.feedforward_norm(x))
        return x + self.dropout(attended) + self.dropout(y), routing


class PreNormBlockWithoutResidual(PreNormBlock):
    """sublayer(norm(x)) for each sublayer: an ablation without residual connections."""

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return self.dropout(y)


class PostNormBlockWithoutResidual(PostNormBlock):
    """norm(sublayer(x)) for each sublayer: an ablation without residual connections."""

    def _add(self, x: Tensor, y: Tensor, sublayer: str) -> Tensor:
        return self._norm(sublayer, self.dropout(y))
