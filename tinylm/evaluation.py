"""How well a model predicts a text: one sum of nats over tokens that are each scored once."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tinylm.device import autocast
from tinylm.model.encoder import Encoder
from tinylm.model.stack import Transformer
from tinylm.objective import Objective
from tinylm.text.dataset import Batch

EVALUATION_TOKENS = 8192  # in one forward pass


def rows_at_once(context: int) -> int:
    """How many windows of a context are scored together when nobody says."""
    return max(1, EVALUATION_TOKENS // context)


@dataclass(frozen=True)
class Score:
    """The summed negative log-likelihood of `tokens` tokens, in nats."""

    nats: float
    tokens: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per(self, units: int) -> float:
        """Bits a character or a byte, of which the scored text has `units`."""
        return self.nats / math.log(2) / units


@torch.no_grad()
def evaluate(
    model: Transformer,
    objective: Objective,
    batches: Iterable[Batch],
    dtype: str = "fp32",
    progress: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Score every batch with dropout off. `progress` is told each batch's tokens, and may raise to stop."""
    nats, tokens = 0.0, 0
    with _without_dropout(model):
        for batch in batches:
            with autocast(model.device.type, dtype):
                loss = objective(model, batch.to(model.device))
            nats += loss.nats.item()
            tokens += loss.scored
            progress(loss.scored)
    return Score(nats, tokens)


@torch.no_grad()
def evaluate_guesses(
    model: Encoder,
    batches: Iterable[Batch],
    dtype: str = "fp32",
    progress: Callable[[int], None] = lambda tokens: None,
) -> tuple[Score, float]:
    """The score of covered tokens, and the part of them that the model finds likeliest."""
    nats, tokens, right = 0.0, 0, 0
    with _without_dropout(model):
        for batch in (batch.to(model.device) for batch in batches):
            assert batch.mask is not None
            targets = batch.targets[batch.mask]  # (N,)
            with autocast(model.device.type, dtype):
                logits = model.logits(model(batch.ids).hidden[batch.mask])  # (N, V)
            precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
            nats += F.cross_entropy(precise, targets, reduction="sum").item()
            right += int((logits.argmax(dim=-1) == targets).sum())
            tokens += batch.scored
            progress(batch.scored)
    return Score(nats, tokens), right / tokens


@contextmanager
def _without_dropout(model: Transformer) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
