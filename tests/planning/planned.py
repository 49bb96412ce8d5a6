"""Plans for texts and for pairs, with any field of the request replaced."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.machines import machine
from tinylm.config.jobs import objective_for
from tinylm.config.run import AdapterConfig, DataConfig
from tinylm.jobs.pairs.job import PairSizes
from tinylm.machine.measure import Machine
from tinylm.planning.plan import Plan, plan_training
from tinylm.planning.plan_request import PlanRequest


def data(train_tokens: int) -> DataConfig:
    """A text with this number of training tokens."""
    return DataConfig(
        corpus=("c.txt",),
        train_characters=train_tokens,
        fingerprint="f",
        characters=train_tokens,
        bytes=train_tokens,
        documents=1,
        train_tokens=train_tokens,
        val_tokens=1000,
    )


def planned(tokens: int = 1_000_000, on: Machine | None = None, **choices: Any) -> Plan:
    """The plan of a request with these fields, for a text of `tokens`; by default with the first fitting objective."""
    return plan_training(on or machine(), request_of(tokens, **choices))


def request_of(tokens: int = 1_000_000, **choices: Any) -> PlanRequest:
    """The request with these fields, as `planned`."""
    fields: dict[str, Any] = {"data": data(tokens), "vocab_size": 100, **choices}
    base = fields.get("base")
    architecture = fields.get("model", {}).get("architecture", "decoder") if base is None else base.architecture
    return PlanRequest(**{"objective": objective_for(architecture, fields["data"].kind), **fields})


def planned_pairs(train: list[int], val: Sequence[int] = (10,), **choices: Any) -> Plan:
    """The plan of pairs that need contexts of these numbers of tokens."""
    pairs = dataclasses.replace(data(20 * len(train)), kind="pairs", train_pairs=len(train), val_records=100)
    sizes = PairSizes(np.array(train), np.array(val))
    return planned(**{"data": pairs, "sizes": sizes, "model": {"architecture": "encoder-decoder"}, **choices})


def adapter(**choices: Any) -> AdapterConfig:
    """A LoRA with the default rank of finetune-lora."""
    values: dict[str, Any] = {"base": "", "base_digest": "", "rank": 8, "alpha": 16.0, "dropout": 0.0}
    return AdapterConfig(**{**values, "targets": ("q_proj",), **choices})
