"""A resumed run: its micro-batch, and a save that a restart cannot recover. test_ranks.py restarts whole runs."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.machines import machine
from tests.planning.planned import data
from tests.variants import small
from tinylm.errors import TinyLMError
from tinylm.planning.memory import TrainingMemory
from tinylm.planning.memory_plan import MemoryPlan
from tinylm.planning.plan_request import PlanRequest
from tinylm.planning.recipes import MEMORY_ERROR, MEMORY_SHARE
from tinylm.ranks import Ranks
from tinylm.training import restart
from tinylm.training.pipeline import Session
from tinylm.training.restart import start_run
from tinylm.training.resumed_plan import ResumedPlan
from tinylm.training.training_request import train_request


def test_the_micro_batch_is_that_of_the_save_unless_it_cannot_fit() -> None:
    memory = TrainingMemory(state=1000, gradients=400, per_sequence=100)
    plan = MemoryPlan(parallel="ddp", checkpointing=False, memory=memory, checkpointed=memory)
    request = PlanRequest(data=data(1000), vocab_size=100, base=small())

    def resumed(notices: list[str], **properties: Any) -> int:
        return ResumedPlan(machine(**properties), request, plan, 64).micro_batch(64, notices)

    assert resumed([], free_memory=None) == 64
    for share, kept in ((1.0, True), (1.01 - MEMORY_ERROR, True), (0.99 - MEMORY_ERROR, False)):
        notices: list[str] = []
        free = int(share * memory.needed(64, 64))
        found = resumed(notices, free_memory=free)
        assert ((found == 64), len(notices)) == (kept, 0 if kept else 1)
        assert kept or memory.needed(found, 64) <= MEMORY_SHARE * free < memory.needed(found + 1, 64)


def test_a_save_that_cannot_be_recovered_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(restart, "recover_last", refuse)
    request = train_request(tmp_path / "text.txt", tmp_path / "run", {})
    with pytest.raises(TinyLMError, match=r"Cannot continue .*run after a restart: Read-only file system\."):
        start_run(request, Session(ranks=Ranks(job="a", restarts=1)))
