"""Learning-rate schedules as functions of progress, the used fraction of a budget of steps, epochs or time."""

import math
from collections.abc import Callable

from tinylm.config.training import TrainingConfig


def _constant(after_warmup: float) -> float:
    return 1.0


def _linear(after_warmup: float) -> float:
    return 1.0 - after_warmup


def _cosine(after_warmup: float) -> float:
    """One half period of a cosine (Loshchilov and Hutter 2017)."""
    return 0.5 * (1.0 + math.cos(math.pi * after_warmup))


def _trapezoid(after_warmup: float) -> float:
    """Constant for the first half, then linear (Hägele et al. 2024)."""
    return min(1.0, 2.0 * (1.0 - after_warmup))


# Each maps progress after the warmup, from 0 to 1, to the fraction of `lr - min_lr` that is left.
DECAYS: dict[str, Callable[[float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "trapezoid": _trapezoid,
}


def learning_rate(progress: float, config: TrainingConfig) -> float:
    """The learning rate at `progress`, from 0 to 1: linear warmup from 0 to `lr`, then the decay of `config.schedule`.

    The schedules in DECAYS end at `min_lr`, except for `constant`, which stays at `lr`. `inverse-sqrt` is
    `lr * sqrt(warmup / progress)`, and at least `min_lr` (Vaswani et al. 2017); without a warmup, it is `lr` up to a
    progress of 0.001.
    """
    if config.warmup > 0 and progress < config.warmup:
        return config.lr * progress / config.warmup
    if config.schedule == "inverse-sqrt":
        return max(config.min_lr, config.lr * math.sqrt((config.warmup or 1e-3) / max(progress, config.warmup or 1e-3)))
    after_warmup = min(1.0, (progress - config.warmup) / (1.0 - config.warmup)) if config.warmup < 1 else 0.0
    return config.min_lr + (config.lr - config.min_lr) * DECAYS[config.schedule](after_warmup)
