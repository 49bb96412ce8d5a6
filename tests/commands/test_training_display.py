"""Progress, samples and timing of training commands."""

import time

import pytest
import torch

from tests.variants import randomised, small
from tinylm.commands.training_display import TrainingDisplay, process_start
from tinylm.console import Console
from tinylm.model.build import build_model
from tinylm.run_config import RunConfig, TokenizerConfig
from tinylm.text.tokenizer import train_char
from tinylm.training.events import Evaluated, Logged, Stepped
from tinylm.training.samples import generate_sample


def test_a_sample_during_training_changes_no_state_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled layers would be recompiled for every length of the sample."""
    tokenizer = train_char("abcdefghijk\n")
    shape = small(vocab_size=tokenizer.vocab_size, dropout=0.5)
    config = RunConfig.new(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256))
    model = randomised(build_model(shape)).train()
    expected = generate_sample(model, tokenizer, config, 40)

    def never(*arguments: object, **choices: object) -> None:
        raise AssertionError("compiled")

    for layer in model.layers:
        layer.compile(backend=never)
    before = torch.get_rng_state()
    assert generate_sample(model, tokenizer, config, 40) == expected
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sample_of_a_model_whose_logits_are_not_finite_does_not_end_the_training() -> None:
    tokenizer = train_char("abc")
    shape = small(vocab_size=tokenizer.vocab_size)
    config = RunConfig.new(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256))
    model = randomised(build_model(shape))
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    assert generate_sample(model, tokenizer, config, 4) is None


def test_the_process_start_is_in_the_recent_past() -> None:
    assert 0 < time.monotonic() - process_start() < 3600


def test_progress_shows_the_validation_loss_with_its_step_except_at_step_0() -> None:
    """Regression: the loss of step 0 was shown as the current one until the end of a short run."""
    shown: list[str] = []
    display = TrainingDisplay(Console())
    display._show_progress = lambda progress, text: shown.append(text)
    display(Evaluated(0, 3.354, True, 0.1))
    display(Stepped(1, 0.01))
    display(Logged(10, 0.1, 1.2345, 1e-3, 1.0, 12345.6, 0.5, {}))
    display(Stepped(11, 0.11))
    display(Evaluated(300, 1.6072, True, 1.0))
    display(Stepped(301, 0.5))
    assert shown == [
        "step 1",
        "loss 1.234  step 11  12,346 tok/s",
        "loss 1.234  val 1.607 @300  step 301  12,346 tok/s",
    ]
