"""The job of pairs: an encoder-decoder predicts a target, given its source."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tinylm.config.model import ModelConfig
from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import UsageError
from tinylm.jobs.job import Job, Task
from tinylm.jobs.pairs.corpus import PairCorpus, PairTokens, pair_evaluation_batches
from tinylm.jobs.pairs.evaluation import baseline_bleu, evaluate_pairs, pair_excerpt
from tinylm.jobs.pairs.translate import translate
from tinylm.objectives.loss import LanguageModel, Loss, Objective, scored_loss
from tinylm.planning.plan_request import PARTS, Rows, Sizes, fitting_context
from tinylm.planning.recipes import DropoutRule
from tinylm.reporter import counted
from tinylm.text.batches import Batch
from tinylm.text.corpus import Corpus
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

LABEL_SMOOTHING = 0.1  # Vaswani et al. 2017, section 5.4


def sequence_to_sequence(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | source, targets before it) over the scored targets, with teacher forcing."""
    return scored_loss(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch, smoothing)


class SequenceToSequence(Task):
    """Predict each token of a target from the source and the target tokens before it."""

    validation_objective: Objective = staticmethod(sequence_to_sequence)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._context = model.context
        self._val = PairTokens(tokens.val, tokenizer.end_of_text_id)
        train = PairTokens(tokens.train, tokenizer.end_of_text_id)
        for part, pairs in (("training", train), ("validation", self._val)):
            if not len(pairs.fitting(model.context)):
                raise UsageError(
                    f"No {part} pair fits the context of {model.context} tokens; the shortest needs "
                    f"{pairs.contexts.min()}."
                )
        self._batches = train.training_batches(model.context, training.batch_size, training.seed)
        self.steps_per_epoch = float(self._batches.batches_per_epoch)

    def objective(self, progress: float) -> Objective:
        return functools.partial(sequence_to_sequence, smoothing=self._smoothing)

    def batch(self, number: int) -> Batch:
        return self._batches.batch(number)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return pair_evaluation_batches(self._val, self._context, rows, max_tokens)


class PairSizes(Sizes):
    """Pairs; those longer than the context are left out.

    train, val: (N,) and (M,), the context that each pair needs.
    """

    dropout = DropoutRule(per_epoch=1 / 500, minimum=0.04, maximum=0.3)  # decisions 008 and 040

    def __init__(self, train: np.ndarray, val: np.ndarray) -> None:
        self._train, self._val = train, val

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        return fitting_context(self._train, self._val)

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        sentences = []
        for name, part in zip(PARTS, (self._train, self._val), strict=True):
            left_out = int((part > context).sum())
            if left_out:
                sentences.append(
                    f"{left_out:,} of {len(part):,} {name} pairs are left out: they do not fit the context of "
                    f"{context}, and the longest needs {part.max()}."
                )
        return sentences

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        fitting = int((self._train <= context).sum())
        longest = 2 * min(int(self._train.max()), context)  # source and target
        return Rows(fitting, data.train_tokens / data.train_pairs, longest, constant=False)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        return data.val_tokens // 2, data.val_tokens  # about half of a pair is its target

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {"label_smoothing": LABEL_SMOOTHING}


class PairsJob(Job):
    """An encoder-decoder predicts a target, given its source."""

    corpus = PairCorpus
    task = SequenceToSequence
    evaluate = staticmethod(evaluate_pairs)
    excerpt = staticmethod(pair_excerpt)
    baselines = staticmethod(baseline_bleu)
    compared = "bleu"
    translate = staticmethod(translate)

    def recorded(self, tokens: TokenFolder, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
        """The number of pairs for training."""
        return {"train_pairs": len(PairTokens(tokens.train, tokenizer.end_of_text_id))}

    def sizes(self, tokens: TokenFolder, tokenizer: Tokenizer) -> Sizes:
        return PairSizes(*(PairTokens(part, tokenizer.end_of_text_id).contexts for part in (tokens.train, tokens.val)))

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        return counted(data.train_pairs, "pair")


JOB = PairsJob()
