"""What the routers of a mixture of experts did with a batch: its load-balancing loss, and what is told of it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """One layer's choices. probabilities: (B, T, E). chosen: (B, T, K), the experts that each token went to.

    balance: the weight of the load-balancing loss.
    """

    probabilities: Tensor
    chosen: Tensor
    balance: float


class RoutingSummary(NamedTuple):
    """The choices for B sequences, of one layer or of several.

    balance: (), the weighted load-balancing loss, summed over layers and sequences. entropy: (), of the routers'
    choices, in nats, the mean over layers. shares: (L, E), the part of a layer's assignments that went to each of its
    experts. Entropy and shares are means over sequences of the mean over a sequence's tokens.
    """

    balance: Tensor
    entropy: Tensor
    shares: Tensor


def summarise(layer: Routing, real: Tensor | None = None) -> RoutingSummary:
    """real: (B, T), which tokens are no padding, `None` for all.

    A sequence's loss is E sum_e f_e P_e, where f_e is the part of its assignments that went to expert e, and P_e the
    mean probability of e (Fedus et al. 2021).
    """
    p = layer.probabilities
    counted = p.new_ones(p.shape[:2]) if real is None else real.to(p.dtype)
    part = (counted / counted.sum(dim=1, keepdim=True)).unsqueeze(2)  # (B, T, 1)
    assigned = torch.zeros_like(p).scatter(2, layer.chosen, 1 / layer.chosen.shape[2])  # (B, T, E)
    shares = (assigned * part).sum(dim=1)  # (B, E)
    balance = p.shape[2] * (shares * (p * part).sum(dim=1)).sum()
    entropy = -(torch.special.xlogy(p, p) * part).sum(dim=(1, 2)).mean()
    return RoutingSummary(layer.balance * balance, entropy.detach(), shares.mean(dim=0, keepdim=True))


def together(summaries: Sequence[RoutingSummary]) -> RoutingSummary:
    """Of several layers, or of both sides of an encoder-decoder."""
    balance, entropies, shares = zip(*summaries, strict=True)
    layers = torch.cat(shares)  # (L, E)
    entropy = sum(entropy * len(own) for entropy, own in zip(entropies, shares, strict=True)) / len(layers)
    return RoutingSummary(torch.stack(balance).sum(), torch.as_tensor(entropy), layers)
