"""The labels of texts by a classifier."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinylm.jobs.labels.corpus import LabelTokens, encode_labelled_text
from tinylm.jobs.labels.loss import label_logits, pooling_of
from tinylm.machine.device import autocast
from tinylm.text.scored_tokens import ScoredRows
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Transformer

BATCH_TOKENS = 4096  # with padding


@dataclass(frozen=True)
class Classified:
    """The likeliest label of a text.

    probability: of this label. probabilities: of all labels, by label. cut: whether the text is longer than the
    context, so that its end did not count.
    """

    label: str
    probability: float
    probabilities: dict[str, float]
    cut: bool


@torch.inference_mode()
def classify_texts(
    model: Transformer, tokenizer: Tokenizer, labels: Sequence[str], texts: Sequence[str], dtype: str
) -> list[Classified]:
    """The labels of texts that are not empty, in their order. A text that is longer than the context is cut.

    dtype: autocast dtype

    Raises UsageError for characters without an id.
    """
    if not texts:
        return []
    tokens = LabelTokens(np.concatenate([encode_labelled_text(text, 0, tokenizer) for text in texts]))
    rows = ScoredRows(tokens, model.context, packed=False, examples=np.arange(len(texts))[:, np.newaxis])
    pool, found = pooling_of(model), {}
    for numbers in _batches(rows.lengths):
        with autocast(model.device.type, dtype):
            logits, _ = label_logits(model, rows.batch(numbers).to(model.device), pool)
        probabilities = logits.double().softmax(dim=1).tolist()
        for number, of_text in zip(numbers.tolist(), probabilities, strict=True):
            by_label = dict(zip(labels, of_text, strict=True))
            best = max(by_label, key=by_label.__getitem__)
            found[number] = Classified(best, by_label[best], by_label, bool(tokens.lengths[number] - 1 > model.context))
    return [found[number] for number in range(len(texts))]


def _batches(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the numbers of the texts of each batch: texts of similar lengths, with about BATCH_TOKENS tokens."""
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and lengths[order[stop]] * (stop + 1 - start) <= BATCH_TOKENS:
            stop += 1
        yield order[start:stop]
        start = stop
