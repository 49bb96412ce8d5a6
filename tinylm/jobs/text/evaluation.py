"""Evaluation of a decoder on a text: each token but the first is scored once, given earlier tokens of a window."""

import bisect
from dataclasses import replace

import numpy as np

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
from tinylm.jobs.job import Scoring
from tinylm.objectives.loss import next_token_losses
from tinylm.text.batches import evaluation_batches
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.tokenizer import Tokenizer


def evaluate_text(scoring: Scoring) -> Evaluation:
    """Loss, perplexity, and bits per character and byte of the model on a text, with a confidence interval of the loss.

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

    # The loss of each token
    batches = evaluation_batches(tokens, length, scoring.rows(length), config.stride)
    losses = scoring.values(batches, next_token_losses, len(tokens) - 1, "tokens")
    result = EvaluationLoss(float(losses.sum(dtype=np.float64)), len(losses))
    evaluation = result.of_text(*tokenizer.decoded_size(tokens[1:], text.document_end))

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
