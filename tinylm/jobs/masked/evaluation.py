"""Evaluation of an encoder: loss and accuracy on masked tokens, whose places are the same in every evaluation."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import TextLosses, default_batch_size, text_losses
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.job import EvaluationTokens
from tinylm.jobs.masked.windows import masked_evaluation_batches
from tinylm.objectives.loss import LanguageModel
from tinylm.reporter import Reporter
from tinylm.text.batches import Batch
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Encoder


def evaluate_masked(
    model: Encoder,
    tokenizer: Tokenizer,
    text: EvaluationTokens,
    config: EvaluationConfig,
    dtype: str,
    reporter: Reporter,
    ranks: Ranks = ONE_RANK,
) -> Evaluation:
    """Loss, perplexity and accuracy of `model` on masked tokens of a text, with a confidence interval of the loss.

    dtype: autocast dtype. ranks: the processes that share the work; all return the same result.

    Raises UsageError for fewer than 2 tokens.
    """
    tokens = text.codes
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}), and a masked token needs another one; give more text."
        )
    rows = config.batch_size or default_batch_size(model.context)
    batches = masked_evaluation_batches(tokens, model.context, rows, tokenizer.mask_id, tokenizer.vocab_size)
    with reporter.counting("scoring", None, "masked tokens") as advance:
        losses, accuracy = masked_losses_and_accuracy(model, batches, dtype, advance, ranks)
    result, blocks = losses.total, losses.blocks()
    of = "windows" if len(blocks.nats) == len(losses.nats) else "blocks of consecutive windows"
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        accuracy=accuracy,
        tokens=result.tokens,
        **blocks.interval(of, reporter),
    )


def masked_losses_and_accuracy(
    model: Encoder,
    batches: Iterable[Batch],
    dtype: str,
    progress: Callable[[int], None],
    ranks: Ranks = ONE_RANK,
) -> tuple[TextLosses, float]:
    """The losses of the masked tokens of each window, and the fraction of masked tokens whose logit is the largest.

    Arguments and errors: see `token_losses`.
    """
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

    losses = text_losses(model, batches, losses_of, dtype, progress, ranks)
    return losses, sum(ranks.gather(correct)) / losses.total.tokens
