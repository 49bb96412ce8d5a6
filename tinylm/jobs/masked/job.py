"""The job of plain text with masked tokens, whose places are the same in every evaluation."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.errors import UsageError
from tinylm.evaluation.loop import TextLosses
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.job import Scoring
from tinylm.jobs.masked.fill_mask import fill_mask
from tinylm.jobs.masked.task import MaskedToken, masked_evaluation_batches
from tinylm.jobs.text.job import TextJob
from tinylm.objectives.loss import LanguageModel
from tinylm.text.batches import Batch


def evaluate_masked(scoring: Scoring) -> Evaluation:
    """Loss, perplexity and accuracy of the model on masked tokens of a text, with a confidence interval of the loss.

    Raises UsageError for fewer than 2 tokens.
    """
    tokens, tokenizer, context = scoring.text.codes, scoring.tokenizer, scoring.model.context
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}), and a masked token needs another one; give more text."
        )
    rows = scoring.rows(context)
    batches = masked_evaluation_batches(tokens, context, rows, tokenizer.mask_id, tokenizer.vocab_size)
    losses, accuracy = masked_losses_and_accuracy(scoring, batches)
    result, blocks = losses.total, losses.blocks()
    of = "windows" if len(blocks.nats) == len(losses.nats) else "blocks of consecutive windows"
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        accuracy=accuracy,
        tokens=result.tokens,
        **blocks.interval(of, scoring.reporter),
    )


def masked_losses_and_accuracy(scoring: Scoring, batches: Iterable[Batch]) -> tuple[TextLosses, float]:
    """The losses of the masked tokens of each window, and the fraction of masked tokens whose logit is the largest."""
    correct = 0

    def losses_of(model: LanguageModel, batch: Batch) -> Tensor:
        nonlocal correct
        assert batch.mask is not None
        output, targets = model(batch.ids), batch.targets[batch.mask]  # (N,)
        logits = model.logits(output.hidden[batch.mask])  # (N, V)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(precise, targets, reduction="none")
        # Counted last: a batch that runs out of memory above is repeated in parts, and must not be counted twice.
        correct += int((logits.argmax(dim=-1) == targets).sum())
        return losses

    losses = scoring.losses(batches, losses_of, None, "masked tokens")
    return losses, sum(scoring.ranks.gather(correct)) / losses.total.tokens


class MaskedJob(TextJob):
    """An encoder predicts masked tokens of a text."""

    task = MaskedToken
    evaluate = staticmethod(evaluate_masked)
    baselines = None
    fill_mask = staticmethod(fill_mask)


JOB = MaskedJob()
