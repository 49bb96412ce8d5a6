"""A resumed run keeps its micro-batch, unless that cannot fit in memory."""

from typing import Any

import pytest

from tests.machines import machine
from tests.planning.planned import data
from tests.variants import small
from tinylm.planning.memory import TrainingMemory
from tinylm.planning.memory_plan import MemoryPlan
from tinylm.planning.plan_request import PlanRequest
from tinylm.planning.recipes import MEMORY_ERROR, MEMORY_SHARE
from tinylm.training.resumed_plan import ResumedPlan


@pytest.mark.parametrize(("share", "kept"), [(1.0, True), (1.01 - MEMORY_ERROR, True), (0.99 - MEMORY_ERROR, False)])
def test_the_micro_batch_is_that_of_the_save_unless_it_cannot_fit(share: float, kept: bool) -> None:
    memory = TrainingMemory(state=1000, gradients=400, per_sequence=100)
    plan = MemoryPlan(parallel="ddp", checkpointing=False, memory=memory, checkpointed=memory)
    request = PlanRequest(data=data(1000), vocab_size=100, base=small())
    notices: list[str] = []
    free = int(share * memory.needed(64, 64))

    def resumed(**properties: Any) -> int:
        return ResumedPlan(machine(**properties), request, plan, 64).micro_batch(64, notices)

    assert resumed(free_memory=None) == 64
    found = resumed(free_memory=free)
    assert (found == 64) == kept
    assert len(notices) == (0 if kept else 1)
    if not kept:
        assert memory.needed(found, 64) <= MEMORY_SHARE * free < memory.needed(found + 1, 64)
