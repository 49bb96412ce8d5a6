"""The job of plain text with teachers: learn from the distributions that they predict (Hinton et al. 2015)."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.training import TrainingConfig
from tinylm.jobs.text.job import NextToken, TextJob
from tinylm.objectives.loss import LanguageModel, Loss, Objective, in_chunks, routing_metrics
from tinylm.text.batches import Batch
from tinylm.transformer.layers import log_softmax


class Distillation(NextToken):
    """Predict each token of a text, and the distribution that teachers predict for it."""

    def __init__(self, *arguments: Any, teachers: Sequence[LanguageModel]) -> None:
        super().__init__(*arguments)
        training: TrainingConfig = arguments[-1]
        self._objective = functools.partial(distil, teachers=teachers, weight=training.teacher_weight)

    def objective(self, progress: float) -> Objective:
        return self._objective


def distil(model: LanguageModel, batch: Batch, teachers: Sequence[LanguageModel], weight: float) -> Loss:
    """-sum_t sum_v r_t(v) log p(v | tokens before t) with r_t = weight * q_t + (1 - weight) * onehot(target t).

    q is the mean of the teachers' distributions over the ids of the model; their other ids, which no token has, are
    left out. The logits of teachers are computed in the same chunks as those of the model.
    """
    output, targets = model(batch.ids), batch.targets.flatten()  # (B*T,)
    with torch.no_grad():
        taught = [(teacher, teacher(batch.ids).hidden.flatten(0, 1)) for teacher in teachers]  # (B*T, D) of each

    def losses(hidden: Tensor, rows: Tensor) -> list[Tensor]:
        """hidden: (N, D). rows: (1, N), their numbers in the batch."""
        log_p = log_softmax(model.logits(hidden))  # (N, V)
        with torch.no_grad():
            q = log_p.new_zeros(log_p.shape)
            for teacher, vectors in taught:
                logits = teacher.logits(vectors[rows[0]])[:, : model.vocab_size]  # (N, V)
                q += log_softmax(logits).exp() / len(taught)
            wanted = (weight * q).scatter_add(1, targets[rows[0], None], q.new_full((len(q), 1), 1 - weight))
        return [-(wanted * log_p).sum()]

    rows = torch.arange(len(targets), device=targets.device)[None]
    (total,) = in_chunks(model, losses, output.hidden.flatten(0, 1), rows)
    return Loss(total, batch.n_targets, output.aux, routing_metrics(output))


class DistillationJob(TextJob):
    """A decoder predicts the next token of a text, and what its teachers predict there."""

    task = Distillation

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        return f"teachers: {', '.join(teacher.path for teacher in config.teachers)}"


JOB = DistillationJob()
