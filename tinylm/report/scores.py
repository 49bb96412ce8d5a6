"""The evaluation of a model on the beginning of its validation text, beside baselines without a neural network."""

import bisect
from pathlib import Path
from typing import Any

import numpy as np

from tinylm.errors import TinyLMError
from tinylm.evaluation.baselines import MAX_BYTES, baseline_bits_per_byte
from tinylm.evaluation.chat import evaluate_chat
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.masked import evaluate_masked
from tinylm.evaluation.pair_baselines import MAX_TRAINING_PAIRS, baseline_bleu
from tinylm.evaluation.pairs import evaluate_pairs
from tinylm.evaluation.result import Evaluation
from tinylm.evaluation.text import evaluate_text
from tinylm.loaded_model import Model
from tinylm.model.decoder import Decoder
from tinylm.model.encoder import Encoder
from tinylm.model.encoder_decoder import EncoderDecoder
from tinylm.report.curves import number
from tinylm.text.corpus_loading import EvaluationTokens
from tinylm.text.pair_batches import PairTokens
from tinylm.text.run_tokens import reopen_part
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.tokenizer import Tokenizer

MAX_FLOPS, MIN_TOKENS = 1e12, 1000
MAX_BYTES_SCORED = 50_000  # in bytes, so that models with different tokenizers are compared on the same text
MAX_TOKENS = 50_000  # of pairs and conversations
MAX_PAIRS, MIN_PAIRS = 200, 20
MAX_TRAINING_TOKENS = 20_000_000  # of pairs


def score_validation(model: Model, run: Path) -> dict[str, Any] | None:
    """The scores of a model on the beginning of its validation text, from about MAX_FLOPS operations at most,
    but at least MIN_TOKENS tokens or MIN_PAIRS pairs.

    `metrics`: values by name, as in Evaluation. `compared`: the name of the metric that the baselines have as well.
    `baselines`: its value by baseline. `None` for a model
    without validation text. Raises TinyLMError if the text is no longer there, and UsageError if nothing is scored.
    """
    if model.data is None:
        return None
    validation = reopen_part(run, model.data, model.tokenizer, "val")
    parameters = sum(parameter.numel() for parameter in model.network.parameters())
    tokens = np.asarray(validation[: int(min(MAX_TOKENS, max(MIN_TOKENS, MAX_FLOPS / (2 * parameters))))])
    tokenizer, config, dtype, reporter = model.tokenizer, EvaluationConfig(), model.dtype, model.reporter
    baselines: dict[str, float] = {}
    match model.network:
        case Decoder() as decoder if model.data.kind == "chat":
            result = evaluate_chat(decoder, tokenizer, tokens, config, dtype, reporter)
        case Decoder() as decoder:
            tokens = first_bytes(tokenizer, tokens, MAX_BYTES_SCORED)
            text = EvaluationTokens("text", tokens)
            result = evaluate_text(decoder, tokenizer, text, config, dtype, reporter)
            training = _training(model, run)
            training = None if training is None else np.asarray(training[:MAX_BYTES])
            baselines = baseline_bits_per_byte(tokenizer, tokens, training, reporter)
        case Encoder() as encoder:
            tokens = first_bytes(tokenizer, tokens, MAX_BYTES_SCORED)
            result = evaluate_masked(encoder, tokenizer, tokens, config, dtype, reporter)
        case EncoderDecoder() as encoder_decoder:
            end = tokenizer.end_of_text_id
            count = _affordable_pairs(parameters, tokens, end, config.beams)
            chosen = first_pairs(validation, end, count, MAX_TOKENS)
            result = evaluate_pairs(encoder_decoder, tokenizer, chosen, config, dtype, reporter)
            training = _training(model, run)
            training_pairs = (
                None if training is None else first_pairs(training, end, MAX_TRAINING_PAIRS, MAX_TRAINING_TOKENS)
            )
            pairs = PairTokens(chosen, end)
            baselines = baseline_bleu(
                tokenizer, pairs, None if training_pairs is None else PairTokens(training_pairs, end)
            )
        case _:
            return None
    return _section(result, baselines, "bleu" if isinstance(model.network, EncoderDecoder) else "bits_per_byte")


def _section(result: Evaluation, baselines: dict[str, float], compared: str) -> dict[str, Any]:
    metrics = {name: number(value, 6) for name, value in result.to_json().items() if isinstance(value, int | float)}
    shown = {name: number(value) for name, value in baselines.items()}
    return {"metrics": metrics, "baselines": shown, "compared": compared}


def _training(model: Model, run: Path) -> Tokens | None:
    """The training text; `None` if it cannot be read, since some baselines do not need it."""
    assert model.data is not None
    try:
        return reopen_part(run, model.data, model.tokenizer, "train")
    except TinyLMError:
        return None


def _affordable_pairs(parameters: int, tokens: np.ndarray, end_of_text_id: int, beams: int) -> int:
    """The number of pairs like those of `tokens` that a model translates with about MAX_FLOPS operations."""
    tokens_per_pair = 2 * len(tokens) / max(1, int((tokens == end_of_text_id).sum()))
    return int(min(MAX_PAIRS, max(MIN_PAIRS, MAX_FLOPS / (2 * parameters * beams * tokens_per_pair))))


def first_bytes(tokenizer: Tokenizer, tokens: np.ndarray, limit: int) -> np.ndarray:
    """The longest beginning of the tokens whose text has at most `limit` bytes."""
    lengths = range(len(tokens) + 1)
    return tokens[: bisect.bisect_right(lengths, limit, key=lambda n: tokenizer.decoded_size(tokens[:n])[1]) - 1]


def first_pairs(tokens: Tokens, end_of_text_id: int, count: int, limit: int) -> np.ndarray:
    """The tokens of the first pairs: at most `count` whole pairs and `limit` tokens.

    Each source and target ends with the end-of-text id, unless the last one of `tokens` has none.
    """
    ids = np.asarray(tokens[:limit])
    ends = np.flatnonzero(ids == end_of_text_id)
    if len(tokens) <= limit and len(ends) < 2 * count:
        return ids
    whole = min(count, len(ends) // 2)
    return ids[: int(ends[2 * whole - 1]) + 1 if whole else 0]
