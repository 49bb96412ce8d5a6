"""The job of preferences: direct preference optimisation, DPO (Rafailov et al. 2023), and its evaluation."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.training import TrainingConfig
from tinylm.evaluation.loop import TextLosses, mean_interval
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.chat.job import ChatJob
from tinylm.jobs.job import Scoring
from tinylm.jobs.preferences.corpus import PreferenceCorpus, PreferenceTokens
from tinylm.jobs.scored import ScoredJob, ScoredSizes, ScoredTask, evaluation_batches
from tinylm.objectives.loss import (
    LanguageModel,
    Loss,
    Objective,
    decoder_output,
    next_token_losses,
    routing_metrics,
    target_losses,
)
from tinylm.reporter import counted
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
        return self.validation_objective


def dpo(model: LanguageModel, batch: Batch, reference: Reference, beta: float) -> Loss:
    """-sum log sigmoid(margin) over the preferences of a PreferenceBatch (Rafailov et al. 2023, equation 7).

    The margin of a preference is beta (log p(chosen) - log p(rejected)) minus the same of the reference, where p is the
    probability of the scored tokens given the prompt. Metrics: the mean `margin`, and the `accuracy`, which is the
    share of preferences with a positive one.
    """
    output = decoder_output(model, batch)
    with reference() as other:  # frozen; `no_grad` would choose other kernels, which round differently in bf16
        base = _log_ratios(other, decoder_output(other, batch), batch).detach()
    margins = beta * (_log_ratios(model, output, batch) - base)  # (P,)
    metrics = {"margin": margins.detach().mean(), "accuracy": (margins > 0).float().mean()}
    return Loss(-F.logsigmoid(margins).sum(), len(margins), output.aux, metrics | routing_metrics(output))


def _log_ratios(model: LanguageModel, output: Output, batch: Batch) -> Tensor:
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


def evaluate_preferences(scoring: Scoring) -> Evaluation:
    """The share of preferences whose chosen answer is likelier, and the margin, log p(chosen) - log p(rejected).

    The loss is that of the tokens of chosen answers. The text has the codes of `PreferenceTokens`.

    Raises UsageError if no preference can be scored within the context.
    """
    tokens = PreferenceTokens(scoring.text.codes)
    batches = evaluation_batches(scoring, tokens)
    count = len(tokens.examples(scoring.model.context))
    losses = scoring.losses(batches, next_token_losses, count, "preferences")
    nats, sizes = losses.nats.reshape(-1, 2), losses.tokens.reshape(-1, 2)  # (P, 2)
    margins = nats[:, 1] - nats[:, 0]
    chosen = TextLosses(nats[:, 0], sizes[:, 0])
    return Evaluation(
        loss=chosen.total.loss,
        perplexity=chosen.total.perplexity,
        tokens=chosen.total.tokens,
        pairs=len(margins),
        accuracy=float((margins > 0).mean()),
        margin=float(margins.mean()),
        **chosen.shuffled_groups().interval("preferences", scoring.reporter),
        **mean_interval("accuracy", margins > 0),
        **mean_interval("margin", margins),
    )


class PreferenceSizes(ScoredSizes):
    """Preferences, of which both texts are in the same row."""

    # docs/other-objectives.md, "Preferences"
    lr_factor = 0.025
    unvalidated = (1, 50)
    is_brief = True


class PreferencesJob(ChatJob):
    """A decoder learns to prefer one of two answers."""

    tokens_type = PreferenceTokens
    sizes_type = PreferenceSizes
    excerpt = ScoredJob.excerpt
    corpus = PreferenceCorpus
    task = Preferences
    evaluate = staticmethod(evaluate_preferences)

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        return counted(data.documents // 2, "preference")


JOB = PreferencesJob()
