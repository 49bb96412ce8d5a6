"""What a model is trained to do: an objective takes a model and a batch and returns a Loss.

Sums, not means: the trainer divides once, by all that a step scored, so that accumulation changes nothing. Smoothing
by s makes -log p(target) into -(1 - s) log p(target) - s / V sum_v log p(v) (Szegedy et al. 2016).
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tinylm.model.stack import Output
from tinylm.text.dataset import Batch

CHUNKED_FROM = 1 << 25  # logits; above it they are computed in chunks and again in the backward pass


class Loss(NamedTuple):
    """nats: the scored targets' summed negative log-likelihood. scored: how many. aux: summed over sequences.

    told: what a model tells of the batch beside, to be averaged over sequences and logged.
    """

    nats: Tensor
    scored: int
    aux: Tensor
    told: dict[str, Tensor] = {}  # noqa: RUF012, nobody adds to it


class LanguageModel(Protocol):
    """What an objective needs of a model."""

    @property
    def vocab_size(self) -> int: ...

    def __call__(self, *inputs: Tensor | None) -> Output: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Objective(Protocol):
    def __call__(self, model: LanguageModel, batch: Batch) -> Loss: ...


def next_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | tokens before it) (seeds 002, 004)."""
    return _loss(model, model(batch.ids), batch, smoothing)


def masked_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | the rest of the text, in which it was covered) (seed 004; Devlin et al. 2019)."""
    return _loss(model, model(batch.ids), batch, smoothing)


def sequence_to_sequence(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | source, targets before it), by teacher forcing (seed 004)."""
    return _loss(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch, smoothing)


def _loss(model: LanguageModel, output: Output, batch: Batch, smoothing: float) -> Loss:
    hidden, targets = output.hidden.flatten(0, 1), batch.targets.flatten()  # (B*T, D), (B*T,)
    if batch.mask is not None:
        scored = batch.mask.flatten()
        hidden, targets = hidden[scored], targets[scored]
    return Loss(_cross_entropy(model, hidden, targets, smoothing), batch.scored, output.aux, _told(output))


def _told(output: Output) -> dict[str, Tensor]:
    if output.routing is None:
        return {}
    return {"router_entropy": output.routing.entropy, "expert_shares": output.routing.shares}


def _cross_entropy(model: LanguageModel, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The summed cross-entropy, (N, D) and (N,) to (). A large N x V is never held whole."""

    def chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = model.logits(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)

    rows = max(1, CHUNKED_FROM // model.vocab_size)
    if len(hidden) <= rows:
        return chunk_loss(hidden, targets)
    return torch.stack(
        [
            checkpoint(chunk_loss, part, aim, use_reentrant=False)
            for part, aim in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
    ).sum()
