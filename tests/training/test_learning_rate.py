"""Learning-rate schedules. Reference: the formula of each, written independently."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("schedule", sorted(LEFT))
@pytest.mark.parametrize("warmup", [0.0, 0.02, 0.5])
def test_each_decay_equals_its_formula(schedule: str, warmup: float) -> None:
    for progress in (warmup, warmup + 1e-9, 0.5, 0.51, 0.7, 0.75, 0.9, 1.0):
        left = LEFT[schedule]((progress - warmup) / (1 - warmup))
        expected = 1e-4 + (3e-3 - 1e-4) * left
        assert learning_rate(progress, config(schedule, warmup)) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(("progress", "left"), [(0.2, 1), (0.4, 1), (0.6, 1), (0.7, 0.75), (0.8, 0.5), (1.0, 0)])
def test_the_trapezoid_is_constant_for_the_first_half_after_the_warmup(progress: float, left: float) -> None:
    assert learning_rate(progress, config("trapezoid", 0.2, 1.0, 0.0)) == pytest.approx(left, abs=1e-12)


@pytest.mark.parametrize(("progress", "expected"), [(0.1, 1.0), (0.4, 0.5), (0.9, 1 / 3), (1.0, math.sqrt(0.1))])
def test_inverse_sqrt_decays_with_the_inverse_square_root_of_progress(progress: float, expected: float) -> None:
    assert learning_rate(progress, config("inverse-sqrt", 0.1, 1.0, 0.0)) == pytest.approx(expected)
    assert learning_rate(progress, config("inverse-sqrt", 0.1, 1.0, 0.45)) == pytest.approx(max(0.45, expected))


def test_inverse_sqrt_without_warmup_starts_at_lr_and_decays() -> None:
    values = [learning_rate(p, config("inverse-sqrt", 0.0, 1.0, 0.0)) for p in (0.0, 1e-3, 4e-3, 0.1)]
    assert values == pytest.approx([1, 1, 0.5, 0.1])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [1e-9, 0.1, 0.999, 1.0])
def test_warmup_is_linear_up_to_lr(schedule: str, warmup: float) -> None:
    for part in (0.0, 0.25, 0.5, 0.75, 0.999):
        assert learning_rate(part * warmup, config(schedule, warmup)) == pytest.approx(part * 3e-3)
    assert learning_rate(warmup, config(schedule, warmup)) == pytest.approx(3e-3)


@given(
    schedule=st.sampled_from(SCHEDULES),
    warmup=st.just(0.0) | st.floats(1e-9, 1),
    lr=st.floats(1e-6, 1),
    part=st.floats(0, 1),
    progress=st.floats(0, 1),
    step=st.floats(0, 1e-4),
)
def test_the_rate_is_continuous_within_its_bounds_and_never_rises_after_warmup(
    schedule: str, warmup: float, lr: float, part: float, progress: float, step: float
) -> None:
    chosen = config(schedule, warmup, lr, part * lr)
    now, later = (learning_rate(p, chosen) for p in (progress, min(1.0, progress + step)))
    assert 0 <= now <= lr * (1 + 1e-9)
    if progress >= warmup:
        assert part * lr * (1 - 1e-9) <= now
        assert later <= now * (1 + 1e-9) + 1e-15
    steepest = max(1 / warmup if warmup else 0, 500 if schedule == "inverse-sqrt" else 2 / max(1 - warmup, 1e-9))
    assert abs(later - now) <= lr * (steepest * step + 1e-9)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "trapezoid"])
def test_the_rate_ends_at_min_lr(schedule: str) -> None:
    for progress in (1.0, 1.0 + 1e-9, 1.5):
        assert learning_rate(progress, config(schedule, 0.3)) == pytest.approx(1e-4)


def test_every_schedule_is_tested() -> None:
    assert set(SCHEDULES) == {*LEFT, "inverse-sqrt"}
