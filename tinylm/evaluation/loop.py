"""The evaluation loop: losses summed over batches, or per token or text, without gradients and without dropout.

The mean loss of conversations, pairs or windows has a bootstrap confidence interval.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import TinyLMError, is_out_of_memory
from tinylm.evaluation.result import MAX_BLOCKS, MAX_UNITS, MIN_UNITS, SEED, Evaluation, ratio_interval
from tinylm.machine.device import autocast, empty_cache
from tinylm.objectives.loss import LanguageModel, Loss, Objective, next_token_losses
from tinylm.reporter import Reporter
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.batches import Batch
from tinylm.transformer.architectures import Transformer

EVALUATION_TOKENS = 8192  # per forward pass, by default


def default_batch_size(context: int) -> int:
    """Number of windows of `context` tokens per forward pass, if no batch size is given."""
    return max(1, EVALUATION_TOKENS // context)


@dataclass(frozen=True)
class EvaluationLoss:
    """A summed loss.

    total: in nats, such as the negative log-likelihood of `tokens` tokens, at least one, or another kind of target
    metrics: the means of metrics of the objective over the targets, by name
    """

    total: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood in nats per token."""
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite from a loss of 700 on, before exp overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per(self, units: int) -> float | None:
        """Bits per character or per byte. units: number of characters or bytes that the scored tokens encode.

        `None` if `units` is 0, as for special tokens only.
        """
        return self.total / math.log(2) / units if units else None

    def of_text(self, characters: int, size: int, **intervals: Any) -> Evaluation:
        """The metrics of scored tokens that encode this many characters and bytes. intervals: fields of Evaluation"""
        return Evaluation(
            loss=self.loss,
            perplexity=self.perplexity,
            bits_per_character=self.bits_per(characters),
            bits_per_byte=self.bits_per(size),
            tokens=self.tokens,
            characters=characters,
            bytes=size,
            **intervals,
        )


def batch_losses(
    model: Transformer, objective: Objective, batches: Iterable[Batch], dtype: str, *, sharded: bool = False
) -> Iterator[Loss]:
    """Yield the loss of each batch. If memory runs out, that batch and all later ones are split into parts of fewer
    rows, and the loss of each part is yielded.

    `dtype`: autocast dtype. sharded: the model is sharded among ranks, which compute together. Call under
    torch.no_grad(). Raises TinyLMError if a single row does not fit into memory, or with `sharded` a batch.
    """
    rows: int | None = None  # per forward pass; None: the whole batch
    for batch in batches:
        parts = deque(batch.split(rows or len(batch)))
        while parts:
            loss = _loss_or_none(model, objective, parts[0], dtype)
            if loss is None and sharded:
                raise TinyLMError(
                    "Out of memory while evaluating; choose a smaller `context`, or start more processes."
                )
            if loss is not None:
                parts.popleft()
                yield loss
                continue
            # The exception referred to the tensors of the failed pass, which are freed only after the except block.
            empty_cache(model.device)
            rows = -(-len(parts[0]) // 2)
            parts = deque(smaller for part in parts for smaller in part.split(rows))


def _loss_or_none(model: Transformer, objective: Objective, batch: Batch, dtype: str) -> Loss | None:
    """The loss of a batch, or `None` if memory runs out. Raises TinyLMError if that happens for a single row."""
    try:
        with autocast(model.device.type, dtype):
            return objective(model, batch.to(model.device))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if len(batch) == 1:
            raise TinyLMError(
                "Out of memory while evaluating a single sequence; choose a smaller `context`, or free memory."
            ) from None
        return None


@torch.no_grad()
def evaluate_loss(
    model: Transformer,
    objective: Objective,
    batches: Iterable[Batch],
    dtype: str = "fp32",
    progress: Callable[[int], None] = lambda tokens: None,
    ranks: Ranks = ONE_RANK,
    *,
    sharded: bool = False,
) -> EvaluationLoss:
    """Sum the loss over all batches, in evaluation mode; the model's training mode is restored.

    dtype: autocast dtype. progress: called with the number of targets of each turn, in which every rank has at most one
    batch; it may raise to stop. ranks: the processes that share the batches. All ranks must pass the same batches; all
    return the sum over all ranks.

    sharded: the model is sharded among the ranks, so every rank computes a batch in every turn. In the last turn, a
    rank without a batch repeats that of rank 0, and its result is dropped. Running out of memory is an error.

    If memory runs out, batches are split into parts of fewer rows, which changes the result by rounding only. Raises
    TinyLMError if a single row does not fit into memory.
    """

    counted = True

    def dealt() -> Iterator[Batch]:
        nonlocal counted
        for batch, counted, n_targets in ranks.deal(batches):
            if counted or sharded:
                yield batch  # until its loss is computed
            progress(n_targets)

    total, tokens = 0.0, 0
    metrics: Counter[str] = Counter()  # sums over targets
    with evaluation_mode(model):
        for loss in batch_losses(model, objective, dealt(), dtype, sharded=sharded):
            if counted:
                total += loss.total.item()
                tokens += loss.n_targets
                metrics.update({name: value.item() * loss.n_targets for name, value in loss.metrics.items()})
    totals, counts, sums = zip(*ranks.gather([total, tokens, dict(metrics)]), strict=True)
    means = {name: sum(part.get(name, 0.0) for part in sums) / sum(counts) for name in sorted({*chain(*sums)})}
    return EvaluationLoss(sum(totals), sum(counts), means)


def token_losses(
    model: Transformer,
    batches: Iterable[Batch],
    dtype: str = "fp32",
    progress: Callable[[int], None] = lambda tokens: None,
    ranks: Ranks = ONE_RANK,
    losses_of: Callable[[LanguageModel, Batch], torch.Tensor] = next_token_losses,
    columns: tuple[int, ...] = (),
) -> np.ndarray:
    """The loss (-log p in nats) of each scored target, (N,), in the order of the batches, on all ranks.

    losses_of: returns the losses of the scored targets of a batch, or (N, *columns) numbers of any meaning. Other
        arguments and errors: see `evaluate_loss`.
    """
    losses: list[np.ndarray] = []  # of this rank
    counts: list[int] = []  # scored tokens of all batches

    def counted() -> Iterator[Batch]:
        for batch in batches:
            counts.append(int(batch.targets_per_text.sum()))
            yield batch

    def objective(model: LanguageModel, batch: Batch) -> Loss:
        found = losses_of(model, batch)
        losses.append(found.cpu().numpy())  # last: a batch that runs out of memory above is repeated in parts
        return Loss(found.sum(), len(found), found.new_zeros(()))

    evaluate_loss(model, objective, counted(), dtype, progress, ranks)
    if ranks.size == 1:
        return np.concatenate(losses)
    owner = np.repeat(np.arange(len(counts)) % ranks.size, counts)  # of each target
    found = torch.zeros(len(owner), *columns)
    if losses:
        found[torch.from_numpy(owner == ranks.launch.rank)] = torch.from_numpy(np.concatenate(losses)).float()
    ranks.add([found])
    return found.numpy()


@contextmanager
def evaluation_mode(model: Transformer) -> Iterator[None]:
    """Context manager that disables dropout."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class TextLosses(NamedTuple):
    """The losses of N texts: conversations, pairs or windows.

    nats: (N,), summed over the scored tokens of each text. tokens: (N,), number of scored tokens of each text.
    """

    nats: np.ndarray
    tokens: np.ndarray

    @property
    def total(self) -> EvaluationLoss:
        """The loss of all texts together."""
        return EvaluationLoss(float(self.nats.sum()), int(self.tokens.sum()))

    def shuffled_groups(self) -> "TextLosses":
        """At most MAX_UNITS groups of texts, which bounds the time of a bootstrap.

        Texts are assigned at random, since they may be sorted by length.
        """
        if len(self.nats) <= MAX_UNITS:
            return self
        group = np.random.Generator(np.random.PCG64(SEED)).permutation(len(self.nats)) % MAX_UNITS
        return TextLosses(np.bincount(group, self.nats), np.bincount(group, self.tokens))

    def blocks(self) -> "TextLosses":
        """At most MAX_BLOCKS blocks of consecutive entries, for windows of one text, which are not independent."""
        count = min(MAX_BLOCKS, len(self.nats))
        block = np.arange(len(self.nats)) * count // max(len(self.nats), 1)
        return TextLosses(np.bincount(block, self.nats), np.bincount(block, self.tokens))

    def interval(self, name: str, reporter: Reporter) -> dict[str, Any]:
        """The fields of Evaluation about the interval of the loss; empty for fewer than MIN_UNITS scored texts.

        name: noun for the texts, which are the units of the bootstrap, in the plural
        """
        interval = ratio_interval(self.nats, self.tokens)
        if interval is None:
            reporter.note(f"There are too few {name} for an interval of the loss, which needs {MIN_UNITS}.")
            return {}
        resampled = f"{np.count_nonzero(self.tokens):,} {name}"
        reporter.note(f"95 % interval of the loss: bootstrap of {resampled}.")
        return {"loss_low": interval.low, "loss_high": interval.high, "resampled": resampled}


def mean_interval(name: str, values: np.ndarray) -> dict[str, Any]:
    """The fields of Evaluation about the interval of the mean of a metric, (N,); empty for fewer than MIN_UNITS values.

    name: of the metric
    """
    groups = TextLosses(values.astype(np.float64), np.ones(len(values), np.int64)).shuffled_groups()
    interval = ratio_interval(groups.nats, groups.tokens)
    return {} if interval is None else {f"{name}_low": interval.low, f"{name}_high": interval.high}


def text_losses(
    model: Transformer,
    batches: Iterable[Batch],
    losses_of: Callable[[LanguageModel, Batch], Tensor],
    dtype: str,
    progress: Callable[[int], None],
    ranks: Ranks,
) -> TextLosses:
    """The loss of each text of the batches, in their order. Arguments and errors: see `token_losses`."""
    sizes: list[np.ndarray] = [np.zeros(0, np.int64)]

    def sized() -> Iterator[Batch]:
        for batch in batches:
            sizes.append(batch.targets_per_text)
            yield batch

    losses = token_losses(model, sized(), dtype, progress, ranks, losses_of)
    tokens = np.concatenate(sizes)
    text = np.repeat(np.arange(len(tokens)), tokens)  # of each token
    return TextLosses(np.bincount(text, losses, minlength=len(tokens)), tokens)
