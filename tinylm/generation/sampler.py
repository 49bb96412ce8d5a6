"""Sampling of the next token: functions of logits (B, V), and the Sampler that applies them in order.

They use numpy, since torch calls take several times longer on the logits of a single token.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tinylm.errors import TinyLMError
from tinylm.generation.generation_config import SamplingConfig

if TYPE_CHECKING:
    from torch import Tensor

Logits = NDArray[np.floating]
Doubles = NDArray[np.float64]
UNIFORM_BLOCK = 64  # uniform numbers generated at a time
SEARCH_BLOCK = 256  # weights per block in `draw`
CACHED_LOGITS = 1 << 16  # logits of the rows processed at a time (at least one row), to fit the processor's cache


def penalise_repeats(logits: Logits, seen: NDArray[np.bool_], penalty: float) -> Logits:
    """Divide positive logits of seen tokens by the penalty, and multiply negative ones by it (Keskar et al. 2019).

    (B, V) -> (B, V). seen: (B, V), True for the tokens that occur in each row's text.
    """
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Set all but the k largest logits to -inf; ties with the k-th stay. (B, V) -> (B, V)"""
    if k >= logits.shape[-1]:
        return logits
    kth_largest = np.partition(logits, -k, axis=-1)[:, -k, None]
    return np.where(logits < kth_largest, -np.inf, logits)


def keep_top_p(logits: Logits, p: float) -> Logits:
    """Keep the smallest set of most likely tokens with total probability p or more (Holtzman et al. 2020).

    (B, V) -> (B, V), with -inf for all other tokens. Of equally likely tokens, those with the lowest ids are kept.
    """
    ordered = np.sort(logits, axis=-1)[:, ::-1]
    probabilities = softmax(ordered)
    before = probabilities.cumsum(axis=-1) - probabilities  # total probability of the more likely tokens
    count = np.maximum((before < p).sum(axis=-1, keepdims=True), 1)
    least = np.take_along_axis(ordered, count - 1, axis=-1)
    ties = logits == least
    kept_ties = count - (logits > least).sum(axis=-1, keepdims=True)
    return np.where((logits < least) | (ties & (ties.cumsum(axis=-1) > kept_ties)), -np.inf, logits)


def keep_min_p(logits: Logits, p: float) -> Logits:
    """Set the logits of tokens less than p times as likely as the most likely one to -inf (Nguyen et al. 2024).

    (B, V) -> (B, V)
    """
    probabilities = softmax(logits)
    return np.where(probabilities < p * probabilities.max(axis=-1, keepdims=True), -np.inf, logits)


def draw(weights: Logits, uniform: Sequence[float]) -> list[int]:
    """Inverse transform sampling: the first token at which the cumulative probability exceeds the row's uniform number.

    weights: (B, V), in proportion to the probabilities. uniform: a number in [0, 1) per row. Returns an id per row.
    """
    numbers = np.array(uniform)
    if weights.shape[1] <= 2 * SEARCH_BLOCK:
        cumulative = weights.cumsum(axis=-1, dtype=np.float64)
        return _first_above(cumulative, numbers * cumulative[:, -1]).tolist()
    # Find the block, then the token in the block: cumulative sums take ten times as long as sums.
    rows = np.arange(len(weights))
    ends = np.add.reduceat(weights, np.arange(0, weights.shape[1], SEARCH_BLOCK), axis=-1, dtype=np.float64).cumsum(
        axis=-1
    )
    numbers = numbers * ends[:, -1]
    blocks = _first_above(ends, numbers)
    tokens = SEARCH_BLOCK * blocks[:, None] + np.arange(SEARCH_BLOCK)  # (B, SEARCH_BLOCK)
    inside = np.where(tokens < weights.shape[1], weights[rows[:, None], np.minimum(tokens, weights.shape[1] - 1)], 0)
    numbers -= np.where(blocks, ends[rows, blocks - 1], 0)
    return tokens[rows, _first_above(inside.cumsum(axis=-1, dtype=np.float64), numbers)].tolist()


def _first_above(cumulative: Doubles, numbers: Doubles) -> NDArray[np.intp]:
    """The first index at which each row of cumulative sums (B, N) exceeds its number (B,); returns (B,).

    A number that was rounded up to the total is reduced, so that the weight at the index is never 0.
    """
    numbers = np.minimum(numbers, np.nextafter(cumulative[:, -1], 0))
    return (cumulative <= numbers[:, None]).sum(axis=-1)


def as_array(logits: "Logits | Tensor") -> Logits:
    """The logits as an array on the CPU; those of a tensor in fp32."""
    return logits if isinstance(logits, np.ndarray) else logits.float().numpy(force=True)


def log_softmax(logits: Logits) -> Doubles:
    """The natural logarithms of the probabilities of the tokens, (B, V) -> (B, V), in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True).astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def softmax(logits: Logits) -> Logits:
    """The probabilities of the tokens, (B, V) -> (B, V)."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


class Sampler:
    """Samples one token per row.

    Row i draws from the random stream (seed, first_stream + i), whatever the number of rows. Ids of `vocab_size` and
    above, which are padding rows of the embedding, are never sampled.
    """

    def __init__(self, sampling: SamplingConfig, seed: int, rows: int, vocab_size: int, first_stream: int = 0) -> None:
        self.sampling = sampling
        self._vocab_size = vocab_size
        self._is_checked = False
        self._streams = [random_stream(seed, first_stream + row) for row in range(rows)]
        self._seen = np.zeros((rows, vocab_size), dtype=bool) if sampling.repeat_penalty != 1 else None

    def observe(self, row: int, ids: Sequence[int]) -> None:
        """Mark the tokens of a prompt as seen in a row, for the repeat penalty. `__call__` marks the sampled tokens."""
        if self._seen is not None and ids:
            self._seen[row, list(ids)] = True

    def __call__(self, logits: "Logits | Tensor") -> list[int]:
        """Logits (B, V) -> a token id per row.

        Raises TinyLMError if, at the first call, a row contains NaN or +inf, or only -inf.
        """
        logits = as_array(logits)[:, : self._vocab_size]
        if not self._is_checked:
            require_finite(logits)
            self._is_checked = True
        count = max(1, CACHED_LOGITS // self._vocab_size)
        parts = [slice(first, first + count) for first in range(0, len(logits), count)]
        chosen = [token for rows in parts for token in self._choose(logits[rows], rows)]
        if self._seen is not None:
            self._seen[np.arange(len(chosen)), chosen] = True
        return chosen

    def _choose(self, logits: Logits, rows: slice) -> list[int]:
        """A token for each of these rows, whose logits are given."""
        sampling = self.sampling
        if self._seen is not None:
            logits = penalise_repeats(logits, self._seen[rows], sampling.repeat_penalty)
        if sampling.temperature == 0:
            chosen: list[int] = logits.argmax(axis=-1).tolist()
            return chosen
        # Subtracting the maximum avoids overflow at tiny temperatures; a divisor below 1e-30 could round to 0.
        with np.errstate(over="ignore"):  # overflow to -inf is a probability of 0
            logits = logits - logits.max(axis=-1, keepdims=True)
            logits /= np.float32(max(sampling.temperature, 1e-30))
        if sampling.top_k:
            logits = keep_top_k(logits, sampling.top_k)
        if sampling.top_p < 1:
            logits = keep_top_p(logits, sampling.top_p)
        if sampling.min_p:
            logits = keep_min_p(logits, sampling.min_p)
        return draw(np.exp(logits, out=logits), [next(stream) for stream in self._streams[rows]])


def require_finite(logits: Logits) -> None:
    """Raise TinyLMError for a row of logits with NaN or +inf, or with only -inf: (B, V)."""
    if not np.isfinite(logits.max(axis=-1)).all():  # the maximum of a row with NaN is NaN
        raise TinyLMError(
            "The model's logits are not finite numbers: some weights are too large for the number format of the "
            "computation. Try `dtype` fp32."
        )


def random_stream(seed: int, stream: int) -> Iterator[float]:
    """The random stream (seed, stream): uniform numbers in [0, 1), without end."""
    return _uniform_numbers(_mix(sample_seed(seed, stream), 0))


def _uniform_numbers(seed: int) -> Iterator[float]:
    """Yield the same numbers in [0, 1) as `torch.rand` in float64 with a CPU generator of this seed, without end.

    Both generators are the Mersenne Twister (Matsumoto and Nishimura 1998), seeded with the lower 32 bits.
    """
    generator = np.random.RandomState(seed & 0xFFFFFFFF)
    while True:
        high, low = generator.randint(0, 1 << 32, (UNIFORM_BLOCK, 2), dtype=np.uint64).T
        yield from (((high << np.uint64(32) | low) & np.uint64((1 << 53) - 1)) * 2.0**-53).tolist()


def sample_seed(seed: int, stream: int) -> int:
    """The seed whose stream 0 is the random stream (seed, stream), so that a sample can be generated alone.

    For other streams than 0, a number below 2^53, which every reader of JSON keeps exactly.
    """
    return _mix(seed, stream) >> 10 if stream else seed


def _mix(seed: int, number: int) -> int:
    """Mix both numbers by SplitMix64 (Steele et al. 2014) to 63 bits that are independent for adjacent numbers."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
