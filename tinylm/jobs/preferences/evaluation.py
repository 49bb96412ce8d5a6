"""Evaluation on preferences: how often, and by how much, a decoder finds the chosen answer likelier."""

from tinylm.evaluation.loop import TextLosses, mean_interval
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.job import Scoring
from tinylm.jobs.preferences.corpus import PreferenceTokens
from tinylm.objectives.loss import next_token_losses
from tinylm.text.scored_tokens import scored_evaluation_batches, worth_packing


def evaluate_preferences(scoring: Scoring) -> Evaluation:
    """The share of preferences whose chosen answer is likelier, and the margin, log p(chosen) - log p(rejected).

    The loss is that of the tokens of chosen answers. The text has the codes of `PreferenceTokens`.

    Raises UsageError if no preference can be scored within the context.
    """
    tokens, context, reporter = PreferenceTokens(scoring.text.codes), scoring.model.context, scoring.reporter
    tokens.require_examples(context, "evaluated")
    for sentence in tokens.describe_left_out(context, "evaluated"):
        reporter.warn(sentence)
    packed = worth_packing(tokens, context)
    batches = scored_evaluation_batches(tokens, context, scoring.rows(tokens.row_width(context, packed)), packed)
    losses = scoring.losses(batches, next_token_losses, len(tokens.examples(context)), "preferences")
    nats, sizes = losses.nats.reshape(-1, 2), losses.tokens.reshape(-1, 2)  # (P, 2)
    margins = nats[:, 1] - nats[:, 0]
    chosen = TextLosses(nats[:, 0], sizes[:, 0])
    return Evaluation(
        loss=chosen.total.loss,
        perplexity=chosen.total.perplexity,
        tokens=chosen.total.tokens,
        pairs=len(margins),
        accuracy=float((margins > 0).mean()),
        margin=float(margins.mean()),
        **chosen.shuffled_groups().interval("preferences", reporter),
        **mean_interval("accuracy", margins > 0),
        **mean_interval("margin", margins),
    )
