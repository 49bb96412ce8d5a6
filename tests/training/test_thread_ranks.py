"""Decisions that the ranks of a training run take together, with ranks that are threads of one process.

Reference: the same run in one process.
"""

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.thread_ranks import in_ranks
from tests.training.conftest import Begin
from tests.training.run_sessions import SHAPE, TOKENIZER, config_of
from tests.training.trainer_bench import Bench, assert_same, random_batch, rows_at_most, trained, values
from tinylm.config.training import Budget
from tinylm.errors import TinyLMError
from tinylm.objectives.loss import next_token
from tinylm.run_directory.directory import RunDirectory, ShardOnlyRun
from tinylm.run_directory.loading import read_config
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.system.ranks import Ranks
from tinylm.text.token_files import TokenFolder
from tinylm.training import run as run_module
from tinylm.training.events import Logged, Notice
from tinylm.training.run import TrainingRun


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank_halves_the_micro_batch_of_all_and_keeps_the_losses(rank: int) -> None:
    settings: dict[str, Any] = {"budget": Budget(steps=5), "batch_size": 12, "lr": 0.1, "micro_batch": 6}
    settings["batches"] = lambda number: random_batch(number, 12, 0.5)
    expected = trained(**settings)

    def train(ranks: Ranks) -> Bench:
        fails = ranks.launch.rank == rank
        return trained(**settings, ranks=ranks, objective=rows_at_most(2, []) if fails else next_token)

    for bench in in_ranks(2, train):
        assert bench.state.micro_batch == 2
        assert [event.message.split(";")[0] for event in bench.reported(Notice)] == [
            f"Out of memory: the micro-batch is now {rows}" for rows in (3, 2)
        ]
        losses = [event.loss for event in bench.reported(Logged)]
        assert losses == pytest.approx([event.loss for event in expected.reported(Logged)], rel=1e-6)
        assert_same(values(bench.model), values(expected.model))


def test_out_of_memory_with_one_sequence_on_one_rank_is_an_error_on_all() -> None:
    def train(ranks: Ranks) -> str:
        with pytest.raises(TinyLMError, match="Out of memory with one sequence at a time") as caught:
            trained(ranks=ranks, objective=next_token if ranks.is_first else rows_at_most(0, []))
        return str(caught.value)

    one, other = in_ranks(2, train)
    assert one == other


def test_ranks_whose_clocks_differ_stop_after_the_same_step() -> None:
    """The clock of rank 1 is far ahead: by it, the time would be up before the first step."""

    def train(ranks: Ranks) -> tuple[int, list[float]]:
        ahead = 1000.0 if ranks.launch.rank == 1 else 0.0
        bench = trained(budget=Budget(time=2.0), lr=1e-3, ranks=ranks, started=time.monotonic() - ahead)
        return bench.state.step, [event.lr for event in bench.reported(Logged)]

    found = in_ranks(3, train)
    assert found[0][0] > 1
    assert found[1] == found[2] == found[0]


def test_patience_is_decided_by_the_loss_of_all_ranks() -> None:
    """By the loss of rank 1, training would go on, and by that of rank 0 end after step 3."""
    means = [3.0, 2.0, 2.5, 1.0, 1.5, 1.25, 0.5]
    losses = {0: [2 * mean + step for step, mean in enumerate(means)], 1: [-float(step) for step in range(7)]}

    def train(ranks: Ranks) -> tuple[str, int, list[tuple[int, float | None]]]:
        def validate() -> float:
            return losses[ranks.launch.rank][bench.state.step]

        bench = Bench(budget=Budget(steps=50), patience=2, eval_every=1, lr=1e-3, ranks=ranks, validate=validate)
        task: Any = bench.trainer.task
        task.validation_batches = lambda *_: [random_batch(0, 1)] * 2
        return bench.run(), bench.state.step, bench.best

    one, other = in_ranks(2, train)
    assert one == other == ("patience", 5, [(1, 2.0), (3, 1.0)])


def test_ranks_compile_only_if_all_of_them_can(
    begin: Begin, tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 can compile; it then discards what it compiled, and the losses are those of one process. Of the four
    ranks, one has no row of a batch of 3.
    """
    shape = dataclasses.replace(SHAPE, dropout=0.0, attention_dropout=0.0)
    settings: dict[str, Any] = {"model": shape, "log_every": 1, "lr": 1e-3, "batch_size": 3, "budget": Budget(steps=6)}
    one, compiled = begin("one", **settings), config_of(runtime={"compile": True}, **settings)
    discarded: list[str] = []
    monkeypatch.setattr(run_module, "compile_layers", lambda *_: threading.current_thread().name == "rank 0")
    monkeypatch.setattr(run_module, "discard_compiled", lambda _: discarded.append(threading.current_thread().name))
    models = [one._model(compiled) for _ in range(4)]  # here, since all threads share torch's global generator
    path = tmp_path / "several"

    def train(ranks: Ranks) -> None:
        threading.current_thread().name = f"rank {ranks.launch.rank}"
        directory = RunDirectory.create(path, compiled, TOKENIZER) if ranks.is_first else ShardOnlyRun(path)
        run = TrainingRun(directory, compiled, models[ranks.launch.rank], TOKENIZER, tokens, ranks=ranks)
        run.train(started=time.monotonic())

    in_ranks(4, train)
    assert discarded == ["rank 0"]
    assert not read_config(path).runtime.compile
    found, expected = (
        [record.get("loss", record.get("val_loss")) for record in read_metrics(folder)] for folder in (path, one.path)
    )
    assert found == pytest.approx(expected, rel=1e-5)
