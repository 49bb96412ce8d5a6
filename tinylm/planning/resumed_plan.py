"""The memory plan of a resumed run: replicas or shards, the micro-batch, and whether they fit."""

from dataclasses import dataclass, replace

from tinylm.config.run import RunConfig
from tinylm.errors import TinyLMError
from tinylm.machine.measure import Machine
from tinylm.planning.batch_size import choose_micro_batch
from tinylm.planning.cost import parameters_by_part
from tinylm.planning.data_shape import data_shape
from tinylm.planning.memory_plan import MemoryPlan, describe_shortage, plan_memory
from tinylm.planning.plan_request import PlanRequest
from tinylm.planning.recipes import MEMORY_ERROR
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ResumedPlan:
    """How a resumed run uses the memory of each process."""

    machine: Machine
    request: PlanRequest
    memory_plan: MemoryPlan
    batch_size: int

    @property
    def parallel(self) -> str:
        """`ddp` or `fsdp`."""
        return self.memory_plan.parallel

    def micro_batch(self, saved: int, notices: list[str]) -> int:
        """The micro-batch of the save, so that the run continues as if it had not stopped; if it does not fit in
        memory, a smaller one, with a message in `notices`.
        """
        free, memory = self.machine.free_memory, self.memory_plan.memory
        if free is None or memory.needed(saved, self.batch_size) * (1 - MEMORY_ERROR) <= free:
            return saved
        request = replace(self.request, training={**self.request.training, "micro_batch": saved})
        return choose_micro_batch(self.machine, request, self.batch_size, memory, notices)


def plan_resumed(
    config: RunConfig, tokens: TokenFolder, tokenizer: Tokenizer, free: int | None, parallel: str, ranks: int
) -> ResumedPlan:
    """The plan of a run with a recorded configuration.

    free: bytes of memory for each of the `ranks` processes, before a save is loaded; `None` if not reported
    parallel: auto, ddp or fsdp

    Raises TinyLMError if the run does not fit in memory, and UsageError as `plan_memory`.
    """
    training, runtime, data = config.training, config.runtime, config.data
    assert training is not None and runtime is not None and data is not None
    model = replace(config.model, context=training.sequence_length or config.model.context)
    recorded = {name: getattr(training, name) for name in ("optimizer", "average", "checkpoint_activations")}
    request = PlanRequest(
        data=data,
        vocab_size=tokenizer.vocab_size,
        shape=data_shape(data, tokens, tokenizer.end_of_text_id),
        training=recorded | ({"pack": training.pack} if data.is_chat else {}),
        base=model,
        adapter=config.adapter,
        parallel=parallel,
        ranks=ranks,
    )
    machine = Machine.recorded(runtime, free)
    memory_plan = plan_memory(machine, request, model, parameters_by_part(model)["total"], training.batch_size)
    shortage = describe_shortage(machine, memory_plan, training.batch_size)
    if shortage is not None:
        shards = ', or resume in several processes with `parallel="fsdp"`' if memory_plan.parallel == "ddp" else ""
        raise TinyLMError(f"{shortage} Free memory{shards}.")
    return ResumedPlan(machine, request, memory_plan, training.batch_size)
