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
from tinylm.objective import LanguageModel, Loss, Objective
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


def evaluate_guesses(
    model: Encoder,
    batches: Iterable[Batch],
    dtype: str = "fp32",
    progress: Callable[[int], None] = lambda tokens: None,
) -> tuple[Score, float]:
    """The score of covered tokens, and the part of them that the model finds likeliest."""
    right = 0

    def guess(model: LanguageModel, batch: Batch) -> Loss:
        nonlocal right
        assert batch.mask is not None
        output, targets = model(batch.ids), batch.targets[batch.mask]  # (N,)
        logits = model.logits(output.hidden[batch.mask])  # (N, V)
        right += int((logits.argmax(dim=-1) == targets).sum())
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return Loss(F.cross_entropy(precise, targets, reduction="sum"), batch.scored, output.aux)

    score = evaluate(model, guess, batches, dtype, progress)
    return score, right / score.tokens


@contextmanager
def _without_dropout(model: Transformer) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
