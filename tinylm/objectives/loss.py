"""Objectives: functions that map a model and a batch to a Loss.

A Loss is a sum over targets, not a mean. The trainer divides the loss of each micro-batch by the number of targets of
the whole batch, and the auxiliary loss by the number of sequences of the whole batch, so that accumulation does not
change the gradient. For label smoothing, see `CrossEntropy`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tinylm.text.batches import Batch
from tinylm.transformer.architectures import Output
from tinylm.transformer.layers import IGNORED, CrossEntropy, cross_entropy, log_softmax

MAX_LOGITS = 1 << 25
# With a frozen output layer. Chunks below 32 MB are faster: the allocator reuses their memory, while the system clears
# larger blocks at each allocation. With a trained one, small chunks are slower: each adds to the gradient of the whole
# weight matrix.
MAX_FROZEN_LOGITS = 6 << 20
# On a GPU, fewer chunks are faster (decision 041): one takes about a ninth of the memory of a large GPU.
MIN_CUDA_LOGITS = 1 << 27
MAX_CUDA_LOGITS = 1 << 30
CUDA_BYTES_PER_LOGIT = 128


class Loss(NamedTuple):
    """The loss of one batch.

    total: () in nats, summed over the targets: of most objectives, the cross-entropy of the scored tokens.
    n_targets: number of targets.
    aux: () auxiliary loss (load balancing, multi-token prediction), summed over sequences.
    metrics: to log, averaged over targets: `router_entropy` () in nats and `expert_shares` (L, E) of a mixture of
        experts in training, and those of the objective.
    """

    total: Tensor
    n_targets: int
    aux: Tensor
    metrics: dict[str, Tensor] = {}  # noqa: RUF012, never modified


class LanguageModel(Protocol):
    """The part of a model that objectives use."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""

    @property
    def cross_entropy(self) -> CrossEntropy:
        """The loss of logits."""

    @property
    def output_parameters(self) -> Sequence[Tensor]:
        """The trained parameters that `logits` depends on."""

    def __call__(self, *inputs: Tensor | None, lengths: Tensor | None = None) -> Output: ...

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""


def max_logits(device: str, frozen: bool, memory: int | None = None) -> int:
    """The number of logits above which training computes them in chunks (decisions 030, 041).

    frozen: whether the output layer is not trained. memory: bytes of the GPU, by default of this one
    """
    if device == "cuda":
        if memory is None:
            memory = torch.cuda.get_device_properties().total_memory if torch.cuda.is_available() else 0
        return min(MAX_CUDA_LOGITS, max(MIN_CUDA_LOGITS, memory // CUDA_BYTES_PER_LOGIT))
    return MAX_FROZEN_LOGITS if frozen else MAX_LOGITS


class Objective(Protocol):
    """A function that computes the loss of a batch."""

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss: ...


def next_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | tokens before it in the same text) over the scored targets."""
    return scored_loss(model, decoder_output(model, batch), batch, smoothing)


def next_two_tokens(model: LanguageModel, batch: Batch, smoothing: float, second_weight: float) -> Loss:
    """`next_token` of rows of whole text, with multi-token prediction as auxiliary loss.

    The logits at a position also predict the token after the next, so no weights are added. The auxiliary loss of a row
    (T,) is -second_weight / T * sum_t log p(target t + 1 | tokens up to t), over all but the last position.
    """
    assert batch.mask is None and batch.segments is None  # whole windows of text
    output = decoder_output(model, batch)
    total, second = _cross_entropies(model, output.hidden.flatten(0, 1), _first_two(batch), smoothing)
    weight = second_weight / batch.targets.shape[1]
    return Loss(total, batch.n_targets, output.aux + weight * second, routing_metrics(output))


def soft_next_token(model: LanguageModel, batch: Batch, weight: float, second_weight: float) -> Loss:
    """-sum_t sum_v r_t(v) log p(v | tokens before t), where r_t(v) is `weight` times the soft targets of position t,
    and the rest of the probability, also that of ids without a soft target, is on the token of the text.

    second_weight: of multi-token prediction on the tokens of the text, as in `next_two_tokens`
    """
    assert batch.soft_ids is not None and batch.soft is not None and batch.mask is None
    output, targets = decoder_output(model, batch), _first_two(batch)  # (2, B*T)
    ids, soft = batch.soft_ids.flatten(0, 1), weight * batch.soft.flatten(0, 1)  # (B*T, K)

    def losses(hidden: Tensor, rows: Tensor) -> list[Tensor]:
        """hidden: (N, D). rows: (1 or 2, N), their numbers in the batch."""
        log_p, chosen = log_softmax(model.logits(hidden)), rows[0]  # (N, V)
        taught, rest = soft[chosen], 1 - soft[chosen].sum(dim=1)  # (N, K), (N,)
        of_text = log_p.gather(1, targets[0, chosen, None]).squeeze(1)  # (N,)
        first = -(taught * log_p.gather(1, ids[chosen])).sum() - (rest * of_text).sum()
        return [first] if len(rows) == 1 else [first, cross_entropy(log_p, targets[1, chosen], 0.0)]

    rows = torch.arange(len(ids), device=ids.device).expand(2 if second_weight else 1, -1)
    total, *second = in_chunks(model, losses, output.hidden.flatten(0, 1), rows)
    aux = output.aux + second_weight / batch.targets.shape[1] * second[0] if second else output.aux
    return Loss(total, batch.n_targets, aux, routing_metrics(output))


def _first_two(batch: Batch) -> Tensor:
    """The targets of each position and those after them, IGNORED behind the last: (2, B*T)."""
    after_next = F.pad(batch.targets[:, 1:], (0, 1), value=IGNORED)  # (B, T)
    return torch.stack([batch.targets.flatten(), after_next.flatten()])


def next_token_losses(model: LanguageModel, batch: Batch) -> Tensor:
    """The terms of `next_token`: -log p of each scored target in nats, (N,), row by row."""
    return target_losses(model, decoder_output(model, batch), batch)


def target_losses(model: LanguageModel, output: Output, batch: Batch) -> Tensor:
    """-log p of each scored target in nats, (N,), row by row.

    The logits of long batches are computed in chunks; for a gradient, the backward pass computes them again.
    """
    hidden, targets = _scored(output, batch)
    rows = max(1, MAX_LOGITS // model.vocab_size)

    def losses(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(log_softmax(model.logits(hidden)), targets, reduction="none")

    if len(targets) <= rows:
        return losses(hidden, targets)
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([losses(*chunk) for chunk in chunks])
    return torch.cat([checkpoint(losses, *chunk, use_reentrant=False) for chunk in chunks])


def decoder_output(model: LanguageModel, batch: Batch) -> Output:
    """The output of a decoder for a batch of any layout."""
    has_layout = batch.segments is not None or batch.lengths is not None
    return model(batch.ids, None, batch.segments, batch.lengths) if has_layout else model(batch.ids)


def scored_loss(model: LanguageModel, output: Output, batch: Batch, smoothing: float) -> Loss:
    """-sum log p(target) over the scored targets, by the output of the model at their positions."""
    hidden, targets = _scored(output, batch)
    (total,) = _cross_entropies(model, hidden, targets[None], smoothing)
    return Loss(total, batch.n_targets, output.aux, routing_metrics(output))


def _scored(output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
    """The hidden vectors and the targets that count in the loss: (N, D) and (N,)."""
    hidden, targets = output.hidden.flatten(0, 1), batch.targets.flatten()  # (B*T, D), (B*T,)
    if batch.mask is None:
        return hidden, targets
    scored = batch.mask.flatten()  # (B*T,)
    return hidden[scored], targets[scored]  # (N, D), (N,)


def routing_metrics(output: Output) -> dict[str, Tensor]:
    """The metrics of the experts of a model, for `Loss.metrics`."""
    if output.routing is None:
        return {}
    return {"router_entropy": output.routing.entropy, "expert_shares": output.routing.shares}


def _cross_entropies(model: LanguageModel, hidden: Tensor, targets: Tensor, smoothing: float) -> Sequence[Tensor]:
    """Summed cross-entropies of the same logits with each row of targets: (N, D) and (K, N) -> K of ().

    smoothing: of the first row. Targets of the other rows do not count where they are IGNORED.
    """
    # Several losses are not compiled: in chunks, each needs a backward pass, and compiled code may allow only one.
    compute = model.cross_entropy if len(targets) == 1 else model.cross_entropy.forward

    def losses(hidden: Tensor, targets: Tensor) -> list[Tensor]:
        return compute(model.logits(hidden), targets, smoothing)

    return in_chunks(model, losses, hidden, targets)


def in_chunks(
    model: LanguageModel, losses: Callable[[Tensor, Tensor], list[Tensor]], hidden: Tensor, targets: Tensor
) -> Sequence[Tensor]:
    """`losses(hidden, targets)`, K sums over N targets, computed in chunks of them to bound the memory of the logits.

    hidden, targets: (N, D) and (K, N)
    """
    parameters = model.output_parameters
    limit = max(1, max_logits(hidden.device.type, frozen=not parameters) // model.vocab_size)
    if len(hidden) <= limit:
        return losses(hidden, targets)
    chunks = math.ceil(len(hidden) / limit)
    # Equal chunks if possible, since a compiled loss is faster for a constant size.
    chunks = next((number for number in range(chunks, 2 * chunks) if len(hidden) % number == 0), chunks)
    rows = math.ceil(len(hidden) / chunks)
    if torch.is_grad_enabled():
        return _ChunkedLosses.apply(losses, rows, targets, hidden, *parameters)
    parts = zip(hidden.split(rows), targets.split(rows, dim=1), strict=True)
    return [torch.stack(sums).sum() for sums in zip(*(losses(*part) for part in parts), strict=True)]


class _ChunkedLosses(torch.autograd.Function):
    """The sums of the K `losses(hidden, targets)` over chunks of the N vectors.

    The forward pass computes the gradients of each chunk after its losses, so that its logits are neither kept nor
    recomputed.

    rows: per chunk. targets, hidden: (K, N) and (N, D). parameters: the trained ones that the losses depend on.
    """

    @staticmethod
    def forward(
        ctx: Any,
        losses: Callable[[Tensor, Tensor], list[Tensor]],
        rows: int,
        targets: Tensor,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        sums = []
        of_hidden = [torch.empty_like(hidden) for _ in targets]  # K of (N, D)
        of_parameters: list[list[Tensor]] = [[] for _ in targets]
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                leaf = hidden[part].detach().requires_grad_()
                chunk_losses = losses(leaf, targets[:, part])
            for k, loss in enumerate(chunk_losses):
                is_last = k == len(chunk_losses) - 1
                of_hidden[k][part], *found = torch.autograd.grad(loss, (leaf, *parameters), retain_graph=not is_last)
                if not of_parameters[k]:
                    of_parameters[k] = found
                else:
                    for total, addend in zip(of_parameters[k], found, strict=True):
                        total.add_(addend)
            sums.append(torch.stack(chunk_losses).detach())  # (K,)
        ctx.save_for_backward(*of_hidden, *itertools.chain.from_iterable(of_parameters))
        return torch.stack(sums).sum(dim=0).unbind()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_parameters = ctx.saved_tensors[: len(g)], ctx.saved_tensors[len(g) :]
        n_parameters = len(of_parameters) // len(g)
        by_input = [of_hidden, *(of_parameters[number::n_parameters] for number in range(n_parameters))]
        return None, None, None, *(_weighted_sum(of_losses, g) for of_losses in by_input)


def _weighted_sum(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """sum_k weights[k] * gradients[k].

    In place, because the gradient of an output layer is large. A second backward pass raises RuntimeError.
    """
    total = gradients[0].mul_(weights[0])
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.addcmul_(gradient, weight)
    return total
