"""The job of texts with labels."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tinylm.config.run import DataConfig, RunConfig
from tinylm.errors import UsageError
from tinylm.jobs.job import Reader
from tinylm.jobs.labels.classify import classify_texts
from tinylm.jobs.labels.corpus import (
    LABEL_ENCODING,
    LABEL_KEY,
    LabelCorpus,
    LabelTokens,
    describe_labels,
    has_labels,
    with_labels,
)
from tinylm.jobs.labels.evaluation import evaluate_classification
from tinylm.jobs.labels.loss import Classification
from tinylm.jobs.scored import ScoredJob, ScoredSizes
from tinylm.reporter import Reporter, counted
from tinylm.text.compression import display_name
from tinylm.text.corpus import Corpus
from tinylm.text.encodings import first_text
from tinylm.text.recognition import reject_json
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.split import SplitCorpus
from tinylm.text.token_files import TokenFolder


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
        note, warnings = describe_labels(split.corpus.labels, LabelTokens(tokens.train), LabelTokens(tokens.val))
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
