import time

import pytest
import torch

from tests.variants import randomised, small
from tinylm.commands.new_run import new_run_config
from tinylm.commands.session import _Reporter, process_start, sampled_text
from tinylm.config import TokenizerConfig
from tinylm.console import Console
from tinylm.model.build import build_model
from tinylm.text.tokenizer import train_char
from tinylm.training.trainer import Evaluated, Logged, Stepped


def test_a_sample_shown_during_training_changes_nothing_and_needs_no_compiled_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled layer would be compiled again for every length of a sample."""
    tokenizer = train_char("abcdefghijk\n")
    shape = small(vocab_size=tokenizer.vocab_size, dropout=0.5)
    config = new_run_config(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256))
    model = randomised(build_model(shape)).train()
    expected = sampled_text(model, tokenizer, config, 40)

    def never(*arguments: object, **choices: object) -> None:
        raise AssertionError("compiled")

    for layer in model.layers:
        layer.compile(backend=never)
    before = torch.get_rng_state()
    assert sampled_text(model, tokenizer, config, 40) == expected
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_process_began_before_it_could_ask() -> None:
    assert 0 < time.monotonic() - process_start() < 3600


def test_progress_shows_a_validation_loss_with_its_step_and_none_of_the_untrained_model() -> None:
    """It once showed the loss of step 0 as if it were current, until the end of a short run."""
    shown: list[str] = []
    report = _Reporter(Console(), lambda fraction, words: shown.append(words), lambda: None)
    report(Evaluated(0, 3.354, True, 0.1))
    report(Stepped(1, 0.01))
    report(Logged(10, 0.1, 1.2345, 1e-3, 1.0, 12345.6, 0.5, {}))
    report(Stepped(11, 0.11))
    report(Evaluated(300, 1.6072, True, 1.0))
    report(Stepped(301, 0.5))
    assert shown == [
        "step 1",
        "loss 1.234  step 11  12,346 tok/s",
        "loss 1.234  val 1.607 @300  step 301  12,346 tok/s",
    ]
