"""Evaluation of an encoder on a text: tokens are masked and predicted. The masks are the same in every evaluation."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F

from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import EvaluationLoss, default_batch_size, evaluate_loss
from tinylm.evaluation.result import Evaluation
from tinylm.model.encoder import Encoder
from tinylm.objectives.loss import LanguageModel, Loss
from tinylm.ranks import ONE_RANK, Ranks
from tinylm.reporter import Reporter
from tinylm.text.batches import Batch
from tinylm.text.token_masking import masked_evaluation_batches
from tinylm.text.tokenizer import Tokenizer


def evaluate_masked(
    model: Encoder,
    tokenizer: Tokenizer,
    tokens: np.ndarray,
    config: EvaluationConfig,
    dtype: str,
    reporter: Reporter,
    ranks: Ranks = ONE_RANK,
) -> Evaluation:
    """Loss, perplexity and accuracy of `model` on masked tokens of the text `tokens` (N,). `dtype`: format of autocast.
    `ranks`: share the work, and get the same result.

    Raises UsageError for fewer than 2 tokens.
    """
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}): one to predict and one to predict from; give more text."
        )
    rows = config.batch_size or default_batch_size(model.context)
    batches = masked_evaluation_batches(tokens, model.context, rows, tokenizer.mask_id, tokenizer.vocab_size)
    with reporter.counting("scoring", None, "masked tokens") as advance:
        result, accuracy = masked_loss_and_accuracy(model, batches, dtype, advance, ranks)
    return Evaluation(loss=result.loss, perplexity=result.perplexity, accuracy=accuracy, tokens=result.tokens)


def masked_loss_and_accuracy(
    model: Encoder,
    batches: Iterable[Batch],
    dtype: str,
    progress: Callable[[int], None],
    ranks: Ranks = ONE_RANK,
) -> tuple[EvaluationLoss, float]:
    """The loss over the masked tokens, and the fraction of them that have the largest logit; see `evaluate_loss`."""
    correct = 0

    def objective(model: LanguageModel, batch: Batch) -> Loss:
        nonlocal correct
        assert batch.mask is not None
        output, targets = model(batch.ids), batch.targets[batch.mask]  # (N,)
        logits = model.logits(output.hidden[batch.mask])  # (N, V)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(precise, targets, reduction="sum")
        # Counted last: a batch that runs out of memory above is repeated in parts, and must not be counted twice.
        correct += int((logits.argmax(dim=-1) == targets).sum())
        return Loss(total, batch.n_targets, output.aux)

    result = evaluate_loss(model, objective, batches, dtype, progress, ranks)
    return result, sum(ranks.gather(correct)) / result.tokens
