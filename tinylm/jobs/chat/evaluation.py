"""Evaluation of conversations."""

from tinylm.evaluation.result import Evaluation
from tinylm.jobs.chat.tokens import ChatTokens
from tinylm.jobs.job import Scoring
from tinylm.objectives.loss import next_token_losses
from tinylm.text.scored_tokens import scored_evaluation_batches, worth_packing


def evaluate_chat(scoring: Scoring) -> Evaluation:
    """Loss of the model on the scored tokens of conversations with its confidence interval, and bits per character and
    byte of their text.

    Those longer than the context are cut, with a warning. Raises UsageError if no token within the context is scored.
    """
    tokens, context, reporter = ChatTokens(scoring.text.codes), scoring.model.context, scoring.reporter
    tokens.require_examples(context, "evaluated")
    for sentence in tokens.describe_left_out(context, "evaluated"):
        reporter.warn(sentence)
    scored = tokens.scored_ids(context)
    packed = worth_packing(tokens, context)
    batches = scored_evaluation_batches(tokens, context, scoring.rows(tokens.row_width(context, packed)), packed)
    losses = scoring.losses(batches, next_token_losses, len(scored), "tokens")
    interval = losses.shuffled_groups().interval("conversations", reporter)
    return losses.total.of_text(*scoring.tokenizer.decoded_size(scored), **interval)
