"""The labels of texts by a classifier."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tinylm.jobs.labels.corpus import encode_labelled_text
from tinylm.jobs.labels.loss import pooling_of
from tinylm.machine.device import autocast
from tinylm.text.scored_tokens import ids_of
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


def classify_texts(
    model: Transformer, tokenizer: Tokenizer, labels: Sequence[str], texts: Sequence[str], dtype: str
) -> list[Classified]:
    """The labels of texts that are not empty, in their order. A text that is longer than the context is cut.

    dtype: autocast dtype

    Raises UsageError for characters without an id.
    """
    encoded = [ids_of(encode_labelled_text(text, 0, tokenizer))[:-1] for text in texts]
    cut = [len(ids) > model.context for ids in encoded]
    encoded = [ids[: model.context] for ids in encoded]
    probabilities = np.zeros((len(texts), len(labels)))
    for rows in _batches(np.array([len(ids) for ids in encoded])):
        probabilities[rows] = _probabilities(model, [encoded[row] for row in rows], dtype)
    found = []
    for row, is_cut in zip(probabilities, cut, strict=True):
        best, by_label = int(row.argmax()), dict(zip(labels, row.tolist(), strict=True))
        found.append(Classified(labels[best], by_label[labels[best]], by_label, is_cut))
    return found


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


@torch.inference_mode()
def _probabilities(model: Transformer, texts: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """The probabilities of the labels of each text, (B, C)."""
    lengths = torch.tensor([len(ids) for ids in texts])
    ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
    ids, lengths = ids.to(model.device), lengths.to(model.device)
    pool = pooling_of(model)
    with autocast(model.device.type, dtype):
        logits = model.logits(pool(model(ids, lengths=lengths).hidden, lengths))
    return logits.double().softmax(dim=1).cpu().numpy()
