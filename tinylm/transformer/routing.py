"""Routing statistics of mixture-of-experts layers: the load-balancing loss, router entropy and expert shares."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
