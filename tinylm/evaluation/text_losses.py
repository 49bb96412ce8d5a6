"""The losses of conversations, pairs or windows, and a bootstrap confidence interval of their mean."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tinylm.distributed.ranks import Ranks
from tinylm.evaluation.bootstrap import MIN_UNITS, SEED, ratio_interval
from tinylm.evaluation.loop import EvaluationLoss, token_losses
from tinylm.evaluation.result import MAX_BLOCKS, MAX_UNITS
from tinylm.objectives.loss import LanguageModel
from tinylm.reporter import Reporter
from tinylm.text.batches import Batch
from tinylm.transformer.stack import Transformer


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
