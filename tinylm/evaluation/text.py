"""Evaluation of a decoder on a text: each token but the first is scored once, given the tokens before it."""

import numpy as np

from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import default_batch_size, evaluate_loss
from tinylm.evaluation.result import Evaluation
from tinylm.model.decoder import Decoder
from tinylm.objectives.loss import next_token
from tinylm.reporter import Reporter
from tinylm.text.batches import evaluation_batches
from tinylm.text.tokenizer import Tokenizer


def evaluate_text(
    model: Decoder, tokenizer: Tokenizer, tokens: np.ndarray, config: EvaluationConfig, dtype: str, reporter: Reporter
) -> Evaluation:
    """Loss, perplexity and bits per character and byte of `model` on `tokens` (N,). `dtype`: autocast dtype.

    Raises UsageError for fewer than 2 tokens, for a sequence length above the context, and for a stride above that.
    """
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
    batches = evaluation_batches(tokens, length, config.batch_size or default_batch_size(length), config.stride)
    with reporter.counting("scoring", len(tokens) - 1, "tokens") as advance:
        result = evaluate_loss(model, next_token, batches, dtype, advance)
    characters, n_bytes = tokenizer.decoded_size(tokens[1:])
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        bits_per_character=result.bits_per(characters),
        bits_per_byte=result.bits_per(n_bytes),
        tokens=result.tokens,
        characters=characters,
        bytes=n_bytes,
    )
