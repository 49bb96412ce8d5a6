"""The job of texts with labels, and its evaluation: accuracy, macro F1 and the confusion table, with intervals."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.config.run import DataConfig, RunConfig
from tinylm.errors import UsageError
from tinylm.evaluation.loop import TextLosses, mean_interval
from tinylm.evaluation.result import MIN_UNITS, SEED, Evaluation, percentile_interval
from tinylm.jobs.job import Reader, Scoring
from tinylm.jobs.labels.classifier import Classification, classify_texts, label_logits, labels_of, pooling_of
from tinylm.jobs.labels.corpus import (
    LABEL_ENCODING,
    LABEL_KEY,
    LabelCorpus,
    LabelTokens,
    describe_labels,
    has_labels,
    with_labels,
)
from tinylm.jobs.scored import ScoredJob, ScoredSizes, evaluation_batches
from tinylm.objectives.loss import LanguageModel
from tinylm.reporter import Reporter, counted
from tinylm.text.batches import Batch
from tinylm.text.corpus import Corpus
from tinylm.text.file_selection import reject_json
from tinylm.text.files import display_name, first_text
from tinylm.text.split import SplitCorpus
from tinylm.text.token_files import TokenFolder, Tokens

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


class LabelSizes(ScoredSizes):
    """Texts with a label each, one per row; those longer than the context are cut."""

    # docs/other-objectives.md, "Labels"
    lr_factor = 0.1
    new_lr_factor = 0.25
    min_validation_records = 100
    min_steps_per_epoch = 16

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {"label_smoothing": 0.1}


class LabelsJob(ScoredJob):
    """A classifier, which is an encoder or a decoder with an output layer for labels, predicts the label of a text."""

    tokens_type = LabelTokens
    sizes_type = LabelSizes
    corpus = LabelCorpus
    encoding = LABEL_ENCODING
    task = Classification
    classify = staticmethod(classify_texts)
    evaluate = staticmethod(evaluate_classification)

    def accepted_keys(self, text_key: str) -> frozenset[str]:
        return frozenset((text_key, LABEL_KEY))

    def recognises(self, corpora: Sequence[Corpus], reporter: Reporter) -> bool:
        """Whether all files have texts with labels, with a note, or a warning if only some of them have.

        Raises UsageError for JSON with labels beside other texts in a file without a JSON suffix.
        """
        labelled, others = _labelled(corpora)
        if labelled and others:
            for corpus, file in labelled:
                if not corpus.has_records(file):
                    reject_json(file, first_text(file, corpus.encoding))
            reporter.warn(
                f"The labels in {display_name(labelled[0][1])} are not read, since {display_name(others[0])} has none."
            )
        if not labelled or others:
            return False
        reporter.note(
            f"{corpora[0].name}: the records have the key {LABEL_KEY!r}, so a classifier is trained; "
            '`format="jsonl"` reads the texts alone.'
        )
        return True

    def opened(self, corpora: list[Corpus], reader: Reader, reporter: Reporter) -> list[Corpus]:
        """The corpora with the labels of the model, or of a new one with those that they have.

        Raises UsageError for a file without labels, and as `with_labels`.
        """
        _, others = _labelled(corpora)
        if others:
            raise UsageError(
                f"{display_name(others[0])} has no texts with labels, which a classifier takes: records with the keys "
                f"{corpora[0].text_key!r} and {LABEL_KEY!r}, as JSONL, Parquet or CSV."
            )
        found = [corpus for corpus in corpora if isinstance(corpus, LabelCorpus)]
        return [*with_labels(found, reader.labels)]

    def report_encoded(self, split: SplitCorpus, tokens: TokenFolder, reporter: Reporter) -> None:
        """List the labels, and warn of some that are not learned or look alike."""
        val = None if split.validates_on_itself else LabelTokens(tokens.val)
        note, warnings = describe_labels(split.corpus.labels, LabelTokens(tokens.train), val)
        reporter.note(f"The texts have {note}.")
        for warning in warnings:
            reporter.warn(warning)

    def record_ids(self, tokens: Tokens, corpus: Corpus, end_of_text_id: int) -> Iterator[bytes]:
        """The codes of each text without its label."""
        size = np.asarray(tokens).itemsize
        return (codes[:-size] for codes in super().record_ids(tokens, corpus, end_of_text_id))

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        return counted(len(config.labels), "label")


def _labelled(corpora: Sequence[Corpus]) -> tuple[list[tuple[Corpus, Any]], list[Any]]:
    """The files whose texts have labels, each with its corpus, and the other files."""
    files = [(corpus, file) for corpus in corpora for file in corpus.files]
    found = [has_labels(file, corpus.encoding, corpus.text_key) for corpus, file in files]
    labelled = [entry for entry, has in zip(files, found, strict=True) if has]
    return labelled, [file for (_, file), has in zip(files, found, strict=True) if not has]


JOB = LabelsJob()
