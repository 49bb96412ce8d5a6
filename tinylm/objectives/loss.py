"""Objectives: functions that map a model and a batch to a Loss.

A Loss is a sum over targets, not a mean. The trainer divides the loss of each micro-batch by the number of targets of
the whole batch, and the auxiliary loss by its sequences, so that accumulation does not change the gradient.

With label smoothing s, the target distribution is (1 - s) on the target plus s / V on each of the V ids: -log p(target)
becomes -(1 - s) log p(target) - s / V sum_v log p(v) (Szegedy et al. 2016).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tinylm.model.stack import Output
from tinylm.text.batches import Batch

MAX_LOGITS = 1 << 25  # above this number, logits are computed in chunks, and recomputed in the backward pass
# The same for an output layer that is not trained, whose logits are not recomputed. Memory blocks of up to 32 MB are
# reused by the allocator, and larger ones are cleared by the system each time.
MAX_FROZEN_LOGITS = 6 << 20


class Loss(NamedTuple):
    """The loss of one batch.

    total: () cross-entropy in nats, summed over the scored targets.
    n_tokens: number of scored targets.
    aux: () auxiliary loss (load balancing), summed over sequences.
    metrics: to log, averaged over sequences: `router_entropy` () and `expert_shares` (L, E) of a mixture of experts.
    """

    total: Tensor
    n_tokens: int
    aux: Tensor
    metrics: dict[str, Tensor] = {}  # noqa: RUF012, never modified


class LanguageModel(Protocol):
    """The part of a model that objectives use."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        ...

    @property
    def trains_output(self) -> bool:
        """Whether `logits` depends on a parameter that is trained."""
        ...

    def __call__(self, *inputs: Tensor | None) -> Output: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        ...


class Objective(Protocol):
    """A function that computes the loss of a batch."""

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss: ...


def next_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | tokens before it in the same text) (notes 002, 004)."""
    ragged = batch.segments is not None or batch.lengths is not None
    output = model(batch.ids, None, batch.segments, batch.lengths) if ragged else model(batch.ids)
    return _loss(model, output, batch, smoothing)


def masked_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum over the masked positions of log p(token | corrupted window) (note 004; Devlin et al. 2019)."""
    return _loss(model, model(batch.ids), batch, smoothing)


def sequence_to_sequence(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | source, targets before it), with teacher forcing (note 004)."""
    return _loss(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch, smoothing)


def _loss(model: LanguageModel, output: Output, batch: Batch, smoothing: float) -> Loss:
    hidden, targets = output.hidden.flatten(0, 1), batch.targets.flatten()  # (B*T, D), (B*T,)
    if batch.mask is not None:
        scored = batch.mask.flatten()  # (B*T,)
        hidden, targets = hidden[scored], targets[scored]  # (N, D), (N,)
    total = _cross_entropy(model, hidden, targets, smoothing)
    return Loss(total, batch.n_targets, output.aux, _routing_metrics(output))


def _routing_metrics(output: Output) -> dict[str, Tensor]:
    if output.routing is None:
        return {}
    return {"router_entropy": output.routing.entropy, "expert_shares": output.routing.shares}


def _cross_entropy(model: LanguageModel, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Summed cross-entropy: (N, D) and (N,) -> (). Computed in chunks of rows, to bound the memory of the logits."""

    def chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.logits(hidden)  # (N, V)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)

    rows = max(1, (MAX_LOGITS if model.trains_output else MAX_FROZEN_LOGITS) // model.vocab_size)
    if len(hidden) <= rows:
        return chunk_loss(hidden, targets)
    if not model.trains_output and torch.is_grad_enabled():
        return _FrozenOutputLoss.apply(hidden, targets, chunk_loss, rows)
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.stack([checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]).sum()


class _FrozenOutputLoss(torch.autograd.Function):
    """The sum of `loss(hidden, targets)` over chunks of rows, for a loss without trainable parameters.

    The gradient of each chunk is computed together with its loss, so that its logits are neither kept nor recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor], rows: int
    ) -> Tensor:
        gradient = torch.empty_like(hidden)  # (N, D)
        losses = []
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                losses.append(loss(leaf, targets[part]))
            (gradient[part],) = torch.autograd.grad(losses[-1], leaf)
            losses[-1] = losses[-1].detach()
        ctx.save_for_backward(gradient)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * g.to(gradient.dtype), None, None, None
