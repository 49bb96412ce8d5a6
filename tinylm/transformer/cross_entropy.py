"""Cross-entropy of logits, as a module so that it can be compiled like a layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # in place of a target that does not count


class CrossEntropy(nn.Module):
    """Summed cross-entropies of the same logits with each row of targets.

    With label smoothing s, the target distribution is (1 - s) on the target plus s / V on each of the V ids, so that
    -log p(target) becomes -(1 - s) log p(target) - s / V sum_v log p(v) (Szegedy et al. 2016). Only the first row is
    smoothed; in the others, targets that are IGNORED do not count.
    """

    def forward(self, logits: Tensor, targets: Tensor, smoothing: float) -> list[Tensor]:
        """The sums in nats: (N, V) and (K, N) -> K of ()."""
        log_p = log_softmax(logits)  # (N, V)
        return [cross_entropy(log_p, row, smoothing if k == 0 else 0.0) for k, row in enumerate(targets.unbind())]


def log_softmax(logits: Tensor) -> Tensor:
    """The logarithm of the softmax in at least fp32: (..., V) -> (..., V)."""
    return F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def cross_entropy(log_p: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The sum over the targets that are not IGNORED: (N, V) and (N,) -> (). With smoothing, none may be IGNORED."""
    loss = F.nll_loss(log_p, targets, ignore_index=IGNORED, reduction="sum")
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * log_p.mean(dim=-1).sum()
