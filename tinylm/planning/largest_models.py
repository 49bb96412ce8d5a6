"""The largest models that a machine can train in ten minutes and in one day, for `tinylm doctor`."""

from typing import Any

from tinylm.config.run import DataConfig
from tinylm.config.training import Budget
from tinylm.machine.measure import Machine
from tinylm.planning.plan import plan_training
from tinylm.planning.plan_request import PlanRequest

SECONDS = {"ten_minutes": 600.0, "one_day": 86_400.0}
VOCABULARY, TOKENS = 8192, 10**11  # a text so long that only the time limits the model


def largest_models(machine: Machine) -> dict[str, dict[str, Any]]:
    """The planned model by the name of the time: its size, the tokens that it is trained on, and memory."""
    return {name: _largest_model(machine, seconds) for name, seconds in SECONDS.items()}


def _largest_model(machine: Machine, seconds: float) -> dict[str, Any]:
    data = DataConfig(
        corpus=(),
        train_characters=4 * TOKENS,
        fingerprint="",
        characters=4 * TOKENS,
        bytes=4 * TOKENS,
        documents=1,
        train_tokens=TOKENS,
        val_tokens=TOKENS // 10,
    )
    plan = plan_training(machine, PlanRequest(data=data, vocab_size=VOCABULARY, budget=Budget(time=seconds)))
    return {
        "layers": plan.model.layers,
        "width": plan.model.width,
        "parameters": plan.parameters,
        "tokens": plan.steps * plan.training.batch_size * plan.model.context,
        "memory_gb": round(plan.memory / 1e9, 1),
    }
