"""Evaluation on preferences: how often, and by how much, a decoder finds the chosen answer likelier."""

from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import TextLosses, default_batch_size, mean_interval, text_losses
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.job import EvaluationTokens
from tinylm.jobs.preferences.corpus import PreferenceTokens
from tinylm.objectives.loss import next_token_losses
from tinylm.reporter import Reporter
from tinylm.text.scored_tokens import scored_evaluation_batches, worth_packing
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder


def evaluate_preferences(
    model: Decoder,
    tokenizer: Tokenizer,
    text: EvaluationTokens,
    config: EvaluationConfig,
    dtype: str,
    reporter: Reporter,
    ranks: Ranks = ONE_RANK,
) -> Evaluation:
    """The share of preferences whose chosen answer is likelier, and the margin, log p(chosen) - log p(rejected).

    The loss is that of the tokens of chosen answers. text: codes of preferences, see `PreferenceTokens`. Other
    arguments: see `evaluate_chat`.

    Raises UsageError if no preference can be scored within the context.
    """
    tokens, context = PreferenceTokens(text.codes), model.context
    tokens.require_examples(context, "evaluated")
    for sentence in tokens.describe_left_out(context, "evaluated"):
        reporter.warn(sentence)
    packed = worth_packing(tokens, context)
    rows = config.batch_size or default_batch_size(tokens.row_width(context, packed))
    batches = scored_evaluation_batches(tokens, context, rows, packed)
    with reporter.counting("scoring", len(tokens.examples(context)), "preferences") as advance:
        losses = text_losses(model, batches, next_token_losses, dtype, advance, ranks)
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
