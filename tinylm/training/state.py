"""All that a trainer must remember to go on as if it had never stopped."""

import dataclasses
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.errors import TinyLMError


@dataclass
class TrainerState:
    """`seconds` is the time spent so far, `setup_seconds` what of it passed before the first step, `stepping_seconds`
    what the steps took, and `evaluation_seconds` and `save_seconds` what the last of each did.

    `stale` counts evaluations since the best; `evaluated` is the step of the last one, -1 before the first; `nats` and
    `scored` are summed since the last log line, and so are, over `sequences`, numbers and lists of numbers that the
    model `told` of itself; `scaler` is the state of fp16's loss scaling, `skipped` the steps that
    it has left out one after another.
    """

    step: int = 0
    seconds: float = 0.0
    setup_seconds: float = 0.0
    stepping_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    micro_batch: int = 1
    best_loss: float | None = None
    best_step: int = 0
    val_loss: float | None = None
    stale: int = 0
    evaluated: int = -1
    nats: float = 0.0
    scored: int = 0
    told: dict[str, Any] = field(default_factory=dict)
    sequences: int = 0
    skipped: int = 0
    scaler: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "rng": capture_rng()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainerState":
        """Restores torch's random number generators as well. Raises TinyLMError for values that are not a state."""
        try:
            values = dict(values)
            restore_rng(values.pop("rng"))
            state = cls(**values)
            state._require_numbers()
            return state
        except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise TinyLMError(f"The saved training state is damaged ({error}).") from error

    def _require_numbers(self) -> None:
        """Raises ValueError for a value that no training could have saved: a state may come from anywhere."""
        _require("micro_batch", self.micro_batch, int, 1)
        for name in ("step", "best_step", "stale", "scored", "sequences", "skipped"):
            _require(name, getattr(self, name), int, 0)
        _require("evaluated", self.evaluated, int, -1)
        for name in ("seconds", "setup_seconds", "stepping_seconds", "evaluation_seconds", "save_seconds"):
            _require(name, getattr(self, name), float, 0.0)
        for name in ("nats", "best_loss", "val_loss"):
            if getattr(self, name) is not None:
                _require(name, getattr(self, name), float, -math.inf)
        for name, value in (*self.told.items(), *self.scaler.items()):
            for number in _flat(value):
                _require(name[:40], number, float, -math.inf)


LARGEST = 1 << 53  # of a count


def _require(name: str, value: Any, kind: type, least: float) -> None:
    number = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if not number or value < least or (kind is int and value > LARGEST):
        raise ValueError(f"{name} is {str(value)[:40]}")


def _flat(value: Any) -> Iterator[Any]:
    """The entries of a list of lists, or a value that is no list."""
    if isinstance(value, list):
        for entry in value:
            yield from _flat(entry)
    else:
        yield value


def capture_rng() -> dict[str, str]:
    """The states of torch's random number generators, in hexadecimal, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def restore_rng(state: dict[str, str]) -> None:
    def tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    cpu = tensor(state["cpu"])
    _require_generator(cpu)
    torch.set_rng_state(cpu)
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(state["cuda"]))
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensor(state["mps"]))


def _require_generator(state: Tensor) -> None:
    """Raises ValueError for a state of torch's Mersenne Twister whose position is not in its 624 numbers.

    torch checks the two counters one by one, and would read behind the numbers.
    """
    if len(state) != len(torch.get_rng_state()):
        raise ValueError("the state of the random number generator has another size")
    _, left, _, position = struct.unpack_from("=QiiQ", state.numpy().tobytes())
    if (left, position) != (1, 0) and not (left >= 1 and position >= 1 and left + position == 625):
        raise ValueError("the state of the random number generator is out of range")


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's memory under the parameters' names: `<parameter>/<quantity>`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{quantity}": torch.as_tensor(value)
        for parameter, memory in optimizer.state.items()
        for quantity, value in memory.items()
    }


ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
MUON_STATE = {"momentum_buffer"}
AVERAGE = {"average"}


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`. Raises TinyLMError when the tensors are not those of this optimizer."""
    expected = {
        parameter: ADAM_STATE if "betas" in group else MUON_STATE
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, quantity = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or quantity not in expected.get(parameter, set()) | AVERAGE:
            raise TinyLMError(f"The saved optimizer does not fit the model: it has {key[:200]}.")
        shape = () if quantity == "step" else tuple(parameter.shape)
        if tuple(value.shape) != shape or value.dtype != torch.float32:
            raise TinyLMError(
                f"The saved optimizer does not fit the model: {key[:200]} is {value.dtype} {tuple(value.shape)}."
            )
        # Step counters are numbers; they stay where the optimizer keeps them.
        device = parameter.device if value.dim() or optimizer.defaults.get("fused") else value.device
        optimizer.state[parameter][quantity] = value.to(device)
    for parameter, quantities in expected.items():
        found = optimizer.state[parameter].keys() - AVERAGE if parameter in optimizer.state else set()
        if found and found != quantities:
            raise TinyLMError(
                f"The saved optimizer does not fit the model: it lacks {min(quantities - found)} of a parameter."
            )
