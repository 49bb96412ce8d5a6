"""The job of plain text with teachers."""

from tinylm.config.run import DataConfig, RunConfig
from tinylm.jobs.distillation.loss import Distillation
from tinylm.jobs.text.job import TextJob


class DistillationJob(TextJob):
    """A decoder predicts the next token of a text, and what its teachers predict there."""

    task = Distillation

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        """The models to learn from."""
        return f"teachers: {', '.join(teacher.path for teacher in config.teachers)}"


JOB = DistillationJob()
