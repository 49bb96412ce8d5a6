"""What tinylm eval does with an encoder: how well it guesses tokens under a mask that is always the same."""

from typing import TYPE_CHECKING, Any

from tinylm.commands.model import OpenModel
from tinylm.commands.reading import TextToScore, tokens_to_score
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.encoder import Encoder


def evaluate_masked(
    console: Console,
    opened: OpenModel,
    network: "Encoder",
    text: TextToScore,
    dtype: str,
    batch_size: int | None,
) -> dict[str, Any]:
    from tinylm.evaluation import evaluate_guesses, rows_at_once
    from tinylm.text.masking import masked_evaluation_batches

    tokenizer, context = opened.tokenizer, opened.config.model.context
    tokens = tokens_to_score(console, opened, text)
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}): one to guess, and one to guess it from; give more text."
        )

    rows = batch_size or rows_at_once(context)
    batches = masked_evaluation_batches(tokens, context, rows, tokenizer.mask, tokenizer.vocab_size)
    with console.counting("scoring", None, "masked tokens") as advance:
        score, accuracy = evaluate_guesses(network, batches, dtype, advance)
    return {"loss": score.loss, "perplexity": score.perplexity, "accuracy": accuracy, "tokens": score.tokens}
