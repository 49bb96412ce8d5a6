"""The state of a trainer: counters, random number generators, optimizer tensors, saved and restored."""

import dataclasses
import math
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.config.validation import MAX_COUNT
from tinylm.errors import TinyLMError
from tinylm.objectives.loss import Loss
from tinylm.training.optimizer import first_state, updaters
from tinylm.training.parallel import as_shard, local

# The fields of the state of a GradScaler, which torch converts to float32 and int32, and their largest values.
SCALER_LIMITS: dict[str, float] = {
    "scale": 2.0**127,
    "growth_factor": 2.0**127,
    "backoff_factor": 1.0,
    "growth_interval": (1 << 31) - 1,
    "_growth_tracker": (1 << 31) - 1,
}


@dataclass
class TrainerState:
    """The state that a trainer needs, besides weights and optimizer tensors, to resume a run exactly.

    step: optimizer steps taken
    seconds: training time in all sessions, up to the last save; setup_seconds: the part before the first step
    step_seconds: total time of the steps; eval_seconds: time of the last evaluation; save_seconds: expected time of the
        next save
    micro_batch: sequences per forward pass; halved each time memory runs out
    best_loss, best_step: lowest validation loss of trained weights, and its step; val_loss: the last one
    generation: number of generations before this one; generation_step, generation_seconds: step and seconds when it
        began; generation_loss: its lowest validation loss; prediction_seconds: time of the predictions of a teacher;
        join_seconds: expected time to join generations
    joined_step, joined_loss: the step after which generations were joined, 0 before, and the loss of the joined model
    evals_since_best: evaluations since `generation_loss`; last_eval_step: step of the last evaluation, or -1
    eval_tokens: validation tokens per evaluation; 0 if they are those of the configuration
    loss_sum, metrics, n_targets: loss in nats and metrics, summed over targets since the last log line, and the number
        of targets
    skipped_steps: consecutive steps that fp16 loss scaling skipped; scaler: state of the GradScaler
    """

    step: int = 0
    seconds: float = 0.0
    setup_seconds: float = 0.0
    step_seconds: float = 0.0
    eval_seconds: float = 0.0
    save_seconds: float = 0.0
    micro_batch: int = 1
    best_loss: float | None = None
    best_step: int = 0
    val_loss: float | None = None
    generation: int = 0
    generation_step: int = 0
    generation_seconds: float = 0.0
    prediction_seconds: float = 0.0
    generation_loss: float | None = None
    joined_step: int = 0
    joined_loss: float | None = None
    join_seconds: float = 0.0
    evals_since_best: int = 0
    last_eval_step: int = -1
    eval_tokens: int = 0
    loss_sum: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    n_targets: int = 0
    skipped_steps: int = 0
    scaler: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values, with the current states of torch's random number generators."""
        return {**dataclasses.asdict(self), "rng": capture_rng()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrainerState":
        """The inverse of `to_json`; also restores torch's random number generators.

        Raises TinyLMError for values that are not a valid state.
        """
        try:
            values = dict(values)
            if "n_sequences" in values:  # until 2026-11-28, metrics were summed over sequences
                values = {**values, "metrics": {}, "loss_sum": 0.0, "n_targets": 0}
                del values["n_sequences"], values["n_tokens"]
            if values.get("best_step") == 0:  # until 2026-11-29, the loss before training could be the best
                values["best_loss"] = None
            values.setdefault("generation_loss", values.get("best_loss"))  # until 2026-11-30, runs had no generations
            restore_rng(values.pop("rng"))
            state = cls(**values)
            state._check_numbers()
            return state
        except (TypeError, KeyError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise TinyLMError(f"The saved training state is damaged ({error}).") from error

    def _check_numbers(self) -> None:
        """Raise ValueError for a number of the wrong type or range. A state may come from an untrusted source."""
        _check_number("micro_batch", self.micro_batch, int, 1)
        counts = ("step", "best_step", "generation", "generation_step", "evals_since_best")
        for name in (*counts, "eval_tokens", "n_targets", "skipped_steps"):
            _check_number(name, getattr(self, name), int, 0)
        _check_number("last_eval_step", self.last_eval_step, int, -1)
        times = ("seconds", "setup_seconds", "generation_seconds", "prediction_seconds", "join_seconds")
        for name in (*times, "step_seconds", "eval_seconds", "save_seconds"):
            _check_number(name, getattr(self, name), float, 0.0, MAX_COUNT)
        _check_number("generation_step", self.generation_step, int, 0, self.step)
        _check_number("joined_step", self.joined_step, int, 0, self.step)
        if self.joined_step and self.joined_loss is None:
            raise ValueError("joined_loss is None")
        _check_number("generation_seconds", self.generation_seconds, float, 0.0, self.seconds)
        for name in ("loss_sum", "best_loss", "val_loss", "generation_loss", "joined_loss"):
            if name == "loss_sum" or getattr(self, name) is not None:
                _check_number(name, getattr(self, name), float, -math.inf)
        for name, value in self.metrics.items():
            if not torch.tensor(value, dtype=torch.float64).isfinite().all():
                raise ValueError(f"{name[:40]} is not finite")
        for name, limit in SCALER_LIMITS.items() if self.scaler != {} else ():
            _check_number(name, self.scaler[name], type(limit), 0, limit)


def _check_number(name: str, value: Any, kind: type, minimum: float, maximum: float = math.inf) -> None:
    """Raise ValueError unless the value is a finite number of the type `kind` from `minimum` to `maximum`.

    Integers are valid floats. Their size is at most MAX_COUNT, since larger ones may not fit a float.
    """
    is_number = type(value) is int or (kind is float and type(value) is float and math.isfinite(value))
    if not is_number or not minimum <= value <= maximum or (type(value) is int and abs(value) > MAX_COUNT):
        raise ValueError(f"{name} is {str(value)[:40]}")


def add_metrics(sums: dict[str, Any], metrics: dict[str, Any], weight: float = 1) -> dict[str, Any]:
    """The sums with `weight` times each metric added. Values are numbers or nested lists of them.

    Raises TinyLMError for lists of different shapes, as of a saved state of another model.
    """

    def add(total: Any, value: Any) -> Any:
        if isinstance(value, list):
            return [add(*pair) for pair in zip(total or [0] * len(value), value, strict=True)]
        return total + weight * value

    try:
        return sums | {name: add(sums.get(name) or 0, value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        message = "The saved training state does not fit the model: its routing metrics have another shape."
        raise TinyLMError(message) from error


@dataclass
class Sums:
    """The loss of a step in nats and its metrics, summed over targets."""

    loss: Tensor
    metrics: dict[str, Any] = field(default_factory=dict)

    def add(self, loss: Loss) -> None:
        """Add the loss of a micro-batch."""
        self.loss += loss.total.detach()
        values = {name: value.tolist() for name, value in loss.metrics.items()}
        self.metrics = add_metrics(self.metrics, values, loss.n_targets)


def capture_rng() -> dict[str, str]:
    """The states of torch's random number generators: by device, bytes in hexadecimal."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def restore_rng(states: dict[str, str]) -> None:
    """The inverse of `capture_rng`. Raises ValueError, KeyError, TypeError or RuntimeError for an invalid state."""
    tensors = {device: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for device, text in states.items()}
    cpu = tensors["cpu"]
    if len(cpu) != len(torch.get_rng_state()):
        raise ValueError("the state of the random number generator has the wrong size")
    # torch checks each of the two counters of the position among the 624 numbers of the Mersenne Twister by itself, so
    # an invalid pair would read beyond the array.
    _, left, _, position = struct.unpack_from("=QiiQ", cpu.numpy().tobytes())
    if (left, position) != (1, 0) and not (left >= 1 and position >= 1 and left + position == 625):
        raise ValueError("the state of the random number generator is out of range")
    torch.set_rng_state(cpu)
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    if "mps" in tensors and torch.backends.mps.is_available():
        torch.mps.set_rng_state(tensors["mps"])


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as tensors named `<parameter>/<quantity>`, as in `norm.weight/exp_avg`.

    The state of sharded parameters is sharded.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{quantity}": torch.as_tensor(value)
        for parameter, state in optimizer.state.items()
        for quantity, value in state.items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Restore the optimizer's state from `optimizer_tensors`; of sharded parameters, from the rows of this rank.

    Raises TinyLMError if names, shapes or dtypes do not fit this optimizer and this model.
    """
    updater_of = updaters(optimizer)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter in updater_of}
    found: dict[str, set[str]] = defaultdict(set)
    for key, value in tensors.items():
        name, _, quantity = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is not None and not optimizer.state[parameter]:  # one after the other, to save memory
            optimizer.state[parameter] = first_state(updater_of[parameter], parameter)
        if parameter is None or quantity not in {*optimizer.state[parameter], "average"}:
            raise TinyLMError(f"The saved optimizer does not fit the model: it has {key[:200]}.")
        state = optimizer.state[parameter]
        if value.shape != local(state.get(quantity, parameter)).shape or value.dtype != torch.float32:
            raise TinyLMError(
                f"The saved optimizer does not fit the model: {key[:200]} is {value.dtype} {tuple(value.shape)}."
            )
        state[quantity] = as_shard(value, parameter) if value.dim() else value.to(parameter.device)
        found[name].add(quantity)
    for name, quantities in found.items():
        if missing := optimizer.state[parameters[name]].keys() - quantities:
            raise TinyLMError(f"The saved optimizer does not fit the model: it lacks {min(missing)} of a parameter.")
