"""What tinylm eval does with a decoder: how well it predicts every token of a text but the first."""

from typing import TYPE_CHECKING, Any

from tinylm.commands.model import OpenModel
from tinylm.commands.reading import TextToScore, tokens_to_score
from tinylm.console import Console
from tinylm.errors import TinyLMError, UsageError

if TYPE_CHECKING:
    import numpy as np

BASELINE_BYTES = 5_000_000


def evaluate_text(
    console: Console,
    opened: OpenModel,
    text: TextToScore,
    dtype: str,
    stride: int | None,
    batch_size: int | None,
    baselines: bool,
) -> dict[str, Any]:
    from tinylm.evaluation import evaluate, rows_at_once
    from tinylm.objective import next_token
    from tinylm.text.dataset import evaluation_batches

    context = opened.config.model.context
    if stride is not None and not 1 <= stride <= context:
        raise UsageError(f"--stride is {stride}; it must be from 1 to the model's context, {context}.")
    tokens = tokens_to_score(console, opened, text)
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}), and the first is not scored; give more text."
        )
    batches = evaluation_batches(tokens, context, batch_size or rows_at_once(context), stride)
    with console.counting("scoring", len(tokens) - 1, "tokens") as advance:
        score = evaluate(opened.network, next_token, batches, dtype, advance)
    characters, size = opened.tokenizer.measure(tokens[1:])
    result: dict[str, Any] = {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_character": score.bits_per(characters),
        "bits_per_byte": score.bits_per(size),
        "tokens": score.tokens,
        "characters": characters,
        "bytes": size,
    }
    if baselines:
        result["baselines"] = _baselines(console, opened, tokens)
    return result


def _baselines(console: Console, opened: OpenModel, tokens: "np.ndarray") -> dict[str, float]:
    """Bits a byte of the text under compressors and a character model fitted on the run's training text."""
    from tinylm.baselines import compression_bits_per_byte, ngram_bits_per_byte
    from tinylm.text.prepare import reopen_part

    def beginning(ids: "np.ndarray") -> str:
        """A token is a byte or more, but for those that stand for no text."""
        written = opened.tokenizer.decode(ids[:BASELINE_BYTES]).encode()[:BASELINE_BYTES]
        return written.decode("utf-8", "ignore")

    text = beginning(tokens)
    if opened.tokenizer.measure(tokens)[1] > BASELINE_BYTES:
        console.note(f"The baselines see the first {BASELINE_BYTES // 10**6} MB.")
    scores = compression_bits_per_byte(text)
    if opened.config.data is None:
        console.warn(f"{opened.path} has no training text of its own, so the character model is left out.")
        return scores
    try:
        training = reopen_part(opened.path, opened.config.data, opened.tokenizer, "train")
    except TinyLMError as error:
        console.warn(f"The character model is left out: {error}")
        return scores
    return {**scores, "order-5 characters": ngram_bits_per_byte(beginning(training), text)}
