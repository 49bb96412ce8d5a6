"""The sentence after training on what would improve a run: a table of curves, and the runs that get none."""

from pathlib import Path

import pytest

from tests.shell import run_ok, story
from tinylm.commands.next_steps import improvement, longer
from tinylm.config.settings import parse_duration
from tinylm.config.training import Budget
from tinylm.run_directory.metrics_log import History

FALLS = (
    "The validation loss still falls, by {} in the last quarter of the run: more time helps, for example --steps 1600."
)
OVERFITS = (
    "The training loss is {} below the validation loss, which no longer falls: more text helps, more time does not."
)
PPMD = "The model needs {} bits than PPMd, the best simple model."
# Validation and training losses after 100, 200 ... 800 steps
FALLING = [3.0, 2.5, 2.3, 2.2, 2.1, 2.06, 2.04, 2.0]
FLAT = [3.0, 2.5, 2.3, 2.1, 2.02, 2.02, 2.01, 2.0]
RISING = [3.0, 2.5, 2.2, 2.0, 1.9, 1.95, 2.0, 2.1]
CURVES = {
    "falls": (FALLING, FALLING, FALLS.format("3.0%")),
    "falls, far above the training loss": (FALLING, [loss - 0.5 for loss in FALLING], FALLS.format("3.0%")),
    "is flat, close to the training loss": (FLAT, [loss - 0.15 for loss in FLAT], PPMD.format("20% fewer")),
    "is flat, far above the training loss": (FLAT, [loss - 0.5 for loss in FLAT], OVERFITS.format("25%")),
    "rises": (RISING, [3.0, 2.4, 2.1, 1.8, 1.6, 1.4, 1.2, 1.05], OVERFITS.format("50%")),
    "rises, with the training loss": (RISING, RISING, PPMD.format("20% fewer")),
    "fell until the last evaluation but one": ([*FALLING[:6], 1.99, 2.0], FALLING, PPMD.format("20% fewer")),
    "has two values": ([3.0, 2.0], [3.0, 2.0], PPMD.format("20% fewer")),
    "has none": ([], [], PPMD.format("20% fewer")),
}


def history(val_losses: list[float], losses: list[float]) -> History:
    """With a record before the first step and one of a stop, on few tokens, which are left out."""
    steps = [100 * number for number in range(1, len(val_losses) + 1)]
    validation = {"step": [0, *steps, 801], "val_loss": [9.0, *val_losses, 0.1]}
    validation["val_tokens"] = [500, *(None for _ in steps), 500]  # type: ignore[list-item]
    return History({"step": steps, "loss": losses}, validation)


@pytest.mark.parametrize("shape", CURVES)
def test_the_sentence_after_training_follows_from_the_curves(shape: str) -> None:
    val_losses, losses, expected = CURVES[shape]
    assert improvement(history(val_losses, losses), 3.9, Budget(steps=800), 1.6, 2.0) == expected


@pytest.mark.parametrize(("epochs", "factor", "falls"), [(3.9, 1.03, True), (4, 1.03, False), (4, 1.09, True)])
def test_after_four_passes_only_a_steep_curve_calls_for_more_time(epochs: float, factor: float, falls: bool) -> None:
    """The learning rate alone makes the loss fall, and the text is no longer new."""
    losses = [3.0, 2.9, 2.8, 2.7, 2.6, 2.0 * factor, 2.02, 2.0]
    sentence = improvement(history(losses, losses), epochs, Budget(steps=800), 1.6, 2.0)
    assert sentence == (FALLS.format(f"{factor - 1:.1%}") if falls else PPMD.format("20% fewer"))


def test_without_a_clear_curve_the_sentence_compares_with_ppmd_if_its_bits_are_known() -> None:
    flat = history(FLAT, FLAT)
    assert improvement(flat, 3, Budget(steps=800), 2.5, 2.0) == PPMD.format("25% more")
    assert improvement(flat, 3, Budget(steps=800), 2.5, None) == ""
    assert improvement(flat, 3, Budget(steps=800), 2.5, 0.0) == ""
    assert improvement(history(FALLING, FALLING), 3, Budget(steps=800), 2.5, None) == FALLS.format("3.0%")
    assert (
        improvement(History({"step": [], "loss": []}, {"step": [], "val_loss": []}), 0, Budget(steps=8), 1, None) == ""
    )


def test_a_run_twice_as_long_has_the_option_of_its_budget() -> None:
    options = {longer(budget) for budget in (Budget(steps=50), Budget(epochs=1.5), Budget(time=150), Budget(time=45))}
    assert options == {"--steps 100", "--epochs 3", "--time 5m", "--time 90s"}
    assert parse_duration(longer(Budget(time=0.25)).split()[1]) == 0.5


def test_runs_of_other_jobs_with_few_validation_data_and_by_heart_get_no_sentence(tmp_path: Path) -> None:
    """The same short run on plain text gets one."""
    text, few, heart = tmp_path / "text.txt", tmp_path / "few.txt", tmp_path / "heart.txt"
    text.write_text(story(16_000))
    few.write_text(story(1000, seed=1))
    heart.write_text(story(10_000))
    shape = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 16, "--batch-size", 4, "--out", tmp_path / "run")
    length = ("--steps", 8, "--eval-every", 2, "--force")

    def said(*words: object) -> list[str]:
        lines = run_ok("train", *words, *shape, *length).stderr.splitlines()
        return [line for line in lines if "more time helps" in line or "bits than PPMd" in line]

    assert len(said(text)) == 1
    assert said(text, "--architecture", "encoder") == []
    assert said(few, "--val-fraction", 0.5) == []
    assert said(heart) == []
