"""Direct preference optimisation, DPO: learn to prefer one of two answers (Rafailov et al. 2023)."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tinylm.config.training import TrainingConfig
from tinylm.jobs.preferences.corpus import PreferenceTokens
from tinylm.jobs.scored import ScoredTask
from tinylm.objectives.loss import LanguageModel, Loss, Objective, decoder_output, routing_metrics, target_losses
from tinylm.text.batches import Batch
from tinylm.transformer.architectures import Output

Reference = Callable[[], AbstractContextManager[LanguageModel]]  # the model that training started from


class Preferences(ScoredTask):
    """Prefer the chosen answer of each preference to the rejected one, more than the reference does."""

    tokens_type = PreferenceTokens

    def __init__(self, *arguments: Any, reference: Reference) -> None:
        super().__init__(*arguments)
        training: TrainingConfig = arguments[-1]
        self.validation_objective = functools.partial(dpo, reference=reference, beta=training.dpo_beta)

    def objective(self, progress: float) -> Objective:
        """As `Task.objective`."""
        return self.validation_objective


def dpo(model: LanguageModel, batch: Batch, reference: Reference, beta: float) -> Loss:
    """-sum log sigmoid(margin) over the preferences of a PreferenceBatch (Rafailov et al. 2023, equation 7).

    The margin of a preference is beta (log p(chosen) - log p(rejected)) minus the same of the reference, where p is the
    probability of the scored tokens given the prompt. Metrics: the mean `margin`, and the `accuracy`, which is the
    share of preferences with a positive one.
    """
    output = decoder_output(model, batch)
    with reference() as other:  # frozen; `no_grad` would choose other kernels, which round differently in bf16
        base = log_ratios(other, decoder_output(other, batch), batch).detach()
    margins = beta * (log_ratios(model, output, batch) - base)  # (P,)
    metrics = {"margin": margins.detach().mean(), "accuracy": (margins > 0).float().mean()}
    return Loss(-F.logsigmoid(margins).sum(), len(margins), output.aux, metrics | routing_metrics(output))


def log_ratios(model: LanguageModel, output: Output, batch: Batch) -> Tensor:
    """log p(chosen) - log p(rejected) of each preference in nats, (P,)."""
    chosen, rejected = answer_losses(target_losses(model, output, batch), batch).T  # (P,) and (P,)
    return rejected - chosen


def answer_losses(losses: Tensor, batch: Batch) -> Tensor:
    """The losses of the targets, (N,), summed over the chosen and the rejected answer of each preference: (P, 2)."""
    assert batch.segments is not None and batch.mask is not None
    texts = batch.segments.amax(dim=1)  # (B,), texts per row
    first = texts.cumsum(0) - texts  # (B,), number of the first text of each row
    text = (first.unsqueeze(1) + batch.segments - 1)[batch.mask]  # (N,), number of the text of each target
    return losses.new_zeros(int(texts.sum())).index_add(0, text, losses).view(-1, 2)  # (P, 2)
