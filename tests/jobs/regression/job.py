"""Regression: predict a number from 0 to 99.99 for each text, by mean squared error; evaluated by R2 as well."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinylm.config.run import DataConfig, RunConfig
from tinylm.errors import UsageError
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.job import Reader, Scoring
from tinylm.jobs.scored import ScoredJob, ScoredSizes, ScoredTask, evaluation_batches
from tinylm.objectives.loss import LanguageModel, Loss, Objective
from tinylm.reporter import Reporter
from tinylm.text.batches import Batch
from tinylm.text.corpus import Corpus, CorpusStats, RecordCorpus, scan_stream
from tinylm.text.files import Progress, no_progress
from tinylm.text.parallel_encoding import Encoding, record_batches
from tinylm.text.readers import records
from tinylm.text.scored_tokens import CODES_PER_ID, FIRST, SCORED, ScoredTokens
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.attention import valid_tokens

PARTS = 100  # of a unit, in which numbers are stored
OUTPUTS = ("number",)


class NumberedText(NamedTuple):
    """A text and its number, in hundredths."""

    text: str
    hundredths: int


@dataclass(frozen=True)
class NumberCorpus(RecordCorpus):
    """JSON objects with a `text` and a `number`."""

    kind = "numbers"
    min_split = 0.0

    def has_records(self, file: Path) -> bool:
        return True

    def examples(self, progress: Progress = no_progress) -> Iterator[NumberedText]:
        for file in self.files:
            for location, record in records(file, self.encoding, ("text", "number"), progress):
                if not isinstance(record, dict) or not isinstance(record.get("number"), int | float):
                    raise UsageError(f"{location}: there is no 'number'; correct it.")
                yield NumberedText(record["text"], round(PARTS * record["number"]))

    def _documents(self, progress: Progress) -> Iterator[Iterable[str]]:
        return ([text] for text, _ in self.examples(progress))

    def _scan(self, progress: Progress) -> CorpusStats:
        examples = list(self.examples(progress))
        chunks = [chunk for text, _ in examples for chunk in (None, text)][1:]
        stats, numbers = scan_stream(iter(chunks)), [number for _, number in examples]
        return replace(stats, fingerprint=hashlib.sha256(json.dumps([stats.fingerprint, numbers]).encode()).hexdigest())


def encode(examples: list[NumberedText], tokenizer: Tokenizer) -> np.ndarray:
    parts = []
    for text, hundredths in examples:
        codes = CODES_PER_ID * np.append(tokenizer.encode(text), np.uint32(hundredths))
        codes[0] |= FIRST
        codes[-1] |= SCORED
        parts.append(codes)
    return np.concatenate(parts)


def predict(model: LanguageModel, batch: Batch) -> Tensor:
    """The number of each text, (B,), off the mean of its vectors."""
    assert batch.lengths is not None
    hidden = model(batch.ids, lengths=batch.lengths).hidden
    valid = valid_tokens(batch.lengths, hidden.shape[1]).unsqueeze(-1)
    return model.logits((hidden * valid).sum(1) / batch.lengths.unsqueeze(-1)).float()[:, 0]


def numbers_of(batch: Batch) -> Tensor:
    assert batch.mask is not None
    return batch.targets[batch.mask] / PARTS


def squared_error(model: LanguageModel, batch: Batch) -> Loss:
    errors = (predict(model, batch) - numbers_of(batch)) ** 2
    return Loss(errors.sum(), len(errors), errors.new_zeros(()))


class NumberTokens(ScoredTokens):
    packs = False


class Regression(ScoredTask):
    tokens_type = NumberTokens
    validation_objective: Objective = staticmethod(squared_error)

    def objective(self, progress: float) -> Objective:
        return squared_error


def evaluate(scoring: Scoring) -> Evaluation:
    def both(network: LanguageModel, batch: Batch) -> Tensor:
        return torch.stack([numbers_of(batch), predict(network, batch)], dim=1)

    batches = evaluation_batches(scoring, NumberTokens(scoring.text.codes))
    found = scoring.values(batches, both, None, "texts", columns=(2,)).astype(np.float64)
    errors = ((found[:, 0] - found[:, 1]) ** 2).sum()
    r2 = 1 - errors / ((found[:, 0] - found[:, 0].mean()) ** 2).sum()
    return Evaluation(
        unit="squared error", loss=float(errors / len(found)), tokens=0, texts=len(found), scores={"R2": float(r2)}
    )


class NumberSizes(ScoredSizes):
    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {}


class RegressionJob(ScoredJob):
    """Predict a number for each text."""

    corpus = NumberCorpus
    encoding = Encoding(record_batches, encode, CODES_PER_ID, PARTS * PARTS)
    tokens_type = NumberTokens
    sizes_type = NumberSizes
    task = Regression
    evaluate = staticmethod(evaluate)

    def accepted_keys(self, text_key: str) -> frozenset[str]:
        return frozenset((text_key, "number"))

    def recognises(self, corpora: Sequence[Corpus], reporter: Reporter) -> bool:
        files = [(corpus, file) for corpus in corpora for file in corpus.files]
        return all('"number"' in file.read_text(encoding="utf-8").partition("\n")[0] for _, file in files)

    def opened(self, corpora: list[Corpus], reader: Reader, reporter: Reporter) -> list[Corpus]:
        return [replace(corpus, labels=OUTPUTS) for corpus in corpora]

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        return "a number each"


JOB = RegressionJob()
