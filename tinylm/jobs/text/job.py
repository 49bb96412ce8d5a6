"""The job of plain text: a decoder predicts the next token; each token but the first is evaluated once."""

import bisect
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import UsageError
from tinylm.evaluation.loop import EvaluationLoss
from tinylm.evaluation.result import (
    MIN_BLOCK,
    MIN_UNITS,
    Evaluation,
    choose_units,
    ratio_interval,
    token_excerpt,
)
from tinylm.jobs.job import Baselines, Job, MakeTask, Scoring, Task
from tinylm.jobs.text.baselines import baseline_bits_per_byte
from tinylm.jobs.text.soft_targets import SoftTargets, predict
from tinylm.objectives.loss import (
    LanguageModel,
    Loss,
    Objective,
    next_token,
    next_token_losses,
    next_two_tokens,
    soft_next_token,
)
from tinylm.reporter import Reporter
from tinylm.text.batches import (
    Batch,
    Windows,
    evaluation_batches,
    undo_merges,
)
from tinylm.text.corpus import Corpus, document_end
from tinylm.text.file_selection import CONVERTERS, is_html
from tinylm.text.files import content_suffix, display_name
from tinylm.text.readers import is_table, table_columns
from tinylm.text.token_files import TokenFolder, Tokens
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder

MTP_END = 0.6  # decision 039: progress from which only the next token is predicted
BPE_DROPOUT_END = 0.6  # decision 044: progress from which the text is encoded as usual


class NextToken(Task):
    """Predict each token from the tokens before it, in windows of `model.context` tokens.

    The token after the next counts with `mtp_weight`, which falls linearly to 0 at MTP_END. Merges of BPE are undone
    with the probability `bpe_dropout`, which falls linearly to 0 at BPE_DROPOUT_END. With a teacher, no merges are.
    """

    validation_objective: Objective = staticmethod(next_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._mtp_weight = training.mtp_weight
        self._bpe_dropout = training.bpe_dropout
        self._teacher_weight = training.teacher_weight
        self._soft: SoftTargets | None = None
        self._merges = torch.from_numpy(tokenizer.merges())
        self._val = tokens.val
        self._context = model.context
        end = tokenizer.end_of_text_id
        self._batches = Windows(tokens.train, model.context, training.batch_size, training.seed, end)
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def with_soft_targets(self, teacher: Decoder, dtype: str, check: Callable[[], None]) -> Self:
        task = copy.copy(self)
        task._soft = predict(teacher, self._batches.tokens, self._context, dtype, check)
        return task

    def objective(self, progress: float) -> Objective:
        second_weight = self._mtp_weight * max(0.0, 1 - progress / MTP_END)
        if self._soft is not None:
            return functools.partial(soft_next_token, weight=self._teacher_weight, second_weight=second_weight)
        objective: Objective = functools.partial(next_token, smoothing=self._smoothing)
        if second_weight > 0:
            objective = functools.partial(next_two_tokens, smoothing=self._smoothing, second_weight=second_weight)
        rate = self._bpe_dropout * (1 - progress / BPE_DROPOUT_END)
        return objective if rate <= 0 else functools.partial(self._with_undone_merges, objective, rate)

    def _with_undone_merges(self, objective: Objective, rate: float, model: LanguageModel, batch: Batch) -> Loss:
        self._merges = self._merges.to(batch.ids.device)
        return objective(model, undo_merges(batch, self._merges, rate))

    def batch(self, number: int) -> Batch:
        batch = self._batches.batch(number)
        if self._soft is None:
            return batch
        ids, probabilities = self._soft.at(self._batches.starts(number), self._context)
        return replace(batch, soft_ids=ids, soft=probabilities)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return evaluation_batches(self._val, self._context, rows, max_tokens=max_tokens)


def evaluate_text(scoring: Scoring) -> Evaluation:
    """Loss, perplexity, and bits per character and byte of the model on a text, with a confidence interval of the loss;
    with `stride`, also the loss in overlapping windows.

    Raises UsageError for fewer than 2 tokens, for a sequence length above the context, and for a stride above the
    sequence length.
    """
    model, tokenizer, text, config = scoring.model, scoring.tokenizer, scoring.text, scoring.config
    tokens = text.codes
    length = model.context if config.sequence_length is None else config.sequence_length
    if length > model.context:
        raise UsageError(f"`sequence_length` is {length}; it must be from 1 to the model's context, {model.context}.")
    if config.stride is not None and config.stride > length:
        limit = "the model's context" if config.sequence_length is None else "`sequence_length`"
        raise UsageError(f"`stride` is {config.stride}; it must be from 1 to {limit}, {length}.")
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}), and the first is not scored; give more text."
        )

    def token_losses(stride: int | None) -> tuple[np.ndarray, EvaluationLoss]:
        batches = evaluation_batches(tokens, length, scoring.rows(length), stride)
        losses = scoring.values(batches, next_token_losses, len(tokens) - 1, "tokens")
        return losses, EvaluationLoss(float(losses.sum(dtype=np.float64)), len(losses))

    # The loss of each token
    losses, total = token_losses(None)
    characters, size = tokenizer.decoded_size(tokens[1:], text.document_end)
    evaluation = total.of_text(characters, size)
    if config.stride is not None:
        _, overlapping = token_losses(config.stride)
        evaluation = replace(
            evaluation, overlapping_loss=overlapping.loss, overlapping_bits_per_byte=overlapping.bits_per(size)
        )

    # The interval of the loss, by bootstrap
    edges = document_edges(tokens, tokenizer.end_of_text_id)
    units = choose_units(np.maximum(edges - 1, 0))  # in indices of losses: the first token has none
    interval = ratio_interval(sums_between(losses, units.edges), np.diff(units.edges))
    if interval is None:
        scoring.reporter.note(
            f"The text is too short for a confidence interval of the loss, which needs {MIN_UNITS * MIN_BLOCK} tokens."
        )
        return evaluation
    resampled = units.describe(len(edges) - 1, "tokens")
    scoring.reporter.note(f"95 % interval of the loss: bootstrap of {resampled}.")
    return replace(evaluation, loss_low=interval.low, loss_high=interval.high, resampled=resampled)


def document_edges(tokens: np.ndarray, end_of_text_id: int) -> np.ndarray:
    """The indices of the first token of each document of an encoded text, and the length of the text: (D + 1,).

    Document i is tokens[edges[i] : edges[i + 1]], including its end-of-text token.
    """
    ends = np.flatnonzero(tokens == end_of_text_id) + 1
    if not len(ends) or ends[-1] != len(tokens):
        ends = np.append(ends, len(tokens))
    return np.concatenate(([0], ends))


def sums_between(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The sums of values[edges[i] : edges[i + 1]], (len(edges) - 1,) in float64."""
    totals = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    return totals[edges[1:]] - totals[edges[:-1]]


MAX_BYTES_SCORED = 50_000  # of plain text; a limit in tokens would give models with other tokenizers other texts


def text_excerpt(tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
    """The first tokens of a text (see `token_excerpt`), at most MAX_BYTES_SCORED bytes of text."""
    return first_bytes(tokenizer, token_excerpt(tokenizer, tokens, parameters), MAX_BYTES_SCORED)


def first_bytes(tokenizer: Tokenizer, tokens: np.ndarray, limit: int) -> np.ndarray:
    """The longest beginning of the tokens whose text has at most `limit` bytes."""
    lengths = range(len(tokens) + 1)
    return tokens[: bisect.bisect_right(lengths, limit, key=lambda n: tokenizer.decoded_size(tokens[:n])[1]) - 1]


COUNTED_TOKENS = 1 << 20  # tokens that are decoded at a time, to count their bytes


class TextJob(Job):
    """A decoder predicts the next token of a text."""

    task: ClassVar[MakeTask] = NextToken
    evaluate = staticmethod(evaluate_text)
    excerpt = staticmethod(text_excerpt)
    baselines: ClassVar[Baselines | None] = staticmethod(baseline_bits_per_byte)

    def report_found(self, corpora: Sequence[Corpus], reporter: Reporter, *, needs_records: bool) -> None:
        """Warn of CSV and TSV that are read as plain text, and note that HTML is read with its tags."""
        files = [(corpus, file) for corpus in corpora for file in corpus.files]
        texts = [(corpus, file) for corpus, file in files if is_table(file) and not corpus.has_records(file)]
        for corpus, file in texts[:1]:
            columns = ", ".join(table_columns(file, corpus.encoding))[:200]
            if needs_records:
                raise UsageError(
                    f"{display_name(file)}: no column {corpus.text_key!r} (found: {columns}); name the column of the "
                    "text with `text_key`."
                )
            others = f" and {len(texts) - 1:,} others are" if len(texts) > 1 else " is"
            pairs = '; `format="pairs"` reads TSV as sources and targets' if content_suffix(file) == ".tsv" else ""
            reporter.warn(
                f"{display_name(file)}{others} read as plain text, with the first line and the separators. `text_key` "
                f"takes the texts of a column ({columns}){pairs}."
            )
        pages = [file for corpus, file in files if is_html(file, corpus.encoding)]
        if pages:
            others = "" if len(pages) == 1 else f" (and {len(pages) - 1:,} more)"
            reporter.note(
                f"{display_name(pages[0])}{others} is HTML, and is read with its tags. For the text alone, convert it "
                f"first, for example with {CONVERTERS['.html']}."
            )

    def recorded(self, tokens: TokenFolder, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
        """The number of UTF-8 bytes of the validation text without its first token, which is not scored."""
        sizes = (
            tokenizer.decoded_size(tokens.val[start : start + COUNTED_TOKENS], document_end(corpus.format))[1]
            for start in range(1, len(tokens.val), COUNTED_TOKENS)
        )
        return {"val_bytes": sum(sizes)}


JOB = TextJob()
