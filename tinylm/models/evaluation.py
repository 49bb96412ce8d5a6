"""The evaluation of a model on a text: the text is read and encoded on rank 0, and all ranks share the work."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tinylm.config.training import corpora_of
from tinylm.distributed.ranks import Ranks
from tinylm.errors import TinyLMError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.result import Evaluation
from tinylm.kernels.allocator import keep_freed_blocks
from tinylm.text.answer_spans import ChatFormat, chat_format, read_template
from tinylm.text.chat_corpus import ChatCorpus
from tinylm.text.chat_template import CHATML
from tinylm.text.corpus_loading import EvaluationTokens, TextSource, evaluation_tokens
from tinylm.text.run_tokens import reopen_ids
from tinylm.text.sharded_tokens import Tokens

if TYPE_CHECKING:
    from tinylm.models.model import Model


def evaluate_model(model: "Model", source: TextSource | None, config: EvaluationConfig, ranks: Ranks) -> Evaluation:
    """The metrics of the model on a text. source: `None` for the validation text of the run.

    All ranks call this together. Raises the errors of `Model.evaluate`.
    """
    text = _shared_tokens(model, source, ranks)
    torch.set_num_threads(ranks.share_threads(torch.get_num_threads()))
    keep_freed_blocks()
    task = model.task_kind(text.kind)
    result = task.evaluate(model.network, model.tokenizer, text, config, model.dtype, model.reporter, ranks)
    if not config.baselines or task.baselines is None:
        return result
    scores = None
    if ranks.is_first:
        scores = task.baselines(model.tokenizer, text.codes, _training_tokens(model), model.reporter)
    return replace(result, baselines=ranks.first(scores))


def _shared_tokens(model: "Model", source: TextSource | None, ranks: Ranks) -> EvaluationTokens:
    """The encoded text, on all ranks."""
    ranks.require_device(model.network.device.type)
    if not ranks.is_first:
        ranks.wait()
        kind, *others = ranks.first(None)
        return EvaluationTokens(kind, ranks.broadcast({})["codes"].numpy(), *others)
    text = _encode(model, source)
    ranks.announce()
    if ranks.size > 1:
        ranks.first([text.kind, list(text.names), text.document_end])
        ranks.broadcast({"codes": torch.from_numpy(np.array(text.codes))})
    return text


def _encode(model: "Model", source: TextSource | None) -> EvaluationTokens:
    def format_of(text: TextSource) -> ChatFormat:
        template = read_template(text.chat_template) if text.chat_template else model.chat_template or CHATML
        return chat_format(template, model.tokenizer, text.train_on or "assistant")

    kinds = corpora_of(model.architecture)
    chat = format_of if ChatCorpus.kind in kinds else None
    return evaluation_tokens(source, model.path, model.data, model.tokenizer, kinds[0], model.reporter, chat)


def _training_tokens(model: "Model") -> Tokens | None:
    """Tokens of the training text; `None`, with a warning, if there are none or they cannot be read."""
    if model.data is None:
        model.reporter.warn(f"{model.path} has no training text of its own, so baselines that need it are left out.")
        return None
    try:
        tokens = reopen_ids(model.path, model.data, model.tokenizer, "train")
        tokens[:1]  # checks the first token file; the baselines read no other
        return tokens
    except TinyLMError as error:
        model.reporter.warn(f"Baselines that need the training text are left out: {error}")
        return None
