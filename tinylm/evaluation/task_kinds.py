"""The tasks: each joins a dataset, an objective and its metrics, under its name in OBJECTIVES of config/training.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.evaluation.baselines import baseline_bits_per_byte
from tinylm.evaluation.classification import evaluate_classification, labelled_excerpt
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.preferences import evaluate_preferences, preference_excerpt
from tinylm.evaluation.result import Evaluation, pair_excerpt, text_excerpt, token_excerpt
from tinylm.evaluation.text import evaluate_chat, evaluate_masked, evaluate_text
from tinylm.evaluation.translation import baseline_bleu, evaluate_pairs
from tinylm.objectives.classification import Classification
from tinylm.objectives.distillation import Distillation
from tinylm.objectives.preferences import Preferences
from tinylm.objectives.tasks import Chat, MaskedToken, NextToken, SequenceToSequence, Task
from tinylm.reporter import Reporter
from tinylm.text.corpus_loading import EvaluationTokens
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer


class Evaluate(Protocol):
    """A function that computes the metrics of a model of the task's architecture on an encoded text.

    dtype: autocast dtype. ranks: the processes that share the work; all return the same result. Raises UsageError for
    settings that do not apply and for a text in which nothing is scored.
    """

    def __call__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        text: EvaluationTokens,
        config: EvaluationConfig,
        dtype: str,
        reporter: Reporter,
        ranks: Ranks = ONE_RANK,
    ) -> Evaluation: ...


@dataclass(frozen=True, kw_only=True)
class TaskKind:
    """A dataset, an objective and its metrics.

    dataset: joins encoded text with the objective for training and validation; arguments as for `make_task`
    evaluate: computes the metrics of a model on a text
    excerpt: (tokenizer, tokens, number of parameters) -> (N,), the beginning of the tokens, which the report evaluates
    baselines: (tokenizer, tokens (N,), training tokens, reporter) -> the scores of baselines on the text by name;
        training tokens are `None` if they cannot be read. `None` for an objective without baselines.
    compared: name of the metric of `evaluate` that `baselines` also computes
    """

    dataset: Callable[..., Task]
    evaluate: Evaluate
    excerpt: Callable[[Tokenizer, Tokens, int], np.ndarray] = token_excerpt
    baselines: Callable[[Tokenizer, np.ndarray, Tokens | None, Reporter], dict[str, float]] | None = None
    compared: str = "bits_per_byte"


TASKS = {
    "next-token": TaskKind(
        dataset=NextToken, evaluate=evaluate_text, excerpt=text_excerpt, baselines=baseline_bits_per_byte
    ),
    "masked-token": TaskKind(dataset=MaskedToken, evaluate=evaluate_masked, excerpt=text_excerpt),
    "sequence-to-sequence": TaskKind(
        dataset=SequenceToSequence,
        evaluate=evaluate_pairs,
        excerpt=pair_excerpt,
        baselines=baseline_bleu,
        compared="bleu",
    ),
    "distillation": TaskKind(
        dataset=Distillation, evaluate=evaluate_text, excerpt=text_excerpt, baselines=baseline_bits_per_byte
    ),
    "classification": TaskKind(dataset=Classification, evaluate=evaluate_classification, excerpt=labelled_excerpt),
    "chat": TaskKind(dataset=Chat, evaluate=evaluate_chat),
    "dpo": TaskKind(dataset=Preferences, evaluate=evaluate_preferences, excerpt=preference_excerpt),
}


def make_task(
    tokens: TokenFolder,
    tokenizer: Tokenizer,
    model: ModelConfig,
    training: TrainingConfig,
    **frozen: Any,
) -> Task:
    """The task of `training.objective` on encoded text.

    frozen: the models that the objective compares with: the `reference` of dpo, the `teachers` of distillation

    Raises UsageError if no pair fits the context, or if no conversation has a scored token within the context, and
    TinyLMError for plain text shorter than a window.
    """
    return TASKS[training.objective].dataset(tokens, tokenizer, model, training, **frozen)
