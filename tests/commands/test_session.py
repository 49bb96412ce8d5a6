import time

import pytest
import torch

from tests.variants import randomised, small
from tinylm.commands.new_run import new_run_config
from tinylm.commands.session import process_start, sampled_text
from tinylm.config import TokenizerConfig
from tinylm.model.build import build_model
from tinylm.text.tokenizer import train_char


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
