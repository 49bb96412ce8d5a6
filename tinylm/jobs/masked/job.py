"""The job of plain text with masked tokens."""

from tinylm.jobs.masked.evaluation import evaluate_masked
from tinylm.jobs.masked.fill_mask import fill_mask
from tinylm.jobs.masked.task import MaskedToken
from tinylm.jobs.text.job import TextJob


class MaskedJob(TextJob):
    """An encoder predicts masked tokens of a text."""

    task = MaskedToken
    evaluate = staticmethod(evaluate_masked)
    baselines = None
    fill_mask = staticmethod(fill_mask)


JOB = MaskedJob()
