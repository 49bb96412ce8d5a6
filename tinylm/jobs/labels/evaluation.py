"""Evaluation of a classifier: accuracy, macro F1 and the confusion table, with intervals."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.evaluation.loop import TextLosses, mean_interval
from tinylm.evaluation.result import MIN_UNITS, SEED, Evaluation, percentile_interval
from tinylm.jobs.job import Scoring
from tinylm.jobs.labels.corpus import LabelTokens
from tinylm.jobs.labels.loss import label_logits, labels_of, pooling_of
from tinylm.jobs.scored import evaluation_batches
from tinylm.objectives.loss import LanguageModel
from tinylm.text.batches import Batch

F1_RESAMPLES = 2000


def evaluate_classification(scoring: Scoring) -> Evaluation:
    """The share of texts whose label has the largest logit, the mean F1 of the labels, and how often each label is
    taken for each other.

    The text has the codes of `tinylm.jobs.labels.corpus`.
    """
    pool, n_labels = pooling_of(scoring.model), len(scoring.model.output.weight)

    def scores(network: LanguageModel, batch: Batch) -> Tensor:
        """-log p(label), the label and the likeliest one: (B, 3)."""
        logits, _ = label_logits(network, batch, pool)
        labels = labels_of(batch)
        nats = F.cross_entropy(logits, labels, reduction="none")
        return torch.stack([nats, labels.to(nats), logits.argmax(dim=1).to(nats)], dim=1)

    tokens = LabelTokens(scoring.text.codes)
    batches = evaluation_batches(scoring, tokens)
    found = scoring.values(batches, scores, len(tokens), "texts", columns=(3,))
    truth, predicted = found[:, 1:].astype(np.int64).T
    nats = TextLosses(found[:, 0], np.ones(len(found), np.int64))
    confusion = np.bincount(truth * n_labels + predicted, minlength=n_labels**2).reshape(n_labels, n_labels)
    return Evaluation(
        unit="nats per text",
        loss=nats.total.loss,
        tokens=int(tokens.inputs(scoring.model.context).sum()),
        texts=len(truth),
        accuracy=float((truth == predicted).mean()),
        macro_f1=float(macro_f1(confusion[None])[0]),
        confusion=tuple(map(tuple, confusion.tolist())),
        **nats.shuffled_groups().interval("texts", scoring.reporter),
        **mean_interval("accuracy", truth == predicted),
        **_f1_interval(confusion),
    )


def macro_f1(confusion: np.ndarray) -> np.ndarray:
    """The unweighted mean, over the labels that occur or are predicted, of F1 = 2 P R / (P + R) with precision P and
    recall R: (..., C, C), true labels in rows and predicted ones in columns, -> (...).
    """
    hits = np.diagonal(confusion, axis1=-2, axis2=-1)  # (..., C)
    either = confusion.sum(axis=-1) + confusion.sum(axis=-2)  # (..., C)
    scores = np.divide(2 * hits, either, out=np.zeros(hits.shape), where=either > 0)
    return scores.sum(axis=-1) / (either > 0).sum(axis=-1)


def _f1_interval(confusion: np.ndarray) -> dict[str, Any]:
    """The fields of Evaluation about the interval of macro F1; empty for fewer than MIN_UNITS texts.

    A bootstrap of the texts draws the cells of the table from a multinomial distribution.
    """
    total = int(confusion.sum())
    if total < MIN_UNITS:
        return {}
    used = (confusion.sum(axis=0) + confusion.sum(axis=1)) > 0
    confusion = confusion[np.ix_(used, used)]
    n_labels = len(confusion)
    rng = np.random.Generator(np.random.PCG64(SEED))
    cells = np.flatnonzero(confusion)
    shares = confusion.flatten()[cells] / total
    scores = np.empty(F1_RESAMPLES)
    for number in range(F1_RESAMPLES):
        drawn = np.zeros(n_labels**2, np.int64)
        drawn[cells] = rng.multinomial(total, shares)
        scores[number] = macro_f1(drawn.reshape(n_labels, n_labels))
    interval = percentile_interval(scores, total)
    return {"macro_f1_low": interval.low, "macro_f1_high": interval.high}
