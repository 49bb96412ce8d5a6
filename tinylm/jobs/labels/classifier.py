"""A classifier: predict the label of a text from the vector of the text, with a head for labels."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.config.model import MAX_LABELS, ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.jobs.labels.corpus import LabelTokens, encode_labelled_text
from tinylm.jobs.scored import ScoredTask
from tinylm.machine.device import autocast
from tinylm.objectives.loss import LanguageModel, Loss, Objective, routing_metrics
from tinylm.text.batches import Batch
from tinylm.text.scored_tokens import ScoredRows
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder, Output, Transformer
from tinylm.transformer.attention import valid_tokens

Pooling = Callable[[Tensor, Tensor], Tensor]


class Classification(ScoredTask):
    """Predict the label of each text.

    The loss of a text has the weight of its label: 1, or with `class_weights` balanced N / (C n) for n of N training
    texts with one of C labels (King and Zeng 2001), so that all labels have the same weight in total. Label smoothing
    spreads its share over the labels that the training texts have.
    """

    tokens_type = LabelTokens

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        super().__init__(tokens, tokenizer, model, training)
        for part in (tokens.train, tokens.val):
            LabelTokens(part).require_ids(tokenizer.vocab_size, len(model.labels) or MAX_LABELS)
        pool = POOLING[model.architecture]
        self.validation_objective = functools.partial(classification_loss, pool=pool)
        counts = torch.from_numpy(np.bincount(LabelTokens(tokens.train).numbers()))
        present = counts > 0
        balanced = counts.sum() / (present.sum() * counts.clamp(min=1))
        self._objective = functools.partial(
            classification_loss,
            pool=pool,
            weights=balanced if training.class_weights == "balanced" else None,
            smoothing=training.label_smoothing * present / present.sum() if training.label_smoothing else None,
        )

    def objective(self, progress: float) -> Objective:
        return self._objective


def last_vectors(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The vector of the last token of each text, as in transformers: (B, T, D) and (B,) -> (B, D)."""
    return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]


def mean_vectors(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The mean of the vectors of the tokens of each text: (B, T, D) and (B,) -> (B, D)."""
    valid = valid_tokens(lengths, hidden.shape[1]).unsqueeze(-1)  # (B, T, 1)
    return ((hidden * valid).sum(dim=1) / lengths.unsqueeze(-1)).to(hidden.dtype)


# By architecture. The last token of a decoder has seen the whole text.
POOLING: dict[str, Pooling] = {"decoder": last_vectors, "encoder": mean_vectors}


def pooling_of(network: Transformer) -> Pooling:
    """The pooling of a network."""
    return POOLING["decoder" if isinstance(network, Decoder) else "encoder"]


def label_logits(model: LanguageModel, batch: Batch, pool: Pooling) -> tuple[Tensor, Output]:
    """The logits of the labels of each text, (B, C) in fp32, and the output of the model."""
    assert batch.lengths is not None
    output = model(batch.ids, lengths=batch.lengths)
    return model.logits(pool(output.hidden, batch.lengths)).float(), output


def labels_of(batch: Batch) -> Tensor:
    """The number of the label of each text, (B,)."""
    assert batch.mask is not None
    return batch.targets[batch.mask]


def classification_loss(
    model: LanguageModel,
    batch: Batch,
    pool: Pooling,
    weights: Tensor | None = None,
    smoothing: Tensor | None = None,
) -> Loss:
    """-sum over the texts of weights[label] * sum_c q[c] log p(c | text). Metric: the `accuracy`.

    The target q is `smoothing`, and on the label of the text the rest in addition. The weight is that of the text and
    not of the labels in q, as it is in torch: there, the share of a rare label has a large weight in every text.

    weights, smoothing: (C,), of the first C labels; `None` for ones and for zeros
    """
    logits, output = label_logits(model, batch, pool)
    labels, log_p = labels_of(batch), F.log_softmax(logits, dim=1)  # (B,), (B, C)

    def of_all_labels(values: Tensor) -> Tensor:
        return F.pad(values, (0, logits.shape[1] - len(values))).to(logits)

    losses = F.nll_loss(log_p, labels, reduction="none")  # (B,)
    if smoothing is not None:
        share = of_all_labels(smoothing)
        losses = (1 - share.sum()) * losses - (log_p * share).sum(dim=1)
    if weights is not None:
        losses = of_all_labels(weights)[labels] * losses
    metrics = {"accuracy": (logits.argmax(dim=1) == labels).float().mean().detach()}
    return Loss(losses.sum(), len(labels), output.aux, metrics | routing_metrics(output))


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
