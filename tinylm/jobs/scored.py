"""Jobs on records of which some tokens are scored: their task, their sizes for planning, and what else they share."""

import functools
import itertools
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tinylm.config.model import ModelConfig
from tinylm.config.run import DataConfig
from tinylm.config.training import TrainingConfig
from tinylm.evaluation.result import token_excerpt
from tinylm.jobs.job import Job, MakeTask, Scoring, Task
from tinylm.objectives.loss import Objective, next_token
from tinylm.planning.plan_request import PARTS, Rows, Sizes, fitting_context
from tinylm.text.batches import Batch
from tinylm.text.corpus import Corpus
from tinylm.text.scored_tokens import (
    FIRST,
    ScoredRows,
    ScoredTokens,
    packed_width,
    scored_evaluation_batches,
    worth_packing,
)
from tinylm.text.token_files import TokenFolder, Tokens
from tinylm.text.tokenizer import Tokenizer


class ScoredTask(Task):
    """Predict each scored token of a record from the tokens before it.

    tokens_type: reads the codes of a token folder
    """

    tokens_type: type[ScoredTokens] = ScoredTokens
    validation_objective: Objective = staticmethod(next_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._context = model.context
        self._packed = training.pack and self.tokens_type.packs
        train, self._val = self.tokens_type(tokens.train), self.tokens_type(tokens.val)
        for part, name in ((train, "training"), (self._val, "validation")):
            part.require_examples(model.context, name)
        rows = ScoredRows(train, model.context, self._packed)
        self._batches = rows.training_batches(training.batch_size, training.seed)
        self.steps_per_epoch = float(self._batches.batches_per_epoch)

    def objective(self, progress: float) -> Objective:
        return functools.partial(next_token, smoothing=self._smoothing)

    def batch(self, number: int) -> Batch:
        return self._batches.batch(number)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return scored_evaluation_batches(self._val, self._context, rows, self._packed, max_tokens)


class ScoredSizes(Sizes):
    """Records for training and for validation; those longer than the context are cut."""

    def __init__(self, train: ScoredTokens, val: ScoredTokens) -> None:
        self._train, self._val = train, val
        self._rows = functools.lru_cache(maxsize=2)(functools.partial(ScoredRows, train))  # by context and packing

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """The default, lengthened so that nearly all records fit."""
        return max(context, fitting_context(self._train.lengths - 1, self._val.lengths - 1))

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        named = list(zip(PARTS, (self._train, self._val), strict=True))
        for name, part in named:
            part.require_examples(context, name)
        return [sentence for name, part in named for sentence in part.describe_left_out(context, name)]

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        packed = self._packs(context, pack)
        rows = self._rows(context, packed)
        return Rows(len(rows), rows.n_tokens / len(rows), rows.width, constant=packed)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        return self._val.n_scored, int(np.minimum(self._val.lengths, context).sum())

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {"pack": self._packs(context, pack)}

    def _packs(self, context: int, pack: bool | None) -> bool:
        """The user's choice, or what is faster for the context."""
        return worth_packing(self._train, context) if pack is None else pack and self._train.packs


def evaluation_batches(scoring: Scoring, tokens: ScoredTokens) -> Iterator[Batch]:
    """The batches of the records that can be evaluated, with warnings of those that are cut or left out.

    Raises UsageError if no token within the context is scored.
    """
    context = scoring.model.context
    tokens.require_examples(context, "evaluated")
    for sentence in tokens.describe_left_out(context, "evaluated"):
        scoring.reporter.warn(sentence)
    packed = worth_packing(tokens, context)
    width = max(int(tokens.inputs(context).max(initial=1)), packed_width(context) if packed else 1)
    return scored_evaluation_batches(tokens, context, scoring.rows(width), packed)


class ScoredJob(Job):
    """A job on such records. tokens_type, sizes_type: of the encoded records."""

    tokens_type: ClassVar[type[ScoredTokens]] = ScoredTokens
    sizes_type: ClassVar[type[ScoredSizes]] = ScoredSizes
    task: ClassVar[MakeTask] = ScoredTask

    def record_ids(self, tokens: Tokens, corpus: Corpus, end_of_text_id: int) -> Iterator[bytes]:
        """The codes of each example."""
        codes, edges = np.asarray(tokens), self._edges(tokens)
        for start, stop in itertools.pairwise(edges.tolist()):
            yield codes[start:stop].tobytes()

    def sizes(self, tokens: TokenFolder, tokenizer: Tokenizer) -> Sizes:
        return self.sizes_type(self.tokens_type(tokens.train), self.tokens_type(tokens.val))

    def excerpt(self, tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
        """The codes of the first examples, (N,): the whole ones of `token_excerpt`, and at least one."""
        edges = self._edges(tokens)
        limit = len(token_excerpt(tokenizer, tokens, parameters))
        fitting = int(np.searchsorted(edges, limit, side="right")) - 1
        return np.asarray(tokens)[: int(edges[min(max(fitting, 1), len(edges) - 1)])]

    def _edges(self, tokens: Tokens) -> np.ndarray:
        """The indices of the first code of each example, and the number of codes: (E + 1,)."""
        starts = np.flatnonzero(np.asarray(tokens) & FIRST)[:: self.corpus.documents_per_record]
        return np.append(starts, len(tokens))
