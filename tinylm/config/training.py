"""The configuration of training: objective, budget, batches, learning rate and optimizer.

Frozen dataclasses that are validated like those of `model.py`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from tinylm.config.validation import check_choice, check_values, require
from tinylm.errors import UsageError

SCHEDULES = ("trapezoid", "cosine", "linear", "inverse-sqrt", "constant")
MUON_OPTIMIZERS = ("muon", "normuon")  # for matrices of layers, with AdamW for other parameters
OPTIMIZERS = ("adamw", "adam", *MUON_OPTIMIZERS)


class ObjectiveKind(NamedTuple):
    """The kind of corpus of an objective, and the architectures that the objective can train."""

    corpus: str
    architectures: tuple[str, ...]


# Implemented in tinylm/evaluation/task_kinds.py. The first that fits the architecture and the corpus is the default.
OBJECTIVES = {
    "next-token": ObjectiveKind("text", ("decoder",)),
    "masked-token": ObjectiveKind("text", ("encoder",)),
    "sequence-to-sequence": ObjectiveKind("pairs", ("encoder-decoder",)),
    "chat": ObjectiveKind("chat", ("decoder",)),
}


def corpora_of(architecture: str) -> tuple[str, ...]:
    """The kinds of corpus on which the architecture can be trained, the default first."""
    return tuple(dict.fromkeys(kind.corpus for kind in OBJECTIVES.values() if architecture in kind.architectures))


def objective_for(architecture: str, corpus: str, preferred: str | None = None) -> str:
    """The preferred objective if it fits the architecture and the kind of corpus, else the first in `OBJECTIVES` that
    fits. Raises UsageError if none fits.
    """
    fitting = [
        name for name, kind in OBJECTIVES.items() if architecture in kind.architectures and corpus == kind.corpus
    ]
    if not fitting:
        raise UsageError(f'A model of `architecture="{architecture}"` cannot be trained on {corpus}.')
    return preferred if preferred in fitting else fitting[0]


KEEP = ("best", "last")
MIN_AVERAGE = 1e-6  # smallest mean age of averaged weights, as a fraction of the steps; the inverse must be finite


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: exactly one of optimizer steps, epochs (passes over the training text) and time in seconds.

    Raises UsageError for none or several of these, and for a value out of range.
    """

    steps: int | None = None
    epochs: float | None = None
    time: float | None = None

    def __post_init__(self) -> None:
        check_values(vars(self))
        given = [f"`{f.name}`" for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} contradict each other; set one of them.")
        require(len(given) == 1, "A run needs a budget: `steps`, `epochs` or `time`.")

    @property
    def kind(self) -> str:
        """The name of the field that is set: steps, epochs or time."""
        return "time" if self.time is not None else "steps" if self.steps is not None else "epochs"

    def total_steps(self, steps_per_epoch: float) -> int | None:
        """The budget in optimizer steps, at least 1; `None` for a time budget."""
        if self.epochs is not None:
            return max(1, math.ceil(self.epochs * steps_per_epoch))
        return self.steps


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings of a training run.

    objective: a key of `OBJECTIVES`. label_smoothing: weight of the uniform distribution in the target.
    mtp_weight: weight of the loss of the token after the next in the first step; see `tinylm.objectives.tasks`.
    batch_size, micro_batch: sequences per optimizer step, and at most per forward pass (on each rank).
    checkpoint_activations: store only the inputs of blocks, and compute other activations again in the backward pass.
    sequence_length: tokens per sequence; `None` for the context of the model.
    sequence_growth: the sequences that a window of text is split into at the beginning; see sequence_growth.py.
    lr, min_lr, warmup, schedule: peak and final learning rate, warmup as a fraction of the budget, shape of the decay.
    optimizer, weight_decay: one of OPTIMIZERS, and its weight decay on matrices.
    beta1, beta2, epsilon: of Adam; epsilon is added to the root of the second moment. momentum: of Muon and NorMuon.
    grad_clip: maximum norm of the gradient; 0 disables clipping.
    patience: evaluations without a lower validation loss before training stops; `None` disables early stopping.
    keep: the weights for inference: best (of the lowest validation loss) or last (of the last evaluation).
    average: mean age of averaged weights, as a fraction of the steps so far; 0 disables averaging.
    eval_every, save_every, log_every: intervals in steps; eval_tokens: maximum validation tokens per evaluation.
    pack: conversations share rows of a batch, without attention between conversations.
    log_gradients: log the gradient norm of each layer. seed: of initial weights, data order and dropout.
    """

    objective: str = "next-token"
    budget: Budget
    batch_size: int
    micro_batch: int
    checkpoint_activations: bool = False
    sequence_length: int | None = None
    sequence_growth: int = 1
    lr: float
    min_lr: float
    warmup: float
    schedule: str = "cosine"
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    momentum: float = 0.95
    grad_clip: float = 1.0
    patience: int | None = None
    keep: str = "best"
    label_smoothing: float = 0.0
    mtp_weight: float = 0.0
    average: float = 0.0
    eval_every: int = 100
    eval_tokens: int = 1_000_000
    save_every: int = 100
    log_every: int = 10
    log_gradients: bool = False
    pack: bool = True
    seed: int = 0

    def effective(self) -> dict[str, Any]:
        """The settings that have an effect on this run, by name."""
        without_effect: set[str] = set()
        if self.optimizer not in MUON_OPTIMIZERS:
            without_effect |= {"momentum"}
        if self.schedule == "constant":
            without_effect |= {"min_lr"}
        if self.objective != "chat":
            without_effect |= {"pack"}
        if self.objective != "next-token":
            without_effect |= {"mtp_weight"}
        if OBJECTIVES[self.objective].corpus != "text":
            without_effect |= {"sequence_growth"}
        return {name: value for name, value in vars(self).items() if value is not None and name not in without_effect}

    def __post_init__(self) -> None:
        require(
            self.warmup <= 1,
            "`warmup_steps` is more than the whole run; set fewer, or a longer budget.",
        )
        check_values(vars(self))
        require(
            self.average == 0 or self.average >= MIN_AVERAGE,
            f"`average` is {self.average:g}; it must be 0, or from {MIN_AVERAGE:g} to 0.5.",
        )
        require(
            self.min_lr <= self.lr,
            f"`min_lr` is {self.min_lr}; it must be at most `lr` ({self.lr}), since the learning rate falls to it.",
        )
        check_choice("objective", self.objective, tuple(OBJECTIVES))
        require(
            self.mtp_weight == 0 or self.objective == "next-token",
            "`mtp_weight` is for decoders that are trained on plain text; leave it out.",
        )
        check_choice("keep", self.keep, KEEP)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        require(
            self.micro_batch <= self.batch_size,
            f"`micro_batch` is {self.micro_batch}; it must be at most `batch_size` ({self.batch_size}).",
        )
