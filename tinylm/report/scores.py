"""The evaluation of a model on the beginning of its validation text, beside baselines without a neural network."""

from pathlib import Path
from typing import Any

from tinylm.errors import TinyLMError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.models.model import Model
from tinylm.report.curves import number
from tinylm.text.corpus import document_end
from tinylm.text.corpus_loading import EvaluationTokens
from tinylm.text.run_tokens import reopen_part
from tinylm.text.sharded_tokens import Tokens


def score_validation(model: Model, run: Path) -> dict[str, Any] | None:
    """The scores of a model on the beginning of its validation text: see `TaskKind.excerpt`.

    `metrics`: values by name, as in Evaluation. `compared`: the name of the metric that the baselines have as well.
    `baselines`: the value of this metric by baseline. Returns `None` for a model without validation text.

    Raises TinyLMError if the text cannot be read, and UsageError if nothing is scored.
    """
    if model.data is None:
        return None
    task, tokenizer, reporter = model.task_kind(model.data.kind), model.tokenizer, model.reporter
    parameters = sum(parameter.numel() for parameter in model.network.parameters())
    tokens = task.excerpt(tokenizer, reopen_part(run, model.data, tokenizer, "val"), parameters)
    text = EvaluationTokens(model.data.kind, tokens, document_end=document_end(model.data.format))
    result = task.evaluate(model.network, tokenizer, text, EvaluationConfig(), model.dtype, reporter)
    baselines = {} if task.baselines is None else task.baselines(tokenizer, tokens, _training(model, run), reporter)
    return {
        "metrics": {k: number(value, 6) for k, value in result.to_json().items() if isinstance(value, int | float)},
        "baselines": {name: number(value) for name, value in baselines.items()},
        "compared": task.compared,
    }


def _training(model: Model, run: Path) -> Tokens | None:
    """The tokens of the training text; `None` if they cannot be read, since some baselines do not need them."""
    assert model.data is not None
    try:
        tokens = reopen_part(run, model.data, model.tokenizer, "train")
        tokens[:1]  # checks the first token file; the baselines read no other
        return tokens
    except TinyLMError:
        return None
