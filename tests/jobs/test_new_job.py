"""A new objective is a row in JOBS and a row in TASKS; no other code changes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tinylm
from tests.shell import story
from tinylm.config.jobs import JOBS, JobRow
from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import evaluate_loss
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.job import EvaluationTokens
from tinylm.jobs.run_tokens import reopen_ids
from tinylm.jobs.text.job import TextJob
from tinylm.jobs.text.task import NextToken
from tinylm.models.model import Model
from tinylm.objectives.loss import next_token
from tinylm.report.predictions import score_validation
from tinylm.run_directory.loading import read_config
from tinylm.text.batches import Batch, evaluation_batches
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder

CONTEXT = 16
SHAPE = {"layers": 1, "heads": 2, "width": 16, "context": CONTEXT}


def last_only(batch: Batch) -> Batch:
    """The batch, in which only the last target of each row counts."""
    mask = torch.zeros(batch.targets.shape, dtype=torch.bool)
    mask[:, -1] = True
    return dataclasses.replace(batch, mask=mask)


class LastToken(NextToken):
    """A toy objective: predict the last token of each window."""

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        super().__init__(tokens, tokenizer, model, training)
        windows = self.batch
        self.batch = lambda number: last_only(windows(number))

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return map(last_only, super().validation_batches(rows, max_tokens))


def evaluate_last(
    model: Decoder, tokenizer: Tokenizer, text: EvaluationTokens, config: EvaluationConfig, dtype: str, *_: Any
) -> Evaluation:
    batches = map(last_only, evaluation_batches(text.codes, model.context, config.batch_size or 4))
    found = evaluate_loss(model, next_token, batches, dtype)
    return Evaluation(loss=found.loss, perplexity=found.perplexity, tokens=found.tokens)


class LastJob(TextJob):
    """Predict the last token of each window."""

    task = LastToken
    evaluate = staticmethod(evaluate_last)
    baselines = None


JOB = LastJob()


def losses_of_last_tokens(model: Model, ids: np.ndarray) -> list[float]:
    """-log p of the last token of each window, one window at a time."""
    windows = [ids[start : start + CONTEXT + 1] for start in range(0, len(ids) - 1, CONTEXT)]
    logits = [model.logits([window[:-1].tolist()])[0, -1] for window in windows]
    return [F.cross_entropy(row, torch.tensor(int(w[-1]))).item() for row, w in zip(logits, windows, strict=True)]


def test_an_objective_of_the_tables_is_trained_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text(story(3000))
    last = "masked-token"  # stands for a new name, since the names are fixed when the tables are imported
    row = JobRow(name="last", data="text", noun="plain text", architectures=("decoder",), module=__name__)
    monkeypatch.setitem(JOBS, last, row)
    for other in ("next-token", "distillation", "chat", "dpo"):  # the first objective that fits is the default
        monkeypatch.setitem(JOBS, other, dataclasses.replace(JOBS[other], architectures=()))
    settings: dict[str, Any] = {**SHAPE, "batch_size": 4, "eval_every": 3, "steps": 3, "device": "cpu"}
    settings["val_fraction"] = 0.1
    result = tinylm.train(tmp_path / "text", out=tmp_path / "run", **settings)
    resumed = tinylm.train(resume=result.run, steps=6)
    assert (result.step, resumed.step) == (3, 6)
    config = read_config(result.run)
    assert config.objective == last

    model = resumed.load()
    losses = losses_of_last_tokens(model, np.asarray(reopen_ids(result.run, config.data, model.tokenizer, "val")))
    assert resumed.best_val_loss == pytest.approx(np.mean(losses), rel=1e-4)
    evaluation = model.evaluate()
    assert evaluation.loss == pytest.approx(np.mean(losses), rel=1e-4)
    assert evaluation.tokens == len(losses)
    scores = score_validation(model, result.run)
    assert scores["metrics"] == {name: pytest.approx(value, rel=1e-5) for name, value in evaluation.to_json().items()}
    assert scores["baselines"] == {}
