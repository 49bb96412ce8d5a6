"""Whether one decoder is better than another on a text: a paired bootstrap of the difference in bits per byte.

Both models are scored on the same parts of the text, so that the difficulty of a part cancels out. Tokenizers may
differ: parts begin at token boundaries of both tokenizers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinylm.config.jobs import changed_settings
from tinylm.config.similar_names import require_settings
from tinylm.config.validation import require
from tinylm.errors import AdapterNotModelError, UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import default_batch_size, token_losses
from tinylm.evaluation.result import choose_units, ratio_interval
from tinylm.jobs.evaluated_text import evaluation_source, known_text, opened_corpus
from tinylm.jobs.reading import ModelReader
from tinylm.jobs.run_tokens import reopen_ids
from tinylm.jobs.text.job import sums_between
from tinylm.kernels.process import keep_freed_blocks
from tinylm.machine.torch_settings import usual_settings
from tinylm.models.load import load
from tinylm.models.model import Model, ReadingSettings
from tinylm.reporter import LogReporter, Reporter
from tinylm.system.html import html_table
from tinylm.text.batches import evaluation_batches
from tinylm.text.corpus import Stream, document_end, rechunk
from tinylm.text.decoding import decoded_stream
from tinylm.text.file_selection import TextSource
from tinylm.text.files import Progress, no_progress
from tinylm.text.parallel_encoding import MAX_CHUNK
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder


class PositionedTokens(NamedTuple):
    """Token ids with their positions in the text, in UTF-8 bytes. The separator of two documents counts as one byte.

    ids: (N,) of uint32. starts: (N,) of int64, the position where each token begins. documents: (D + 1,) of int64, the
    positions where the documents begin, and the length of the text as if a separator followed the last document.
    """

    ids: np.ndarray
    starts: np.ndarray
    documents: np.ndarray

    def boundaries(self) -> np.ndarray:
        """The positions in `starts` that are greater than all earlier ones, without the first: (M,), increasing.

        No token lies on both sides of such a position.
        """
        highest = np.maximum.accumulate(self.starts)
        return self.starts[1:][(self.starts[1:] > highest[:-1])]

    def first_tokens(self, places: np.ndarray) -> np.ndarray:
        """The index of the first token at each of the boundaries `places`, (M,) -> (M,); N for `documents[-1]`."""
        return np.searchsorted(np.maximum.accumulate(self.starts), places)


def encode_with_positions(stream: Stream, tokenizer: Tokenizer, progress: Progress = no_progress) -> PositionedTokens:
    """Encode a stream as `encode_in_memory` does, with positions. `progress` receives the number of characters encoded.

    Raises UsageError for characters without an id.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [np.array(begin, dtype=np.uint32)]
    starts = [np.zeros(len(begin), dtype=np.int64)]
    place = 0
    documents = [0]
    for chunk in rechunk(stream, tokenizer.safe_split_point, MAX_CHUNK):
        if chunk is None:
            ids.append(np.array([tokenizer.end_of_text_id, *begin], dtype=np.uint32))
            starts.append(place + np.array([0, *(1 for _ in begin)], dtype=np.int64))
            place += 1
            documents.append(place)
            continue
        part, part_starts = tokenizer.encode_with_starts(chunk)
        ids.append(part)
        starts.append(place + part_starts)
        place += len(chunk.encode())
        progress(len(chunk))
    return PositionedTokens(np.concatenate(ids), np.concatenate(starts), np.array([*documents, place + 1]))


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Two models, a and b, on the same text.

    a, b: names of the models.
    bits_per_byte_a, bits_per_byte_b: mean losses, in which separators of documents count as tokens but not as bytes,
        except that of two lines, which counts as one byte.
    loss_a, loss_b: the same losses in nats per token of the model's own tokenizer.
    difference: bits_per_byte_b - bits_per_byte_a; negative if b is better. difference_low, difference_high: its 95 %
        confidence interval; `None` if the text has too few parts for one.
    better: "a" or "b" if the interval excludes 0, else `None`.
    bytes: size of the scored text. resampled: description of the units of the bootstrap, for messages.
    """

    a: str
    b: str
    bits_per_byte_a: float
    bits_per_byte_b: float
    loss_a: float
    loss_b: float
    difference: float
    difference_low: float | None
    difference_high: float | None
    better: str | None
    bytes: int
    resampled: str

    def to_json(self) -> dict[str, Any]:
        """All fields by name."""
        return dataclasses.asdict(self)

    def __repr__(self) -> str:
        return "Comparison(" + ", ".join(f"{name} {value}" for name, value in self.rows().items()) + ")"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table({**self.rows(), "result": self.verdict})

    def rows(self) -> dict[str, str]:
        """The figures as texts by name."""
        low, high = self.difference_low, self.difference_high
        return {
            "A": self.a,
            "B": self.b,
            "bits per byte of A": f"{self.bits_per_byte_a:.4f}",
            "bits per byte of B": f"{self.bits_per_byte_b:.4f}",
            "nats per token of A": f"{self.loss_a:.4f}",
            "nats per token of B": f"{self.loss_b:.4f}",
            "B - A, bits per byte": f"{round(self.difference, 4) + 0.0:.4f}",  # not -0.0000
            "95 % interval": "-" if low is None else f"{low:.4f} to {high:.4f}",
            "bytes scored": f"{self.bytes:,}",
        }

    @property
    def verdict(self) -> str:
        """The result as a sentence."""
        if self.difference_low is None:
            return "The text is too short to compare the models."
        if self.better is None:
            return "No difference can be shown with this text."
        return f"{self.better.upper()} is better by {abs(self.difference):.4f} bits per byte."


def load_model_or_adapter(
    path: str | Path,
    base: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    reporter: Reporter | None = None,
) -> Model:
    """Load the model at `path`, or the base model with the adapter at `path`.

    base: the base model of an adapter. Default: as in `load`, whose other arguments and errors this function has.
    """
    try:
        return load(path, device=device, dtype=dtype, reporter=reporter)
    except AdapterNotModelError:
        return load(base, adapters=[path], device=device, dtype=dtype, reporter=reporter)


@usual_settings()
def compare(
    a: str | Path | Model,
    b: str | Path | Model,
    files: str | Path | Sequence[str | Path] | None = None,
    *,
    text: str | None = None,
    model: str | Path | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    reporter: Reporter | None = None,
    **reading: Any,
) -> Comparison:
    """Compare two decoders on a text: the difference in bits per byte, with a 95 % confidence interval.

    a, b: models, or what `load` takes as a path; also adapters.
    files, text: as in `Model.evaluate`. Default: the validation text of both, if they were trained on the same data.
    model: base model of the adapters. Default: the one that an adapter records.
    batch_size: windows per forward pass. device, dtype: as in `load`. reporter: default: the logger `tinylm`.
    reading: fields of TextSource, such as `format` and `unknown`, which apply to `files`.

    Raises UsageError for models and texts that cannot be used, TypeError for unknown settings, and TinyLMError for
    damaged data.
    """
    require_settings(reading, [field.name for field in dataclasses.fields(ReadingSettings)])
    batch_size = EvaluationConfig(batch_size=batch_size).batch_size
    reporter = reporter or LogReporter()
    first, second = (
        m if isinstance(m, Model) else load_model_or_adapter(m, model, device=device, dtype=dtype, reporter=reporter)
        for m in (a, b)
    )
    name_a, name_b = (str(m.path if isinstance(m, Model) else m) for m in (a, b))
    given = changed_settings(ReadingSettings(**reading))
    with evaluation_source(files, text, first.data_kinds[0], given) as source:
        return compare_models(first, second, source, names=(name_a, name_b), batch_size=batch_size, reporter=reporter)


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
    names: names of the models in the result. Default: their paths.
    batch_size: see EvaluationConfig.

    Raises UsageError for models that are not decoders, and for a text that is missing or cannot be used; TinyLMError
    for damaged data.
    """
    reporter = reporter or LogReporter()
    for model in (a, b):
        require(
            isinstance(model.network, Decoder), f"Only decoders are compared; {model.path} is an {model.architecture}."
        )
        require(not model.labels, f"Only models of text are compared; {model.path} is a classifier.")

    # The text, encoded by both tokenizers, and its parts
    if source is None:
        text, end = _validation_text(a, b, reporter)
        encoded = _encode(a, b, text, reporter)
    else:
        with opened_corpus(source, ModelReader(), reporter) as corpus:
            for model in (a, b):
                corpus, _ = known_text(corpus, model.tokenizer, source.unknown, model.path, reporter)
            encoded = _encode(a, b, corpus.stream, reporter)
        end = document_end(corpus.format)
    sizes, edges, resampled = _compared_parts(*encoded, separator_bytes=len(end))
    reporter.note(f"95 % interval of the difference: paired bootstrap of {resampled}.")

    # The losses of both models on each part
    keep_freed_blocks()
    nats = []
    for model, tokens, its_edges in zip((a, b), encoded, edges, strict=True):
        rows = batch_size or default_batch_size(model.context)
        with reporter.counting("scoring", len(tokens.ids) - 1, "tokens") as advance:
            batches = evaluation_batches(tokens.ids, model.context, rows)
            losses = token_losses(model.network, batches, model.dtype, advance)
        nats.append(sums_between(losses, its_edges - 1))

    # The difference and its interval
    n_bytes = int(sizes.sum())
    bits_a, bits_b = (part / math.log(2) for part in nats)
    interval = ratio_interval(bits_b - bits_a, sizes)
    better = None
    if interval is not None:
        better = "b" if interval.high < 0 else "a" if interval.low > 0 else None
    loss_a, loss_b = (float(part.sum()) / int(e[-1] - e[0]) for part, e in zip(nats, edges, strict=True))
    name_a, name_b = names or (str(a.path), str(b.path))
    return Comparison(
        a=name_a,
        b=name_b,
        bits_per_byte_a=float(bits_a.sum()) / n_bytes,
        bits_per_byte_b=float(bits_b.sum()) / n_bytes,
        loss_a=loss_a,
        loss_b=loss_b,
        difference=float((bits_b - bits_a).sum()) / n_bytes,
        difference_low=None if interval is None else interval.low,
        difference_high=None if interval is None else interval.high,
        better=better,
        bytes=n_bytes,
        resampled=resampled,
    )


def _validation_text(a: Model, b: Model, reporter: Reporter) -> tuple[Callable[[], Stream], str]:
    """Function that opens the validation text of both models, and the text at the end of its documents.

    Raises UsageError unless both were trained on the same plain text, and TinyLMError if it cannot be read.
    """
    recorded = [
        model.data
        and (
            *(model.data.kind, model.data.fingerprint, model.data.val_fingerprint),
            *(model.data.train_characters, model.data.val_records),
        )
        for model in (a, b)
    ]
    if a.data is None or not a.data.is_plain_text or recorded[0] != recorded[1]:
        raise UsageError("The models were not trained on the same text, so there is no default; name a text.")
    reporter.note(f"Comparing on the validation text of {a.path}.")
    ids = reopen_ids(a.path, a.data, a.tokenizer, "val")
    return lambda: decoded_stream(ids, a.tokenizer), document_end(a.data.format)


def _encode(
    a: Model, b: Model, text: Callable[[], Stream], reporter: Reporter
) -> tuple[PositionedTokens, PositionedTokens]:
    with reporter.counting("encoding", None, "characters") as advance:
        first = encode_with_positions(text(), a.tokenizer, advance)
        if a.tokenizer.sha256 == b.tokenizer.sha256:
            return first, first
        return first, encode_with_positions(text(), b.tokenizer, advance)


def _compared_parts(
    a: PositionedTokens, b: PositionedTokens, separator_bytes: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], str]:
    """The parts of a text, encoded by two tokenizers: its documents or blocks of it (see `choose_units`). The separator
    of two documents counts as 0 or 1 byte of text.

    Returns the size of each part in bytes, (U,); for each tokenizer the indices of the first token of each part, and
    the end of the last part, (U + 1,); and a description of the parts for messages.

    Parts begin at token boundaries of both tokenizers. The first token of each tokenizer is not scored, so it is in no
    part. Raises UsageError if the tokenizers have no common token boundary.
    """
    end = a.documents[-1]
    shared = np.append(np.intersect1d(a.boundaries(), b.boundaries()), end)
    if len(shared) < 2:
        raise UsageError("The text is too short to compare the models; give more text.")
    documents = np.unique(np.append(shared[0], a.documents[a.documents >= shared[0]]))
    units = choose_units(documents)
    edges = np.unique(shared[np.searchsorted(shared, units.edges)])  # (U + 1,), in bytes
    separators = np.searchsorted(a.documents[1:-1] - 1, edges)  # (U + 1,), number of separators before each edge
    sizes = np.diff(edges) - (1 - separator_bytes) * np.diff(separators)
    sizes -= edges[1:] == end  # `end` counts a separator after the last document
    return sizes, (a.first_tokens(edges), b.first_tokens(edges)), units.describe(len(a.documents) - 1, "bytes")
