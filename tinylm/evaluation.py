"""How well a model predicts a text: one sum of nats over tokens that are each scored once."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tinylm.device import autocast, empty_cache
from tinylm.errors import TinyLMError, is_out_of_memory
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


def losses(model: Transformer, objective: Objective, batches: Iterable[Batch], dtype: str = "fp32") -> Iterator[Loss]:
    """The loss of every batch, or of its parts: out of memory, a batch and those after it are split into fewer rows.

    For use without gradients. Raises TinyLMError when a single row does not fit.
    """
    rows: int | None = None  # per forward pass; None is a whole batch
    for batch in batches:
        parts = deque(batch.split(rows or len(batch)))
        while parts:
            loss = _loss_or_none(model, objective, parts[0], dtype)
            if loss is not None:
                parts.popleft()
                yield loss
                continue
            # Only here are the tensors of the failed pass free: the error held them.
            empty_cache(model.device)
            rows = -(-len(parts[0]) // 2)
            parts = deque(smaller for part in parts for smaller in part.split(rows))


def _loss_or_none(model: Transformer, objective: Objective, batch: Batch, dtype: str) -> Loss | None:
    """`None` out of memory. Raises TinyLMError where the batch is a single row."""
    try:
        with autocast(model.device.type, dtype):
            return objective(model, batch.to(model.device))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if len(batch) == 1:
            raise TinyLMError(
                "Out of memory while scoring one sequence; choose a smaller --context, or free memory."
            ) from None
        return None


@torch.no_grad()
def evaluate(
    model: Transformer,
    objective: Objective,
    batches: Iterable[Batch],
    dtype: str = "fp32",
    progress: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Score every batch with dropout off. `progress` receives each batch's tokens, and may raise to stop.

    Out of memory, batches are scored in parts of fewer rows; the score is the same up to rounding.
    """
    nats, tokens = 0.0, 0
    with _without_dropout(model):
        for loss in losses(model, objective, batches, dtype):
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
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats = F.cross_entropy(precise, targets, reduction="sum")
        right += int((logits.argmax(dim=-1) == targets).sum())  # last: a batch may be scored again out of memory
        return Loss(nats, batch.scored, output.aux)

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
