"""tinylm eval: how well a model predicts a text."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.evaluate_pairs import TranslationOptions, evaluate_pairs
from tinylm.commands.model import AdapterPaths, ModelPath, OpenModel, choose_where, open_model
from tinylm.commands.options import MachineOptions, OutputOptions, TextOptions, option, with_groups
from tinylm.commands.reading import encode_whole
from tinylm.console import Console
from tinylm.errors import TinyLMError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from tinylm.model.encoder import Encoder
    from tinylm.text.dataset import Batch


BASELINE_BYTES = 5_000_000


@with_groups
def evaluate_text(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Text (or pairs), or -; none is the run's own validation text.", show_default=False),
    ] = None,
    model: ModelPath = None,
    adapter: AdapterPaths = None,
    stride: Annotated[
        int | None,
        option("Tokens between two windows (default: the context); fewer give each token more context.", None, "N"),
    ] = None,
    batch_size: Annotated[int | None, option("Windows computed at once; changes nothing but speed.", None, "N")] = None,
    baselines: Annotated[
        bool, option("Score the text with gzip, xz and an order-5 character model, too.", None, None, "--baselines")
    ] = False,
    *,
    translation: TranslationOptions,
    reading: TextOptions,
    machine: MachineOptions,
    output: OutputOptions,
) -> None:
    """Say how well a model predicts a text: every token but the first is scored, once."""
    from tinylm.model.decoder import Decoder
    from tinylm.model.encoder import Encoder
    from tinylm.model.encoder_decoder import EncoderDecoder

    console = output.console()
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size is {batch_size}; it must be 1 or more.")
    device, dtype = choose_where(console, machine)
    opened = open_model(console, model, adapter, device)
    match opened.network:
        case Decoder():
            translation.refuse()
            result = _evaluate_text(console, opened, text, reading, dtype, stride, batch_size, baselines)
        case Encoder() as encoder:
            translation.refuse()
            if stride is not None or baselines:
                raise UsageError("--stride and --baselines are for models that read from left to right.")
            result = _evaluate_masked(console, opened, encoder, text, reading, dtype, batch_size)
        case EncoderDecoder() as translator:
            if stride is not None or baselines:
                raise UsageError("--stride and --baselines are for models of text; this one makes targets of sources.")
            result = evaluate_pairs(console, opened, translator, text, reading, dtype, batch_size, translation)
        case _:
            raise UsageError(f"{opened.path} is of a kind that tinylm eval does not know.")
    _print(console, result)


def _evaluate_text(
    console: Console,
    opened: OpenModel,
    text: list[str] | None,
    reading: TextOptions,
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
    tokens = encode_whole(console, text, reading, opened.tokenizer) if text else _validation_text(console, opened)
    if len(tokens) < 2:
        raise UsageError(
            f"The text has {len(tokens)} token, and 2 are needed: the first has nothing before it to be scored by."
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


def _evaluate_masked(
    console: Console,
    opened: OpenModel,
    network: "Encoder",
    text: list[str] | None,
    reading: TextOptions,
    dtype: str,
    batch_size: int | None,
) -> dict[str, Any]:
    """Under a mask that is always the same."""
    from tinylm.evaluation import accuracy, evaluate, rows_at_once
    from tinylm.objective import masked_token
    from tinylm.text.masking import masked_evaluation_batches

    tokenizer, context = opened.tokenizer, opened.config.model.context
    tokens = encode_whole(console, text, reading, tokenizer) if text else _validation_text(console, opened)
    if len(tokens) < 2:
        raise UsageError(f"The text has {len(tokens)} token, and 2 are needed: one to guess, and one to guess it from.")

    def batches() -> "Iterator[Batch]":
        rows = batch_size or rows_at_once(context)
        return masked_evaluation_batches(tokens, context, rows, tokenizer.mask, tokenizer.vocab_size)

    with console.counting("scoring", None, "masked tokens") as advance:
        score = evaluate(network, masked_token, batches(), dtype, advance)
    right = accuracy(network, batches(), dtype)
    return {"loss": score.loss, "perplexity": score.perplexity, "accuracy": right, "tokens": score.tokens}


def _validation_text(console: Console, opened: OpenModel) -> "np.ndarray":
    from tinylm.text.prepare import reopen_tokens

    if opened.config.data is None:
        raise UsageError(f"{opened.path} has no validation text of its own; name a text to evaluate on.")
    console.note(f"On the validation text of {opened.path}.")
    return reopen_tokens(opened.path, opened.config.data, opened.tokenizer).val


def _baselines(console: Console, opened: OpenModel, tokens: "np.ndarray") -> dict[str, float]:
    """Bits a byte of the text under compressors and a character model fitted on the run's training text."""
    from tinylm.baselines import compression_bits_per_byte, ngram_bits_per_byte
    from tinylm.text.prepare import reopen_tokens

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
        training = reopen_tokens(opened.path, opened.config.data, opened.tokenizer).train
    except TinyLMError as error:
        console.warn(f"The character model is left out: {error}")
        return scores
    return {**scores, "order-5 characters": ngram_bits_per_byte(beginning(training), text)}


def _print(console: Console, result: dict[str, Any]) -> None:
    if console.as_json:
        console.record(result)
        return
    baselines = result.pop("baselines", {})
    names = {
        "loss": "nats a token",
        "perplexity": "perplexity",
        "bits_per_character": "bits a character",
        "bits_per_byte": "bits a byte",
        "accuracy": "accuracy",
        "exact_match": "exact matches",
        "bleu": "BLEU",
        "chrf": "chrF",
    }
    rows = [(names.get(key, f"{key} scored"), _shown(value)) for key, value in result.items()]
    rows += [(f"bits a byte, {name}", f"{bits:.4f}") for name, bits in baselines.items()]
    console.table(("", ""), rows)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
