"""Baselines without a neural network: bits per byte of gzip, xz and an order-5 character model."""

import gzip
import lzma

import numpy as np

from tinylm.reporter import Reporter
from tinylm.system.process_signals import interruptible
from tinylm.text.files import code_points
from tinylm.text.token_files import Tokens
from tinylm.text.tokenizer import Tokenizer

SECONDS_PER_BYTE = 1.5e-6  # on one core, of the texts together
ORDER = 5  # longest history of the character model, in characters
MAX_BYTES = 5_000_000  # of each text
MIN_DICTIONARY = 4096  # of xz, in bytes


def baseline_bits_per_byte(
    tokenizer: Tokenizer, tokens: np.ndarray, training: Tokens | None, reporter: Reporter
) -> dict[str, float]:
    """Bits per byte of the text `tokens` (N,) under each baseline, by name.

    training: tokens (M,) of the text that the character model is fitted to; `None` leaves that model out.

    Empty for tokens that encode no text, and without a compressor that makes the text larger, as all do with the
    shortest. Only the first 5 MB of each text are used.
    """

    def beginning(ids: Tokens) -> str:
        # Every token encodes at least one byte, except special tokens, which are few.
        return tokenizer.decode(np.asarray(ids[:MAX_BYTES])).encode()[:MAX_BYTES].decode("utf-8", "ignore")

    def scores() -> dict[str, float]:
        text = beginning(tokens)
        if not text:  # special tokens only
            return {}
        model = {} if training is None else {"order-5 characters": ngram_bits_per_byte(beginning(training), text)}
        compressed = compression_bits_per_byte(text)
        return {name: bits for name, bits in compressed.items() if bits < 8} | model

    if tokenizer.decoded_size(tokens)[1] > MAX_BYTES:
        reporter.note(f"The baselines use the first {MAX_BYTES // 10**6} MB.")
    return interruptible(scores)  # xz takes five seconds for 5 MB


def compression_bits_per_byte(text: str) -> dict[str, float]:
    """Bits per byte of the text under gzip -9 and xz -9, by name."""
    data = text.encode()
    dictionary = max(MIN_DICTIONARY, len(data))  # xz -9 allocates 674 MiB for a dictionary of 64 MiB
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    return {
        "gzip": 8 * len(gzip.compress(data, 9, mtime=0)) / len(data),
        "xz": 8 * len(lzma.compress(data, filters=filters)) / len(data),
    }


def ngram_bits_per_byte(training_text: str, text: str, order: int = ORDER) -> float:
    """Bits per byte of `text` under a character model: n-grams of the training text, interpolated as by Witten and Bell
    (1991).

    p_k(c | h) = (count(hc) + kinds(h) p_{k-1}(c | h')) / (count(h) + kinds(h)), where h is a history of k characters,
    kinds(h) is the number of distinct characters that follow h in training, h' is h without its first character, and
    p_{-1} is uniform over the characters of both texts. If h does not occur in training, p_k = p_{k-1}.

    order: length of the longest history, in characters.
    """
    alphabet = np.unique(np.concatenate((code_points(training_text), code_points(text))))
    training = np.searchsorted(alphabet, code_points(training_text))
    scored = np.searchsorted(alphabet, code_points(text))
    probability = np.full(len(scored), 1 / len(alphabet))
    # A history is represented by its rank among all histories of its length. The empty history is 0.
    training_history = np.zeros(len(training), dtype=np.int64)
    scored_history = np.zeros(len(scored), dtype=np.int64)
    for length in range(order + 1):
        if length:
            training_history, scored_history = _extend_histories(
                training, training_history, scored, scored_history, length, alphabet
            )
        probability[length:] = _interpolate(
            training[length:],
            training_history[length:],
            scored[length:],
            scored_history[length:],
            probability[length:],
            len(alphabet),
        )
    return float(-np.log2(probability).sum() / len(text.encode()))


def _extend_histories(
    training: np.ndarray,
    training_history: np.ndarray,
    scored: np.ndarray,
    scored_history: np.ndarray,
    length: int,
    alphabet: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Extend the history of every character by the character `length` positions before it.

    The first `length` characters have no such history, and get the placeholder -1 in the ranking.
    """

    def extend(symbols: np.ndarray, history: np.ndarray) -> np.ndarray:
        extended = np.full(len(symbols), -1, dtype=np.int64)
        extended[length:] = history[length:] * len(alphabet) + symbols[:-length]
        return extended

    both = np.concatenate((extend(training, training_history), extend(scored, scored_history)))
    _, ranks = np.unique(both, return_inverse=True)
    return ranks[: len(training)], ranks[len(training) :]


def _interpolate(
    training: np.ndarray,
    training_history: np.ndarray,
    scored: np.ndarray,
    scored_history: np.ndarray,
    shorter: np.ndarray,
    alphabet_size: int,
) -> np.ndarray:
    """Probabilities (N,) of the scored characters. shorter: (N,), their probabilities given one character less."""
    pairs, pair_counts = np.unique(training_history * alphabet_size + training, return_counts=True)
    histories = int(max(training_history.max(initial=0), scored_history.max(initial=0))) + 1
    history_counts = np.bincount(training_history, minlength=histories)
    kinds = np.bincount(pairs // alphabet_size, minlength=histories)
    scored_pairs = scored_history * alphabet_size + scored
    index = np.minimum(np.searchsorted(pairs, scored_pairs), max(len(pairs) - 1, 0))
    found = pairs[index] == scored_pairs if len(pairs) else np.zeros(len(scored_pairs), dtype=bool)
    counts = np.where(found, pair_counts[index] if len(pairs) else 0, 0)
    totals, followers = history_counts[scored_history], kinds[scored_history]
    interpolated = (counts + followers * shorter) / np.maximum(totals + followers, 1)
    return np.where(totals > 0, interpolated, shorter)
