"""What a text costs without a neural network: gzip, xz and a character model of order 5, in bits a byte."""

import gzip
import lzma

import numpy as np

from tinylm.text.corpus import code_points

ORDER = 5


def compression_bits_per_byte(text: str) -> dict[str, float]:
    """gzip -9 and xz -9 of the text alone."""
    data = text.encode()
    return {
        "gzip": 8 * len(gzip.compress(data, 9, mtime=0)) / len(data),
        "xz": 8 * len(lzma.compress(data, preset=9)) / len(data),
    }


def ngram_bits_per_byte(training_text: str, text: str, order: int = ORDER) -> float:
    """An interpolated character model with `order` characters of context (Witten and Bell 1991), fitted and then fixed.

    p_k(c | h) = (count(hc) + kinds(h) p_{k-1}(c | h')) / (count(h) + kinds(h)), where kinds(h) is how many different
    characters followed h in training, h' is h without its first character, and p_{-1} is uniform over the characters of
    both texts. Every character of `text` is scored once.
    """
    alphabet = np.unique(np.concatenate((code_points(training_text), code_points(text))))
    training = np.searchsorted(alphabet, code_points(training_text))
    scored = np.searchsorted(alphabet, code_points(text))
    probability = np.full(len(scored), 1 / len(alphabet))
    # A history is named by one number: its rank among all histories of its length. Length 0 has the one name 0.
    training_history = np.zeros(len(training), dtype=np.int64)
    scored_history = np.zeros(len(scored), dtype=np.int64)
    for length in range(order + 1):
        if length:
            training_history, scored_history = _lengthen(
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


def _lengthen(
    training: np.ndarray,
    training_history: np.ndarray,
    scored: np.ndarray,
    scored_history: np.ndarray,
    length: int,
    alphabet: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Put the character `length` back in front of every history; positions too near the start keep a dummy name."""

    def names(symbols: np.ndarray, history: np.ndarray) -> np.ndarray:
        longer = np.full(len(symbols), -1, dtype=np.int64)
        longer[length:] = history[length:] * len(alphabet) + symbols[:-length]
        return longer

    longer = names(training, training_history), names(scored, scored_history)
    _, ranks = np.unique(np.concatenate(longer), return_inverse=True)
    return ranks[: len(training)], ranks[len(training) :]


def _interpolate(
    training: np.ndarray,
    training_history: np.ndarray,
    scored: np.ndarray,
    scored_history: np.ndarray,
    shorter: np.ndarray,
    alphabet_size: int,
) -> np.ndarray:
    """One order's probabilities from the next shorter order's."""
    pairs, pair_counts = np.unique(training_history * alphabet_size + training, return_counts=True)
    histories = int(max(training_history.max(initial=0), scored_history.max(initial=0))) + 1
    history_counts = np.bincount(training_history, minlength=histories)
    kinds = np.bincount(pairs // alphabet_size, minlength=histories)
    wanted = scored_history * alphabet_size + scored
    place = np.minimum(np.searchsorted(pairs, wanted), max(len(pairs) - 1, 0))
    found = pairs[place] == wanted if len(pairs) else np.zeros(len(wanted), dtype=bool)
    counts = np.where(found, pair_counts[place] if len(pairs) else 0, 0)
    total, novel = history_counts[scored_history], kinds[scored_history]
    seen = total > 0
    blended = (counts + novel * shorter) / np.maximum(total + novel, 1)
    return np.where(seen, blended, shorter)
