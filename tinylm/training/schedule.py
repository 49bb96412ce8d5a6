"""The learning rate as a function of progress, which runs from 0 to 1 whatever the budget is counted in."""

import math
from collections.abc import Callable

from tinylm.config import TrainingConfig


def _constant(after_warmup: float) -> float:
    return 1.0


def _linear(after_warmup: float) -> float:
    return 1.0 - after_warmup


def _cosine(after_warmup: float) -> float:
    """Loshchilov and Hutter 2017, one half period."""
    return 0.5 * (1.0 + math.cos(math.pi * after_warmup))


def _trapezoid(after_warmup: float) -> float:
    """Flat for the first half, then linear to the end (Hagele et al. 2024)."""
    return min(1.0, 2.0 * (1.0 - after_warmup))


DECAYS: dict[str, Callable[[float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "trapezoid": _trapezoid,
}


def learning_rate(progress: float, config: TrainingConfig) -> float:
    """Linear warmup to `lr`, then the schedule's decay to `min_lr` at progress 1.

    `inverse-sqrt` is Vaswani et al. 2017: it falls as the square root of steps, and `lr` is its peak.
    """
    if config.warmup > 0 and progress < config.warmup:
        return config.lr * progress / config.warmup
    if config.schedule == "inverse-sqrt":
        return max(config.min_lr, config.lr * math.sqrt((config.warmup or 1e-3) / max(progress, config.warmup or 1e-3)))
    after_warmup = min(1.0, (progress - config.warmup) / (1.0 - config.warmup)) if config.warmup < 1 else 0.0
    return config.min_lr + (config.lr - config.min_lr) * DECAYS[config.schedule](after_warmup)
