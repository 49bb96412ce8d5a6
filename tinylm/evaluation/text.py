"""Evaluation on a text or on conversations: of a decoder by the next token, of an encoder by masked tokens.

On a text, a decoder scores each token but the first once, given earlier tokens of a window; on conversations, it scores
tokens such as those of answers. The masks of an encoder are the same in every evaluation.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import EvaluationLoss, TextLosses, default_batch_size, text_losses, token_losses
from tinylm.evaluation.result import MIN_BLOCK, MIN_UNITS, DocumentLoss, Evaluation, choose_units, ratio_interval
from tinylm.objectives.loss import LanguageModel, next_token_losses
from tinylm.reporter import Reporter
from tinylm.text.batches import Batch, evaluation_batches, masked_evaluation_batches
from tinylm.text.chat_tokens import ChatTokens, chat_evaluation_batches, worth_packing
from tinylm.text.corpus_loading import EvaluationTokens
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder, Encoder


def evaluate_text(
    model: Decoder,
    tokenizer: Tokenizer,
    text: EvaluationTokens,
    config: EvaluationConfig,
    dtype: str,
    reporter: Reporter,
    ranks: Ranks = ONE_RANK,
) -> Evaluation:
    """Loss, perplexity, and bits per character and byte of `model` on a text, with a confidence interval of the loss.

    dtype: autocast dtype. ranks: the processes that share the work; all return the same result.

    Raises UsageError for fewer than 2 tokens, for a sequence length above the context, and for a stride above the
    sequence length.
    """
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
    batches = evaluation_batches(tokens, length, config.batch_size or default_batch_size(length), config.stride)
    with reporter.counting("scoring", len(tokens) - 1, "tokens") as advance:
        losses = token_losses(model, batches, dtype, advance, ranks)
    result = EvaluationLoss(float(losses.sum(dtype=np.float64)), len(losses))
    characters, n_bytes = tokenizer.decoded_size(tokens[1:], text.document_end)
    evaluation = Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        bits_per_character=result.bits_per(characters),
        bits_per_byte=result.bits_per(n_bytes),
        tokens=result.tokens,
        characters=characters,
        bytes=n_bytes,
    )
    edges = document_edges(tokens, tokenizer.end_of_text_id)
    evaluation = _with_interval(evaluation, losses, edges, reporter)
    if config.by_document:
        documents = _document_losses(tokenizer, text, losses, edges)
        evaluation = replace(evaluation, documents=documents)
    return evaluation


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


def _loss_indices(edges: np.ndarray) -> np.ndarray:
    """Convert indices of tokens to indices of losses: the first token has no loss."""
    return np.maximum(edges - 1, 0)


def _with_interval(evaluation: Evaluation, losses: np.ndarray, edges: np.ndarray, reporter: Reporter) -> Evaluation:
    units = choose_units(_loss_indices(edges))
    interval = ratio_interval(sums_between(losses, units.edges), np.diff(units.edges))
    if interval is None:
        reporter.note(
            f"The text is too short for a confidence interval of the loss, which needs {MIN_UNITS * MIN_BLOCK} tokens."
        )
        return evaluation
    resampled = units.describe(len(edges) - 1, "tokens")
    reporter.note(f"95 % interval of the loss: bootstrap of {resampled}.")
    return replace(evaluation, loss_low=interval.low, loss_high=interval.high, resampled=resampled)


def _document_losses(
    tokenizer: Tokenizer, text: EvaluationTokens, losses: np.ndarray, edges: np.ndarray
) -> tuple[DocumentLoss, ...]:
    nats = sums_between(losses, _loss_indices(edges))
    documents = []
    for index, (start, stop) in enumerate(itertools.pairwise(edges)):
        scored = text.codes[max(start, 1) : stop]
        if not len(scored):
            continue
        result = EvaluationLoss(float(nats[index]), len(scored))
        characters, n_bytes = tokenizer.decoded_size(scored, text.document_end)
        documents.append(
            DocumentLoss(
                document=index + 1,
                name=text.names[index] if len(text.names) == len(edges) - 1 else "",
                loss=result.loss,
                bits_per_byte=result.bits_per(n_bytes),
                tokens=result.tokens,
                characters=characters,
                bytes=n_bytes,
            )
        )
    return tuple(documents)


def require_no_text_settings(config: EvaluationConfig, data: str) -> None:
    """Raise UsageError for settings of plain text. data: what is evaluated instead, such as "conversations"."""
    given = [f"`{name}`" for name in ("sequence_length", "stride", "baselines", "by_document") if getattr(config, name)]
    if given:
        raise UsageError(f"{', '.join(given)} is for plain text, not for {data}; leave it out.")


def evaluate_chat(
    model: Decoder,
    tokenizer: Tokenizer,
    text: EvaluationTokens,
    config: EvaluationConfig,
    dtype: str,
    reporter: Reporter,
    ranks: Ranks = ONE_RANK,
) -> Evaluation:
    """Loss of `model` on the scored tokens of conversations with its confidence interval, and bits per character and
    byte of their text.

    text: codes of conversations, see `tinylm.text.chat_corpus`. Those longer than the context are cut, with a warning.
    dtype: autocast dtype. ranks: the processes that share the work; all return the same result.

    Raises UsageError if no token within the context is scored, and for settings that apply to plain text only.
    """
    require_no_text_settings(config, "conversations")
    tokens, context = ChatTokens(text.codes), model.context
    tokens.require_examples(context, "evaluated")
    for sentence in tokens.describe_left_out(context, "evaluated"):
        reporter.warn(sentence)
    scored = tokens.scored_ids(context)
    packed = worth_packing(tokens, context)
    rows = config.batch_size or default_batch_size(tokens.row_width(context, packed))
    batches = chat_evaluation_batches(tokens, context, rows, packed)
    with reporter.counting("scoring", len(scored), "tokens") as advance:
        losses = text_losses(model, batches, next_token_losses, dtype, advance, ranks)
    result = losses.total
    characters, size = tokenizer.decoded_size(scored)
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        bits_per_character=result.bits_per(characters),
        bits_per_byte=result.bits_per(size),
        tokens=result.tokens,
        characters=characters,
        bytes=size,
        **losses.shuffled_groups().interval("conversations", reporter),
    )


def evaluate_masked(
    model: Encoder,
    tokenizer: Tokenizer,
    text: EvaluationTokens,
    config: EvaluationConfig,
    dtype: str,
    reporter: Reporter,
    ranks: Ranks = ONE_RANK,
) -> Evaluation:
    """Loss, perplexity and accuracy of `model` on masked tokens of a text, with a confidence interval of the loss.

    dtype: autocast dtype. ranks: the processes that share the work; all return the same result.

    Raises UsageError for fewer than 2 tokens.
    """
    tokens = text.codes
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}), and a masked token needs another one; give more text."
        )
    rows = config.batch_size or default_batch_size(model.context)
    batches = masked_evaluation_batches(tokens, model.context, rows, tokenizer.mask_id, tokenizer.vocab_size)
    with reporter.counting("scoring", None, "masked tokens") as advance:
        losses, accuracy = masked_losses_and_accuracy(model, batches, dtype, advance, ranks)
    result, blocks = losses.total, losses.blocks()
    of = "windows" if len(blocks.nats) == len(losses.nats) else "blocks of consecutive windows"
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        accuracy=accuracy,
        tokens=result.tokens,
        **blocks.interval(of, reporter),
    )


def masked_losses_and_accuracy(
    model: Encoder,
    batches: Iterable[Batch],
    dtype: str,
    progress: Callable[[int], None],
    ranks: Ranks = ONE_RANK,
) -> tuple[TextLosses, float]:
    """The losses of the masked tokens of each window, and the fraction of masked tokens whose logit is the largest.

    Arguments and errors: see `token_losses`.
    """
    correct = 0

    def losses_of(model: LanguageModel, batch: Batch) -> Tensor:
        nonlocal correct
        assert batch.mask is not None
        output, targets = model(batch.ids), batch.targets[batch.mask]  # (N,)
        logits = model.logits(output.hidden[batch.mask])  # (N, V)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(precise, targets, reduction="none")
        # Counted last: a batch that runs out of memory above is repeated in parts, and must not be counted twice.
        correct += int((logits.argmax(dim=-1) == targets).sum())
        return losses

    losses = text_losses(model, batches, losses_of, dtype, progress, ranks)
    return losses, sum(ranks.gather(correct)) / losses.total.tokens
