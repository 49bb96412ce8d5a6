"""Generations: reference for a resumed run is the uninterrupted run, to the bit."""

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.training.conftest import Begin
from tests.training.run_sessions import SHAPE, TOKENIZER, Killed, RunSession, config_of, contents
from tests.training.trainer_bench import FakeTime
from tinylm.config.training import Budget
from tinylm.errors import TinyLMError
from tinylm.objectives.loss import decoder_output
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import GENERATION_FILES
from tinylm.run_directory.loading import load_model, read_config, read_weights, restore_model
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.run_directory.weights import read_weights_files
from tinylm.text.token_files import TokenFolder
from tinylm.training.clock import StoppingRule
from tinylm.training.events import GenerationBegan, Logged, Stepped
from tinylm.training.state import TrainerState
from tinylm.training.trainer import StopTraining
from tinylm.transformer.build import build_model

THREE: dict[str, Any] = {"generations": 3, "sequence_growth": 2, "average": 0.1, "optimizer": "muon"}


@pytest.mark.parametrize("end", [StopTraining, Killed])
@pytest.mark.parametrize("until", [19, 20, 21, 24, 40, 47])
def test_a_resumed_run_of_generations_equals_an_uninterrupted_one(
    until: int, end: type[BaseException], tokens: TokenFolder, tmp_path: Path
) -> None:
    """It is stopped around the beginning of the second and the third generation, of 20 steps each."""
    config = config_of(**THREE)
    RunSession(tmp_path / "straight", tokens).begin(config)
    first = RunSession(tmp_path / "resumed", tokens, until, end)
    if end is Killed:
        with pytest.raises(Killed):
            first.begin(config)
    else:
        assert first.begin(config)[0] == "signal"
    second = RunSession(tmp_path / "resumed", tokens)
    assert second.resume()[0] == "steps"
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")
    steps = [event.step for event in first.reported(Stepped) + second.reported(Stepped)]
    assert sorted(set(steps)) == list(range(1, 61))


def test_each_generation_begins_with_new_weights_and_leaves_its_best_ones_for_the_next(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    """With a learning rate of almost 0, the weights stay those of the seeds of the generations."""
    config = config_of(generations=3, lr=1e-12, min_lr=0.0, weight_decay=0.0)
    RunSession(tmp_path / "run", tokens).begin(config)
    folder = tmp_path / "run"
    last = RunDirectory(folder).load_last(config).read_weights()
    for name, tensor in build_model(config.model, 3 + 2).state_dict().items():
        torch.testing.assert_close(last[name], tensor, rtol=0, atol=1e-6)
    losses = {record["step"]: record["val_loss"] for record in read_metrics(folder) if "val_loss" in record}
    assert sorted(file.name for file in folder.glob("generation-*")) == list(GENERATION_FILES[:3])
    for index in range(3):
        kept = read_weights_files([folder / GENERATION_FILES[index]], config)
        own = {step: loss for step, loss in losses.items() if 20 * index < step <= 20 * index + 20}
        assert kept.val_loss == own[kept.step] == min(own.values())
        for name, tensor in build_model(config.model, 3 + index).state_dict().items():
            torch.testing.assert_close(kept.tensors[name], tensor, rtol=0, atol=1e-6)
    assert read_weights(folder, config).val_loss == min(loss for step, loss in losses.items() if step)


def test_the_schedule_of_the_learning_rate_begins_anew_with_each_generation(begin: Begin) -> None:
    session = begin(generations=3, log_every=1, schedule="linear")
    rates = [event.lr for event in session.reported(Logged)]
    assert rates[20:40] == pytest.approx(rates[:20])
    assert rates[40:] == pytest.approx(rates[:20])
    assert rates[0] < max(rates) > rates[19]
    assert [(event.number, event.count, event.step) for event in session.reported(GenerationBegan)] == [
        (2, 3, 20),
        (3, 3, 40),
    ]


def test_a_student_that_only_learns_from_its_teacher_comes_near_to_its_distribution(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    """With the whole weight on the teacher, the cross-entropy with it falls towards its entropy."""
    model = dataclasses.replace(SHAPE, dropout=0.0, attention_dropout=0.0, width=16, heads=2)
    config = config_of(model=model, generations=2, teacher_weight=1.0, budget=Budget(steps=240), keep="last")
    RunSession(tmp_path / "run", tokens).begin(config)
    teacher = build_model(model)
    teacher.load_state_dict(RunDirectory(tmp_path / "run").read_generation(0, config))
    student = restore_model(config, RunDirectory(tmp_path / "run").load_last(config).read_weights(), tmp_path)
    ids = torch.from_numpy(tokens.train[:8].astype("int64"))[None]

    def log_p(network: Any) -> torch.Tensor:
        from tinylm.text.batches import Batch

        network.eval()
        with torch.no_grad():
            return network.logits(decoder_output(network, Batch(ids, ids)).hidden).double().log_softmax(-1)

    q, uniform = log_p(teacher).exp(), torch.full((TOKENIZER.vocab_size,), 1 / TOKENIZER.vocab_size).double()
    divergence = (q * (q.log() - log_p(student))).sum(-1).mean()
    assert divergence < 0.2 * (q * (q.log() - uniform.log())).sum(-1).mean()


def test_patience_counts_the_evaluations_of_the_last_generation() -> None:
    rule = StoppingRule(Budget(steps=80), 80, patience=2, generations=2)
    for generation, since_best, ends in ((0, 7, False), (1, 1, False), (1, 2, True)):
        state = TrainerState(generation=generation, evals_since_best=since_best)
        assert rule.patience_exhausted(state) == ends


@pytest.mark.parametrize("damage", ["missing", "truncated", "other"])
def test_a_run_without_its_teacher_is_not_resumed(damage: str, tokens: TokenFolder, tmp_path: Path) -> None:
    config = config_of(generations=2)
    RunSession(tmp_path / "run", tokens, until=34).begin(config)
    file = tmp_path / "run" / GENERATION_FILES[0]
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        other = config_of(model=dataclasses.replace(SHAPE, width=16))
        RunSession(tmp_path / "other", tokens).begin(other)
        file.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(TinyLMError, match="generation-1"):
        RunSession(tmp_path / "run", tokens).resume()
    assert load_model(tmp_path / "run")[3].step > 0
    assert read_config(tmp_path / "run") == config


@pytest.mark.parametrize(
    ("before", "after", "generations"),
    [
        (Budget(steps=60), Budget(steps=120), 6),
        (Budget(time=60.0), Budget(time=80.0), 4),
        (Budget(epochs=2.0), Budget(epochs=1.0), 3),
        (Budget(steps=60), Budget(time=1e6), 3),
        (Budget(steps=60), Budget(steps=10**9), 16),
    ],
)
def test_a_longer_budget_of_the_same_kind_has_more_generations(before: Budget, after: Budget, generations: int) -> None:
    training = config_of(generations=3, budget=before).training
    assert training is not None
    assert training.with_budget(after).generations == generations
    assert dataclasses.replace(training, generations=1).with_budget(after).generations == 1


def test_a_finished_run_is_continued_by_more_generations(tokens: TokenFolder, tmp_path: Path) -> None:
    """Twice the steps are the run that was planned with them and twice the generations, from the second half on."""
    RunSession(tmp_path / "run", tokens).begin(config_of(generations=2, budget=Budget(steps=40)))
    second = RunSession(tmp_path / "run", tokens)
    second.resume(budget=Budget(steps=80), generations=4)
    assert [(event.number, event.step) for event in second.reported(GenerationBegan)] == [(3, 40), (4, 60)]
    RunSession(tmp_path / "whole", tokens).begin(config_of(generations=4, budget=Budget(steps=80)))
    assert contents(tmp_path / "run")["weights"] == contents(tmp_path / "whole")["weights"]


@pytest.mark.parametrize(
    "forged", [{"generation": 2}, {"generation": 10**9}, {"generation_step": 99}, {"generation_seconds": 1e9}]
)
def test_forged_numbers_of_a_generation_are_errors(forged: dict[str, Any], tokens: TokenFolder, tmp_path: Path) -> None:
    config = config_of(generations=2, average=0.1)
    RunSession(tmp_path / "run", tokens, until=34).begin(config)
    run = RunDirectory(tmp_path / "run")
    save = run.load_last(config)
    run.save_last(save.read_weights(), save.read_optimizer(), {**save.state, **forged}, config)
    with pytest.raises(TinyLMError, match="The saved training state is damaged"):
        RunSession(tmp_path / "run", tokens).resume()


def test_a_finished_run_needs_no_teacher(tokens: TokenFolder, tmp_path: Path) -> None:
    RunSession(tmp_path / "run", tokens).begin(config_of(generations=2))
    before = contents(tmp_path / "run")
    for file in (tmp_path / "run").glob("generation-*"):
        file.unlink()
    assert RunSession(tmp_path / "run", tokens).resume()[0] == "steps"
    assert contents(tmp_path / "run")["weights"] == before["weights"]


@pytest.mark.parametrize("seconds", [0.0, 3.0, 30.0])
def test_a_budget_of_time_is_kept_however_long_the_predictions_of_a_teacher_take(seconds: float) -> None:
    """Of 100 s, with steps of 1 s. The time that is left is divided among the generations that are left."""
    clock = FakeTime()
    bench = clock.bench(100, 1.0, 0.5, 0.1, generations=4)
    generations = Mock(task=bench.trainer.task)
    generations.task_of = lambda *arguments: (clock.spend(seconds), copy.copy(generations.task))[1]
    bench.trainer.generations = generations
    assert bench.run() == "time"
    assert 95 <= clock.now - 1000 <= 105
    begun = [event.step for event in bench.reported(GenerationBegan)]
    lengths = [end - start for start, end in itertools.pairwise([0, *begun, bench.state.step])]
    assert len(begun) == (3 if seconds < 30 else 1)  # at 75 s, the second predictions would take all the rest
    assert begun[0] in range(20, 26)
    if seconds < 30:
        assert min(lengths) >= 0.7 * max(lengths)
