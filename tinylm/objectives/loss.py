"""Objectives: functions that map a model and a batch to a Loss.

A Loss is a sum over targets, not a mean. The trainer divides the loss of each micro-batch by the number of targets of
the whole batch, and the auxiliary loss by the number of sequences of the whole batch, so that accumulation does not
change the gradient.

With label smoothing s, the target distribution is (1 - s) on the target plus s / V on each of the V ids: -log p(target)
becomes -(1 - s) log p(target) - s / V sum_v log p(v) (Szegedy et al. 2016).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinylm.model.stack import Output
from tinylm.text.batches import Batch

MAX_LOGITS = 1 << 25  # above this number, logits are computed in chunks (decision 030)
# The limit for a frozen output layer. Chunks below 32 MB are faster: the allocator reuses their memory, while the
# system clears larger blocks at each allocation. With a trained output layer, small chunks are slower: each chunk adds
# to the gradient of the whole weight matrix.
MAX_FROZEN_LOGITS = 6 << 20


class Loss(NamedTuple):
    """The loss of one batch.

    total: () cross-entropy in nats, summed over the scored targets.
    n_tokens: number of scored targets.
    aux: () auxiliary loss (load balancing, multi-token prediction), summed over sequences.
    metrics: to log, averaged over sequences: `router_entropy` () in nats and `expert_shares` (L, E) of a mixture of
        experts in training; otherwise empty.
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
    def output_parameters(self) -> Sequence[Tensor]:
        """The trained parameters that `logits` depends on."""
        ...

    def __call__(self, *inputs: Tensor | None) -> Output: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        ...


class Objective(Protocol):
    """A function that computes the loss of a batch."""

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss: ...


def next_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | tokens before it in the same text) over the scored targets (notes 002, 004)."""
    return _loss(model, _decoder_output(model, batch), batch, smoothing)


def next_two_tokens(model: LanguageModel, batch: Batch, smoothing: float, second_weight: float) -> Loss:
    """`next_token` of rows of whole text, with multi-token prediction as auxiliary loss.

    The logits at a position also predict the token after the next, so no weights are added. The auxiliary loss of a row
    (T,) is -second_weight / T * sum_t log p(target t + 1 | tokens up to t), over all but the last position.
    """
    output = _decoder_output(model, batch)
    loss = _loss(model, output, batch, smoothing)
    hidden, second = output.hidden[:, :-1].flatten(0, 1), batch.targets[:, 1:].flatten()  # (B*(T-1), D), (B*(T-1),)
    weight = second_weight / batch.targets.shape[1]
    return loss._replace(aux=loss.aux + weight * _cross_entropy(model, hidden, second, smoothing=0.0))


def next_token_losses(model: LanguageModel, batch: Batch) -> Tensor:
    """The terms of `next_token`: -log p of each scored target in nats, (N,), row by row."""
    return _losses(model, _decoder_output(model, batch), batch)


def sequence_to_sequence_losses(model: LanguageModel, batch: Batch) -> Tensor:
    """The terms of `sequence_to_sequence`: -log p of each scored target in nats, (N,), row by row."""
    return _losses(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch)


def _losses(model: LanguageModel, output: Output, batch: Batch) -> Tensor:
    hidden, targets = _scored(output, batch)
    rows = max(1, MAX_LOGITS // model.vocab_size)
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    return torch.cat([F.cross_entropy(_at_least_fp32(model.logits(h)), t, reduction="none") for h, t in chunks])


def _decoder_output(model: LanguageModel, batch: Batch) -> Output:
    has_layout = batch.segments is not None or batch.lengths is not None
    return model(batch.ids, None, batch.segments, batch.lengths) if has_layout else model(batch.ids)


def masked_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum over the masked positions of log p(token | corrupted window) (note 004; Devlin et al. 2019)."""
    return _loss(model, model(batch.ids), batch, smoothing)


def sequence_to_sequence(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | source, targets before it) over the scored targets, with teacher forcing (note 004)."""
    return _loss(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch, smoothing)


def _loss(model: LanguageModel, output: Output, batch: Batch, smoothing: float) -> Loss:
    total = _cross_entropy(model, *_scored(output, batch), smoothing)
    return Loss(total, batch.n_targets, output.aux, _routing_metrics(output))


def _scored(output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
    """The hidden vectors and the targets that count in the loss: (N, D) and (N,)."""
    hidden, targets = output.hidden.flatten(0, 1), batch.targets.flatten()  # (B*T, D), (B*T,)
    if batch.mask is None:
        return hidden, targets
    scored = batch.mask.flatten()  # (B*T,)
    return hidden[scored], targets[scored]  # (N, D), (N,)


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _routing_metrics(output: Output) -> dict[str, Tensor]:
    if output.routing is None:
        return {}
    return {"router_entropy": output.routing.entropy, "expert_shares": output.routing.shares}


def _cross_entropy(model: LanguageModel, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Summed cross-entropy: (N, D) and (N,) -> (). Computed in chunks of rows, to bound the memory of the logits."""

    def chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = _at_least_fp32(model.logits(hidden))  # (N, V)
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)

    parameters = model.output_parameters
    rows = max(1, (MAX_LOGITS if parameters else MAX_FROZEN_LOGITS) // model.vocab_size)
    if len(hidden) <= rows:
        return chunk_loss(hidden, targets)
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(chunk_loss, rows, targets, hidden, *parameters)
    return torch.stack(
        [chunk_loss(*chunk) for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)]
    ).sum()


class _ChunkedLoss(torch.autograd.Function):
    """The sum of `loss(hidden, targets)` over chunks of rows.

    The forward pass computes the gradient of each chunk after its loss, so that its logits are neither kept nor
    recomputed.

    rows: per chunk. targets, hidden: (N,) and (N, D). parameters: the trained parameters that the loss depends on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[[Tensor, Tensor], Tensor],
        rows: int,
        targets: Tensor,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        gradient = torch.empty_like(hidden)  # (N, D)
        parameter_gradients: list[Tensor] = []
        losses = []
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                chunk_loss = loss(leaf, targets[part])
            gradient[part], *found = torch.autograd.grad(chunk_loss, (leaf, *parameters))
            if not parameter_gradients:
                parameter_gradients = found
            else:
                for total, addend in zip(parameter_gradients, found, strict=True):
                    total.add_(addend)
            losses.append(chunk_loss.detach())
        ctx.save_for_backward(gradient, *parameter_gradients)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because the gradient of an output layer is large. A second backward pass raises RuntimeError.
        return None, None, None, *(gradient.mul_(g) for gradient in ctx.saved_tensors)
