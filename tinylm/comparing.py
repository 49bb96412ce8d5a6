"""Comparison of two trained models on a text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tinylm.errors import AdapterNotModelError, UsageError
from tinylm.evaluation.comparison import Comparison, compare_losses, compared_parts
from tinylm.evaluation.loop import default_batch_size, token_losses
from tinylm.evaluation.text import sums_between
from tinylm.loaded_model import Model, load
from tinylm.model.decoder import Decoder
from tinylm.reporter import LogReporter, Reporter
from tinylm.text.batches import evaluation_batches
from tinylm.text.corpus import Stream
from tinylm.text.corpus_loading import TextSource, known_text, opened_corpus
from tinylm.text.decoding import decoded_stream
from tinylm.text.run_tokens import reopen_ids
from tinylm.text.token_positions import PositionedTokens, encode_with_positions
from tinylm.validation import require


def load_model_or_adapter(
    path: str | Path,
    base: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    reporter: Reporter | None = None,
) -> Model:
    """Load a model, or an adapter on its base model. base: the base model, if the adapter does not record one.

    The other arguments and the errors are those of `load`.
    """
    try:
        return load(path, device=device, dtype=dtype, reporter=reporter)
    except AdapterNotModelError:
        return load(base, adapters=[path], device=device, dtype=dtype, reporter=reporter)


def compare_models(
    a: Model,
    b: Model,
    source: TextSource | None = None,
    *,
    names: tuple[str, str] | None = None,
    batch_size: int | None = None,
    reporter: Reporter | None = None,
) -> Comparison:
    """Compare two decoders on a text, each in windows of its own context length. The tokenizers may differ.

    source: the text. Default: the validation text of both, if they were trained on the same data.
    names: how the result names the models. Default: their paths.
    batch_size: see EvaluationConfig.

    Raises UsageError for models that are not decoders, and for a text that is missing or cannot be used.
    """
    reporter = reporter or LogReporter()
    for model in (a, b):
        require(
            isinstance(model.network, Decoder), f"Only decoders are compared; {model.path} is an {model.architecture}."
        )
    if source is None:
        encoded = _encode(a, b, _validation_text(a, b, reporter), reporter)
    else:
        with opened_corpus(source, "text", reporter) as corpus:
            for model in (a, b):
                corpus, _ = known_text(corpus, model.tokenizer, source.unknown, model.path, reporter)
            encoded = _encode(a, b, corpus.stream, reporter)
    parts = compared_parts(*encoded)
    reporter.note(f"95 % interval of the difference: paired bootstrap of {parts.resampled}.")
    nats = [
        sums_between(_token_losses(model, tokens.ids, batch_size, reporter), edges - 1)
        for model, tokens, edges in zip((a, b), encoded, (parts.edges_a, parts.edges_b), strict=True)
    ]
    return compare_losses(names or (str(a.path), str(b.path)), parts, *nats)


def _validation_text(a: Model, b: Model, reporter: Reporter) -> Callable[[], Stream]:
    """The validation text that both models have in common. Raises UsageError if there is none."""
    recorded = [
        model.data
        and (model.data.kind, model.data.fingerprint, model.data.val_fingerprint, model.data.train_characters)
        for model in (a, b)
    ]
    if a.data is None or not a.data.is_plain_text or recorded[0] != recorded[1]:
        raise UsageError("The models were not trained on the same text, so there is no default; name a text.")
    reporter.note(f"Comparing on the validation text of {a.path}.")
    ids = reopen_ids(a.path, a.data, a.tokenizer, "val")
    return lambda: decoded_stream(ids, a.tokenizer)


def _encode(
    a: Model, b: Model, text: Callable[[], Stream], reporter: Reporter
) -> tuple[PositionedTokens, PositionedTokens]:
    """The text, encoded by the tokenizer of each model."""
    with reporter.counting("encoding", None, "characters") as advance:
        first = encode_with_positions(text(), a.tokenizer, advance)
        if a.tokenizer.sha256 == b.tokenizer.sha256:
            return first, first
        return first, encode_with_positions(text(), b.tokenizer, advance)


def _token_losses(model: Model, ids: np.ndarray, batch_size: int | None, reporter: Reporter) -> np.ndarray:
    assert isinstance(model.network, Decoder)
    rows = batch_size or default_batch_size(model.context)
    with reporter.counting("scoring", len(ids) - 1, "tokens") as advance:
        return token_losses(model.network, evaluation_batches(ids, model.context, rows), model.dtype, advance)
