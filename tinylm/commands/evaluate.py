"""tinylm eval: how well a model predicts a text."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.model import AdapterPath, ModelPath, open_model
from tinylm.commands.options import MachineOptions, OutputOptions, TextOptions, option, with_groups
from tinylm.console import Console
from tinylm.errors import TinyLMError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from tinylm.config import RunConfig
    from tinylm.text.tokenizer import Tokenizer

BASELINE_CHARACTERS = 5_000_000


@with_groups
def evaluate_text(
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files, folders, JSONL, or -; none is the run's own validation text.", show_default=False
        ),
    ] = None,
    model: ModelPath = None,
    adapter: AdapterPath = None,
    stride: Annotated[
        int | None,
        option("Tokens between two windows (default: the context); fewer give each token more context.", None, "N"),
    ] = None,
    batch_size: Annotated[int | None, option("Windows computed at once; changes nothing but speed.", None, "N")] = None,
    baselines: Annotated[
        bool, option("Score the text with gzip, xz and an order-5 character model, too.", None, None, "--baselines")
    ] = False,
    *,
    reading: TextOptions,
    machine: MachineOptions,
    output: OutputOptions,
) -> None:
    """Say how well a model predicts a text: every token but the first is scored, once."""
    from tinylm.device import choose_device, choose_inference_dtype, describe_device
    from tinylm.evaluation import evaluate, rows_at_once
    from tinylm.objective import next_token
    from tinylm.text.dataset import evaluation_batches

    console = output.console()
    device = choose_device(machine.device)
    dtype = choose_inference_dtype(machine.dtype, device.value)
    network, config, tokenizer, path = open_model(console, model, adapter, device.value)
    context = config.model.context
    if stride is not None and not 1 <= stride <= context:
        raise UsageError(f"--stride is {stride}; it must be from 1 to the model's context, {context}.")
    if batch_size is not None and batch_size < 1:
        raise UsageError(f"--batch-size is {batch_size}; it must be 1 or more.")
    console.note(f"On {describe_device(device.value)} ({device.reason}) in {dtype.value}.")
    tokens, characters, size = (
        _encode_text(console, text, reading, tokenizer) if text else _validation_text(console, path, config, tokenizer)
    )
    if len(tokens) < 2:
        raise UsageError(
            f"The text has {len(tokens)} token, and 2 are needed: the first has nothing before it to be scored by."
        )
    rows = batch_size or rows_at_once(context)
    with console.counting("scoring", len(tokens) - 1, "tokens") as advance:
        score = evaluate(network, next_token, evaluation_batches(tokens, context, rows, stride), dtype.value, advance)
    first_characters, first_bytes = tokenizer.measure(int(tokens[0]))
    scored_characters, scored_bytes = characters - first_characters, size - first_bytes
    result: dict[str, Any] = {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "bits_per_character": score.bits_per(scored_characters),
        "bits_per_byte": score.bits_per(scored_bytes),
        "tokens": score.tokens,
        "characters": scored_characters,
        "bytes": scored_bytes,
    }
    if baselines:
        result["baselines"] = _baselines(console, path, config, tokenizer, tokens)
    _print(console, result)


def _encode_text(
    console: Console, text: list[str], reading: TextOptions, tokenizer: "Tokenizer"
) -> "tuple[np.ndarray, int, int]":
    """The tokens, characters and bytes of a text."""
    from tinylm.text.corpus import find_corpus, scan
    from tinylm.text.dataset import encode_stream
    from tinylm.text.tokenizer import describe_characters

    with tempfile.TemporaryDirectory() as folder:
        corpus = find_corpus(text, reading.text_key, reading.encoding, Path(folder))
        found = scan(corpus.stream())
        if not found.characters:
            raise UsageError(f"{corpus.name} has no text in it; give a file that has some.")
        unknown = tokenizer.unknown(found.alphabet)
        if unknown:
            raise UsageError(
                f"{corpus.name} has {len(unknown)} characters that the model never saw and cannot score: "
                f"{describe_characters(unknown)}. Take them out of the text, or evaluate a BPE model."
            )
        with console.counting("encoding", found.characters, "characters") as advance:
            return encode_stream(corpus.stream(), tokenizer, advance), found.characters, found.bytes


def _validation_text(
    console: Console, path: Path, config: "RunConfig", tokenizer: "Tokenizer"
) -> "tuple[np.ndarray, int, int]":
    from tinylm.text.prepare import reopen_tokens

    if config.data is None:
        raise UsageError(f"{path} has no validation text of its own; name a text to evaluate on.")
    console.note(f"On the validation text of {path}.")
    tokens = reopen_tokens(path, config.data, tokenizer).val
    text = tokenizer.decode(tokens)
    return tokens, len(text), len(text.encode())


def _baselines(
    console: Console, path: Path, config: "RunConfig", tokenizer: "Tokenizer", tokens: "np.ndarray"
) -> dict[str, float]:
    """Bits a byte of the text under compressors and a character model fitted on the run's training text."""
    from tinylm.baselines import compression_bits_per_byte, ngram_bits_per_byte
    from tinylm.text.prepare import reopen_tokens

    text = tokenizer.decode(tokens[:BASELINE_CHARACTERS])
    if len(text) > BASELINE_CHARACTERS or len(tokens) > BASELINE_CHARACTERS:
        text = text[:BASELINE_CHARACTERS]
        console.note(f"The baselines see the first {BASELINE_CHARACTERS:,} characters.")
    scores = compression_bits_per_byte(text)
    if config.data is None:
        console.warn(f"{path} has no training text of its own, so the character model is left out.")
        return scores
    try:
        training = reopen_tokens(path, config.data, tokenizer).train
    except TinyLMError as error:
        console.warn(f"The character model is left out: {error}")
        return scores
    training_text = tokenizer.decode(training[:BASELINE_CHARACTERS])[:BASELINE_CHARACTERS]
    return {**scores, "order-5 characters": ngram_bits_per_byte(training_text, text)}


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
    }
    rows = [(words, f"{result[key]:.4f}") for key, words in names.items()]
    rows += [(f"{key} scored", f"{result[key]:,}") for key in ("tokens", "characters", "bytes")]
    rows += [(f"bits a byte, {name}", f"{bits:.4f}") for name, bits in baselines.items()]
    console.table(("", ""), rows)
