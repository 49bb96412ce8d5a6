"""Evaluation of a decoder on conversations: the loss of their scored tokens."""

from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import default_batch_size, text_losses
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.chat.tokens import ChatTokens
from tinylm.jobs.job import EvaluationTokens
from tinylm.objectives.loss import next_token_losses
from tinylm.reporter import Reporter
from tinylm.text.scored_tokens import scored_evaluation_batches, worth_packing
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder


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

    text: codes of conversations, see `tinylm.jobs.chat.corpus`. Those longer than the context are cut, with a warning.
    dtype: autocast dtype. ranks: the processes that share the work; all return the same result.

    Raises UsageError if no token within the context is scored.
    """
    tokens, context = ChatTokens(text.codes), model.context
    tokens.require_examples(context, "evaluated")
    for sentence in tokens.describe_left_out(context, "evaluated"):
        reporter.warn(sentence)
    scored = tokens.scored_ids(context)
    packed = worth_packing(tokens, context)
    rows = config.batch_size or default_batch_size(tokens.row_width(context, packed))
    batches = scored_evaluation_batches(tokens, context, rows, packed)
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
