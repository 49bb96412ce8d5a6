"""The beginning of an encoded text that is evaluated with a limited amount of computation, as in the report."""

import bisect

import numpy as np

from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.tokenizer import Tokenizer

MAX_FLOPS, MIN_TOKENS = 1e12, 1000
MAX_BYTES_SCORED = 50_000  # of plain text; a limit in tokens would give models with other tokenizers other texts
MAX_TOKENS = 50_000
MAX_PAIRS, MIN_PAIRS = 200, 20


def token_excerpt(tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
    """The first tokens of a text, (N,): as many as a model with this number of parameters scores with about MAX_FLOPS
    operations, from MIN_TOKENS to MAX_TOKENS.
    """
    return np.asarray(tokens[: int(min(MAX_TOKENS, max(MIN_TOKENS, MAX_FLOPS / (2 * parameters))))])


def text_excerpt(tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
    """As `token_excerpt`, but with at most MAX_BYTES_SCORED bytes of text."""
    return first_bytes(tokenizer, token_excerpt(tokenizer, tokens, parameters), MAX_BYTES_SCORED)


def pair_excerpt(tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
    """The tokens of the first pairs, (N,): as many pairs as a model with this number of parameters translates with
    about MAX_FLOPS operations, from MIN_PAIRS to MAX_PAIRS, but at most MAX_TOKENS tokens.
    """
    end = tokenizer.end_of_text_id
    beginning = token_excerpt(tokenizer, tokens, parameters)
    tokens_per_pair = 2 * len(beginning) / max(1, int((beginning == end).sum()))
    flops = 2 * parameters * EvaluationConfig.beams * tokens_per_pair
    return first_pairs(tokens, end, int(min(MAX_PAIRS, max(MIN_PAIRS, MAX_FLOPS / flops))), MAX_TOKENS)


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
