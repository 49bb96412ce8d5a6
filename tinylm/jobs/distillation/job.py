"""The job of plain text with teachers."""

from tinylm.jobs.distillation.loss import Distillation
from tinylm.jobs.text.job import TextJob


class DistillationJob(TextJob):
    """A decoder predicts the next token of a text, and what its teachers predict there."""

    task = Distillation


JOB = DistillationJob()
