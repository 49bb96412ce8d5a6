"""Events that a training run sends to its callbacks, and their records in metrics.jsonl."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinylm.config.run import RunConfig
from tinylm.jobs.job import MarkedText
from tinylm.planning.plan import Plan
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Transformer


@dataclass(frozen=True)
class Stepped:
    """Sent after each optimizer step.

    step: number of the step, from 1
    progress: used fraction of the budget, from 0 to 1, before the step
    generation: from 1
    """

    step: int
    progress: float
    generation: int = 1


@dataclass(frozen=True)
class Logged:
    """Sent every `log_every` steps. `loss` and the metrics are means over targets since the previous Logged event.

    step, progress: as in Stepped
    loss: in the unit of `RunConfig.loss_unit`, such as nats per token
    lr: learning rate of this step
    grad_norm: of this step, before clipping; `None` if fp16 loss scaling skipped the step
    tokens_per_second: since the previous Logged event, without the time of evaluations and saves
    seconds: since the start of the run, in all of its sessions
    metrics: those of the objective and of experts
    """

    step: int
    progress: float
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_second: float
    seconds: float
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Evaluated:
    """Sent before the first step, every `eval_every` steps, and at the end.

    val_loss, val_bits_per_byte: as `loss` in Logged, and the same in bits per byte (see `RunConfig.bits_per_byte`)
    best: whether `val_loss` is the lowest so far
    seconds: since the start of the run, in all of its sessions
    metrics: of the objective on the validation data, by name
    joined: the number of generations that the evaluated model joins; `None` for the model in training
    tokens: number of targets that count in the loss, of an evaluation that is not compared with others, since it has
        fewer of them: before the first step, and after a signal; otherwise `None`
    """

    step: int
    val_loss: float
    best: bool
    seconds: float
    val_bits_per_byte: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    tokens: int | None = None
    joined: int | None = None


@dataclass(frozen=True)
class Sampled:
    """Sent when a text was sampled after an evaluation.

    text: generated without a prompt
    step, val_loss, seconds: as in Evaluated
    """

    step: int
    val_loss: float
    seconds: float
    text: str


@dataclass(frozen=True)
class GenerationBegan:
    """Sent when a generation but the first begins. number: from 1, of `count`. step: steps before it"""

    number: int
    count: int
    step: int


@dataclass(frozen=True)
class Joining:
    """Sent before generations are joined to one model. count: their number"""

    count: int


@dataclass(frozen=True)
class Notice:
    """A message for the user, such as a smaller micro-batch after running out of memory."""

    message: str


@dataclass(frozen=True)
class Planned:
    """Sent before a new run is created. `parameters` is the number of trainable parameters."""

    plan: Plan
    config: RunConfig
    parameters: int


@dataclass(frozen=True)
class Examples:
    """Sent before a new run with `show_examples`: the first training conversations, with their scored parts."""

    examples: tuple[MarkedText, ...]


@dataclass(frozen=True)
class Started:
    """Sent when the training of the run at `path`, new or resumed, begins.

    steps_per_epoch: optimizer steps per pass over the training data
    best: step and validation loss of the best evaluation of earlier sessions, if there is one
    resumed_step: the step of the save that a resumed run continues from; `None` for a new run
    """

    path: Path
    config: RunConfig
    model: Transformer
    tokenizer: Tokenizer
    steps_per_epoch: float
    best: tuple[int, float] | None
    resumed_step: int | None = None


Event = Planned | Examples | Started | GenerationBegan | Joining | Stepped | Logged | Evaluated | Sampled | Notice
EventCallback = Callable[[Event], None]


def metrics_record(event: Logged | Evaluated) -> dict[str, Any]:
    """The event as a JSON record, as in metrics.jsonl and in --json output."""
    if isinstance(event, Evaluated):
        bits = {} if event.val_bits_per_byte is None else {"val_bits_per_byte": event.val_bits_per_byte}
        others = {f"val_{name}": value for name, value in event.metrics.items()}
        others |= {} if event.tokens is None else {"val_tokens": event.tokens}
        others |= {} if event.joined is None else {"joined": event.joined}
        return {"step": event.step, "val_loss": event.val_loss, **bits, **others, "seconds": round(event.seconds, 3)}
    return {
        "step": event.step,
        "loss": event.loss,
        "lr": event.lr,
        "grad_norm": event.grad_norm,
        "tokens_per_second": round(event.tokens_per_second, 1),
        "seconds": round(event.seconds, 3),
        **event.metrics,
    }
