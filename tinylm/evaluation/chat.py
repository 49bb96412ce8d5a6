"""Evaluation of a decoder on conversations: the loss of the scored tokens, such as those of answers."""

from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import default_batch_size
from tinylm.evaluation.result import Evaluation
from tinylm.evaluation.text_losses import text_losses
from tinylm.objectives.loss import next_token_losses
from tinylm.reporter import Reporter
from tinylm.text.chat_batches import chat_evaluation_batches, describe_left_out, require_usable, worth_packing
from tinylm.text.chat_tokens import ChatTokens
from tinylm.text.corpus_loading import EvaluationTokens
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.decoder import Decoder


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

    text: codes of conversations, see `tinylm.text.chat_tokens`. Those longer than the context are cut, with a warning.
    dtype: autocast dtype. ranks: the processes that share the work; all return the same result.

    Raises UsageError if no token within the context is scored, and for settings that apply to plain text only.
    """
    given = [f"`{name}`" for name in ("sequence_length", "stride", "baselines", "by_document") if getattr(config, name)]
    if given:
        raise UsageError(f"{', '.join(given)} is for plain text, not for conversations; leave it out.")
    tokens, context = ChatTokens(text.codes), model.context
    require_usable(tokens, context, "evaluated")
    for sentence in describe_left_out(tokens, context, "evaluated"):
        reporter.warn(sentence)
    scored = tokens.scored_ids(context)
    rows, packed = config.batch_size or default_batch_size(context), worth_packing(tokens, context)
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
