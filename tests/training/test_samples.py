"""Samples during training: when they are drawn, and where they are stored."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shell import TINY, run_ok, story
from tests.training.trainer_bench import SETTINGS, FakeTime
from tests.variants import randomised, small
from tinylm.config.run import RunConfig, TokenizerConfig
from tinylm.config.training import Budget, TrainingConfig
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import read_config
from tinylm.text.tokenizer import train_char
from tinylm.training import validation
from tinylm.training.events import Evaluated
from tinylm.transformer.build import build_model


def new_sampler(training: TrainingConfig | None = None, **parts: Any) -> validation.RunSampler:
    tokenizer = train_char("abc")
    shape = small(vocab_size=tokenizer.vocab_size)
    config = RunConfig.new(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256))
    model = randomised(build_model(shape))
    return validation.RunSampler(model, tokenizer, replace(config, training=training), **parts)


def test_samples_take_at_most_their_share_of_the_time_and_grow_rarer() -> None:
    time = FakeTime()

    def generate(*arguments: object) -> str:
        time.spend(0.5)
        return "text"

    sampler, drawn = new_sampler(generate=generate, now=lambda: time.now), []
    while (seconds := time.now - 1000) < 86_400:
        time.spend(3.0)
        if sampler.sample_if_due(Evaluated(1, 1.0, True, seconds + 3)):
            drawn.append(time.now - 1000)
    assert drawn[0] >= validation.MIN_SECONDS
    assert all(0.5 * (n - 1) <= validation.MAX_SHARE * t for n, t in enumerate(drawn, start=1))
    assert len(drawn) < 300


def test_a_sample_takes_at_most_its_share_of_a_time_budget() -> None:
    """A second per token, as on a busy machine: after the last evaluation, a run of 100 s has 2 s for a sample."""
    start, sampled, first_token, second_token, end = 1000.0, 1100.0, 1101.0, 1102.0, 1103.0
    readings = iter([start, sampled, sampled, first_token, second_token, end])
    training = TrainingConfig(**SETTINGS | {"budget": Budget(time=100.0)})
    sampler = new_sampler(training, now=functools.partial(next, readings))
    assert sampler.sample_if_due(Evaluated(1, 1.0, True, 100.0))
    assert next(readings, None) is None


def test_a_run_stores_its_samples_and_a_resumed_one_draws_those_after_its_save_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MIN_SECONDS": 0.0, "SECONDS_PER_PARAMETER": 0.0, "MAX_SHARE": 1e9, "MIN_GROWTH": 0.0}.items():
        monkeypatch.setattr(validation, name, value)
    (tmp_path / "text").write_text(story(3000))
    out = tmp_path / "run"

    def stored() -> list[int]:
        found = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        assert all(sample["text"] for sample in found)
        return [sample["step"] for sample in found]

    run_ok("train", tmp_path / "text", "--out", out, "--steps", 4, "--eval-every", 2, "--save-every", 2, *TINY)
    assert stored() == [2, 4]
    planned = read_config(out).planned
    assert planned is not None and planned.steps == 4 and planned.seconds > 0 and planned.memory > 0
    RunDirectory(out).append_sample({"step": 9, "val_loss": 1.0, "text": "lost"})
    run_ok("train", "--resume", out, "--steps", 6)
    assert stored() == [2, 4, 6]
