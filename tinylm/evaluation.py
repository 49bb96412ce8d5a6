"""How well a model predicts a text: one sum of nats over tokens that are each scored once."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tinylm.device import autocast
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
def accuracy(model: Transformer, batches: Iterable[Batch], dtype: str = "fp32") -> float:
    """The part of all scored targets that the model finds likeliest."""
    device = next(model.parameters()).device
    right = scored = 0
    was_training = model.training
    model.eval()
    try:
        for batch in (batch.to(device) for batch in batches):
            assert batch.mask is not None
            with autocast(device.type, dtype):
                guessed = model.logits(model(batch.ids).hidden[batch.mask]).argmax(dim=-1)  # (N,)
            right += int((guessed == batch.targets[batch.mask]).sum())
            scored += batch.scored
    finally:
        model.train(was_training)
    return right / scored


@torch.no_grad()
def evaluate(
    model: Transformer,
    objective: Objective,
    batches: Iterable[Batch],
    dtype: str = "fp32",
    progress: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Score every batch with dropout off. `progress` is told each batch's tokens, and may raise to stop."""
    device = next(model.parameters()).device
    nats, tokens = 0.0, 0
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            with autocast(device.type, dtype):
                loss = objective(model, batch.to(device))
            nats += loss.nats.item()
            tokens += loss.scored
            progress(loss.scored)
    finally:
        model.train(was_training)
    return Score(nats, tokens)
