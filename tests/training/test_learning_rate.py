"""Learning-rate schedules. Reference: the formula of each, written independently."""

import math
from collections.abc import Callable

import pytest

from tinylm.training.learning_rate import learning_rate
from tinylm.training_config import SCHEDULES, Budget, TrainingConfig

# The fraction of lr - min_lr that is left at progress p after a warmup of w, with x = (p - w) / (1 - w).
LEFT: dict[str, Callable[[float], float]] = {
    "constant": lambda x: 1,
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "trapezoid": lambda x: 1 if x <= 0.5 else 2 - 2 * x,
}


def config(schedule: str, warmup: float, lr: float = 3e-3, min_lr: float = 1e-4) -> TrainingConfig:
    return TrainingConfig(
        budget=Budget(steps=1), batch_size=1, micro_batch=1, lr=lr, min_lr=min_lr, warmup=warmup, schedule=schedule
    )


def test_each_decay_equals_its_formula_and_ends_at_min_lr() -> None:
    assert set(SCHEDULES) == {*LEFT, "inverse-sqrt"}
    for schedule, left in LEFT.items():
        for warmup in (0.0, 0.02, 0.5):
            for progress in (warmup, warmup + 1e-9, 0.5, 0.51, 0.7, 0.75, 0.9, 1.0):
                expected = 1e-4 + (3e-3 - 1e-4) * left((progress - warmup) / (1 - warmup))
                found = learning_rate(progress, config(schedule, warmup))
                assert found == pytest.approx(expected, rel=1e-12, abs=1e-15), (schedule, warmup, progress)
        if schedule != "constant":
            assert [learning_rate(p, config(schedule, 0.3)) for p in (1.0, 1 + 1e-9, 1.5)] == pytest.approx([1e-4] * 3)


def test_inverse_sqrt_decays_with_the_inverse_square_root_of_progress() -> None:
    """Without a warmup it starts at the learning rate."""
    for progress, expected in ((0.1, 1.0), (0.4, 0.5), (0.9, 1 / 3), (1.0, math.sqrt(0.1))):
        assert learning_rate(progress, config("inverse-sqrt", 0.1, 1.0, 0.0)) == pytest.approx(expected)
        assert learning_rate(progress, config("inverse-sqrt", 0.1, 1.0, 0.45)) == pytest.approx(max(0.45, expected))
    values = [learning_rate(p, config("inverse-sqrt", 0.0, 1.0, 0.0)) for p in (0.0, 1e-3, 4e-3, 0.1)]
    assert values == pytest.approx([1, 1, 0.5, 0.1])


def test_warmup_is_linear_up_to_lr() -> None:
    for schedule in SCHEDULES:
        for warmup in (1e-9, 0.1, 1.0):
            for part in (0.0, 0.25, 0.999, 1.0):
                assert learning_rate(part * warmup, config(schedule, warmup)) == pytest.approx(part * 3e-3)
