"""Bootstrap confidence intervals of a ratio of sums, such as a loss: nats over tokens."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
MIN_UNITS = 10  # with fewer, no interval is given: resamples of so few values differ too little
SEED = 20_261_123
RESAMPLES_AT_ONCE = 500  # limits the memory of the drawn indices, (RESAMPLES_AT_ONCE, units)


class Interval(NamedTuple):
    """A confidence interval. A width of 0 means that all units agree, not that the estimate is exact."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:.4f} to {self.high:.4f}"


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> Interval | None:
    """The 95 % confidence interval of sum(numerators) / sum(denominators); `None` for fewer than MIN_UNITS units.

    numerators, denominators: (U,), one value per unit. Units are assumed to be independent; those with the denominator
        0 are left out.

    The units are resampled with replacement 10,000 times, from a fixed seed. The ends of the interval are quantiles of
    the resampled ratios, at levels that correct for the number of units: the expanded percentile interval (Hesterberg
    2015, "What teachers should know about the bootstrap", The American Statistician 69).
    """
    used = denominators != 0
    x, y = numerators[used].astype(np.float64), denominators[used].astype(np.float64)
    if len(x) < MIN_UNITS:
        return None
    rng = np.random.Generator(np.random.PCG64(SEED))
    ratios = np.empty(RESAMPLES)
    for start in range(0, RESAMPLES, RESAMPLES_AT_ONCE):
        drawn = rng.integers(0, len(x), (RESAMPLES_AT_ONCE, len(x)))
        ratios[start : start + RESAMPLES_AT_ONCE] = x[drawn].sum(axis=1) / y[drawn].sum(axis=1)
    tail = NormalDist().cdf(-((len(x) / (len(x) - 1)) ** 0.5) * t_quantile((1 + CONFIDENCE) / 2, len(x) - 1))
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(float(low), float(high))


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t, to three decimals from 9 degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
