"""The configuration of training: objective, budget, batches, sequence length warmup, learning rate and optimizer.

Frozen dataclasses that are validated like those of `model.py`. Imports no torch.

Sequence length warmup (decision 037): windows of text are split into shorter sequences until 85 % of a run. Early in
training, a model learns little from distant tokens, and short sequences cost less attention (Li et al. 2022). Every
eighth step has whole windows, which keep the model usable, and its validation loss comparable, at its full context from
the beginning. Splitting windows changes neither the tokens of a batch nor their order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from tinylm.config.jobs import JOBS, without_effect
from tinylm.config.validation import (
    COUNT_FROM_0,
    COUNT_FROM_1,
    FRACTION,
    Panel,
    Range,
    Setting,
    check_fields,
    describe_value,
    require,
)

SCHEDULES = ("trapezoid", "cosine", "linear", "inverse-sqrt", "constant")
MUON_OPTIMIZERS = ("muon", "normuon")  # for matrices of layers, with AdamW for other parameters
OPTIMIZERS = ("adamw", "adam", *MUON_OPTIMIZERS)
CLASS_WEIGHTS = ("none", "balanced")
KEEP = ("best", "last")
GENERATIONS, SEEDS = Range(1, 16), Range(0, 1 << 63, open_high=True)
TIME_BUDGET = Range(0, 366 * 24 * 3600, open_low=True)  # seconds
EPOCHS, BATCH = Range(0, 1e6, open_low=True), Range(1, 1 << 20)
SEQUENCE_GROWTHS = (1, 2, 4)  # sequences that a window is split into at the beginning
MIN_AVERAGE = 1e-6  # smallest mean age of averaged weights, as a fraction of the steps; the inverse must be finite


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: exactly one of optimizer steps, epochs (passes over the training text) and time in seconds.

    Raises UsageError for none or several of these, and for a value out of range.
    """

    steps: Annotated[int | None, COUNT_FROM_1] = None
    epochs: Annotated[float | None, EPOCHS] = None
    time: Annotated[float | None, TIME_BUDGET] = None

    def __post_init__(self) -> None:
        check_fields(self)
        given = [f"`{f.name}`" for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} contradict each other; set one of them.")
        require(len(given) == 1, "A run needs a budget: `steps`, `epochs` or `time`.")

    @property
    def kind(self) -> str:
        """The name of the field that is set: steps, epochs or time."""
        return "time" if self.time is not None else "steps" if self.steps is not None else "epochs"

    def ratio(self, other: Budget) -> float:
        """How many times as long as another budget it is; 1 for one of another kind."""
        return getattr(self, self.kind) / getattr(other, self.kind) if self.kind == other.kind else 1.0

    def total_steps(self, steps_per_epoch: float) -> int | None:
        """The budget in optimizer steps, at least 1; `None` for a time budget."""
        if self.epochs is not None:
            return max(1, math.ceil(self.epochs * steps_per_epoch))
        return self.steps


def parse_generations(text: str) -> int | None:
    """The value of --generations: a number, or `None` for auto. Raises UsageError for other text."""
    known = text == "auto" or text.isdecimal()
    require(known, f"`generations` is {describe_value(text)}; it must be a number or auto.")
    return None if text == "auto" else int(text)


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """The fields of TrainingConfig about learning from other models, as in TrainingSettings: not for adapters."""

    generations: Annotated[
        int | None,
        Setting(
            "Parts of the run; each trains a new model, which also learns from the last one (default: by passes).",
            Panel.LENGTH,
            GENERATIONS,
            metavar="N|auto",
            parse=parse_generations,
            jobs="text",
            neutral=1,
        ),
    ] = None
    join: Annotated[
        int | None,
        Setting(
            "Join the best N generations into one model, N times as wide (default: up to 4 unless a size is chosen).",
            Panel.LENGTH,
            GENERATIONS,
            jobs="text",
            neutral=1,
        ),
    ] = None
    teacher_weight: Annotated[
        float | None,
        Setting(
            "Weight of the predictions of teachers in the loss; the text has the rest (default: 0.5).",
            Panel.OPTIMIZER,
            Range(0, 1),
            jobs="text distillation",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The fields of TrainingConfig that can be chosen. `None` leaves the value to the recipe or the plan."""

    patience: Annotated[
        int | None,
        Setting(
            "Early stopping: stop after N evaluations without a lower validation loss.", Panel.LENGTH, COUNT_FROM_1
        ),
    ] = None
    seed: Annotated[int | None, Setting("Random seed (default: 0).", Panel.MACHINE, SEEDS)] = None
    batch_size: Annotated[
        int | None, Setting("Sequences per optimizer step (global batch size).", Panel.OPTIMIZER, BATCH)
    ] = None
    micro_batch: Annotated[
        int | None,
        Setting("Sequences per forward pass; gradients are accumulated up to --batch-size.", Panel.OPTIMIZER, BATCH),
    ] = None
    checkpoint_activations: Annotated[
        bool | None,
        Setting(
            "Compute blocks again in the backward pass: less memory, more time (default: where memory is short).",
            Panel.MEMORY,
            metavar="",
            flags=("--checkpoint-activations/--no-checkpointing",),
        ),
    ] = None
    sequence_length: Annotated[
        int | None,
        Setting(
            "Tokens per sequence of a model that is trained further (default: its context; 512 if above 1,024).",
            Panel.OPTIMIZER,
            Range(1, 1 << 24),
        ),
    ] = None
    sequence_growth: Annotated[
        int | None,
        Setting(
            "Parts that windows of text are split into early in training; 1: none (default: by context).",
            Panel.OPTIMIZER,
            Range(SEQUENCE_GROWTHS[0], SEQUENCE_GROWTHS[-1]),
            metavar="|".join(map(str, SEQUENCE_GROWTHS)),
            jobs="text masked distillation",
            neutral=1,
        ),
    ] = None
    lr: Annotated[float | None, Setting("Peak learning rate.", Panel.OPTIMIZER, Range(0, 1000, open_low=True))] = None
    min_lr: Annotated[
        float | None, Setting("Learning rate at the end of the schedule.", Panel.OPTIMIZER, Range(0, 1000))
    ] = None
    schedule: Annotated[str | None, Setting("Learning-rate schedule after warmup.", Panel.OPTIMIZER, SCHEDULES)] = None
    weight_decay: Annotated[
        float | None, Setting("Weight decay of matrices; gains and biases have none.", Panel.OPTIMIZER, Range(0, 1000))
    ] = None
    beta1: Annotated[
        float | None, Setting("Adam beta1: decay rate of the gradient average.", Panel.OPTIMIZER, FRACTION)
    ] = None
    beta2: Annotated[
        float | None, Setting("Adam beta2: decay rate of the squared-gradient average.", Panel.OPTIMIZER, FRACTION)
    ] = None
    momentum: Annotated[float | None, Setting("Momentum of Muon and NorMuon.", Panel.OPTIMIZER, FRACTION)] = None
    grad_clip: Annotated[
        float | None, Setting("Clip the gradient to this norm; 0 disables clipping.", Panel.OPTIMIZER, Range(0, 1e6))
    ] = None
    optimizer: Annotated[str | None, Setting("Optimizer (default: the preset's).", Panel.OPTIMIZER, OPTIMIZERS)] = None
    average: Annotated[
        float | None,
        Setting(
            "Validate and save averaged weights; X is their mean age as a fraction of the steps so far.",
            Panel.OPTIMIZER,
            Range(0, 0.5),
        ),
    ] = None
    objective: Annotated[
        str | None, Setting("Training objective (default: by the data).", Panel.OPTIMIZER, tuple(JOBS))
    ] = None
    dpo_beta: Annotated[
        float | None,
        Setting(
            "DPO: how strongly the model is kept near the one it started from (default: 0.1).",
            Panel.OPTIMIZER,
            Range(0, 100, open_low=True),
            jobs="preferences",
        ),
    ] = None
    label_smoothing: Annotated[
        float | None,
        Setting(
            "Label smoothing: share of the target probability spread over all tokens.",
            Panel.OPTIMIZER,
            FRACTION,
            jobs="text masked pairs chat labels",
            neutral=0,
        ),
    ] = None
    class_weights: Annotated[
        str | None,
        Setting(
            "Weights of texts with a label in the loss; balanced: the same for all labels (default: none).",
            Panel.OPTIMIZER,
            CLASS_WEIGHTS,
            jobs="labels",
            neutral="none",
        ),
    ] = None
    mtp_weight: Annotated[
        float | None,
        Setting(
            "Multi-token prediction: initial loss weight of the token after next; falls to 0 at 60 % of the run.",
            Panel.OPTIMIZER,
            Range(0, 1),
            jobs="text",
            neutral=0,
        ),
    ] = None
    bpe_dropout: Annotated[
        float | None,
        Setting(
            "Probability of undoing a BPE merge; falls to 0 at 60 % of the run (default: 0.3 in long runs).",
            Panel.OPTIMIZER,
            Range(0, 0.5),
            jobs="text",
            neutral=0,
        ),
    ] = None
    pack: Annotated[
        bool | None,
        Setting(
            "Several conversations per row of a batch, without attention between them (default: where faster).",
            Panel.OPTIMIZER,
            jobs="chat preferences",
        ),
    ] = None
    eval_every: Annotated[int | None, Setting("Steps between evaluations.", Panel.INTERVALS, COUNT_FROM_1)] = None
    save_every: Annotated[int | None, Setting("Steps between checkpoints.", Panel.INTERVALS, COUNT_FROM_1)] = None
    log_every: Annotated[
        int | None, Setting("Steps between log lines in metrics.jsonl.", Panel.INTERVALS, COUNT_FROM_1)
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TeacherSettings, TrainingSettings):
    """The settings of a training run. TrainingSettings and TeacherSettings describe the fields that can be chosen.

    label_smoothing: weight of the uniform distribution in the target.
    mtp_weight, bpe_dropout: of the first step; see `tinylm.jobs.text.job`.
    dpo_beta: see `tinylm.jobs.preferences.job`. generations: see `tinylm.training.generations`.
    join: the number of generations that the model of the run joins; see `tinylm.training.join`.
    teacher_weight: see `soft_next_token` and `tinylm.jobs.distillation.job`.
    class_weights: see `tinylm.jobs.labels.classifier`. sequence_growth: see `window_parts`.
    micro_batch: sequences per forward pass at most, on each rank.
    sequence_length: `None` for the context of the model.
    warmup: as a fraction of the budget.
    epsilon: of Adam, added to the root of the second moment.
    keep: the weights for inference: best (of the lowest validation loss) or last (of the last evaluation).
    eval_tokens: maximum validation tokens per evaluation.
    """

    objective: str = "next-token"
    budget: Budget
    generations: int = 1
    join: int = 1
    batch_size: int = field()
    micro_batch: int = field()
    checkpoint_activations: bool = False
    sequence_growth: int = 1
    lr: float = field()
    min_lr: float = field()
    warmup: Annotated[float, COUNT_FROM_0]
    schedule: str = "cosine"
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: Annotated[float, Range(0, 1, open_low=True)] = 1e-8
    momentum: float = 0.95
    grad_clip: float = 1.0
    keep: Annotated[str, KEEP] = "best"
    label_smoothing: float = 0.0
    mtp_weight: float = 0.0
    bpe_dropout: float = 0.0
    dpo_beta: float = 0.1
    teacher_weight: float = 0.5
    class_weights: str = "none"
    average: float = 0.0
    eval_every: int = 100
    eval_tokens: Annotated[int, COUNT_FROM_1] = 1_000_000
    save_every: int = 100
    log_every: int = 10
    pack: bool = True
    seed: int = 0

    def with_budget(self, budget: Budget) -> Self:
        """These settings with another budget; with a longer one, a run of generations has more of them."""
        more = round(self.generations * budget.ratio(self.budget)) if self.generations > 1 else 1
        return dataclasses.replace(
            self, budget=budget, generations=min(max(self.generations, more), int(GENERATIONS.high))
        )

    def effective(self) -> dict[str, Any]:
        """The settings that have an effect on this run, by name."""
        others = without_effect(self, JOBS[self.objective])
        if self.optimizer not in MUON_OPTIMIZERS:
            others |= {"momentum"}
        if self.objective == "next-token" and self.generations == 1:
            others |= {"teacher_weight"}
        if self.schedule == "constant":
            others |= {"min_lr"}
        return {name: value for name, value in vars(self).items() if value is not None and name not in others}

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.warmup <= 1, "`warmup_steps` is more than the whole run; set fewer, or a longer budget.")
        require(
            self.average == 0 or self.average >= MIN_AVERAGE,
            f"`average` is {self.average:g}; it must be 0, or from {MIN_AVERAGE:g} to 0.5.",
        )
        require(
            self.join <= self.generations,
            f"`join` is {self.join}; it must be at most `generations` ({self.generations}).",
        )
        require(
            self.min_lr <= self.lr,
            f"`min_lr` is {self.min_lr}; it must be at most `lr` ({self.lr}), since the learning rate falls to it.",
        )
        require(
            self.micro_batch <= self.batch_size,
            f"`micro_batch` is {self.micro_batch}; it must be at most `batch_size` ({self.batch_size}).",
        )


HALVED_GROWTH, NO_GROWTH = 0.6, 0.85  # progress from which windows are split into half as many parts, and are whole
WHOLE_EVERY = 8  # steps, of which the last has whole windows


def window_parts(step: int, progress: float, growth: int) -> int:
    """The number of sequences that each window of a step is split into.

    step: steps before this one. progress: from 0 to 1. growth: one of SEQUENCE_GROWTHS; half as many from HALVED_GROWTH
    on, and 1 from NO_GROWTH on.
    """
    if step % WHOLE_EVERY == WHOLE_EVERY - 1 or progress >= NO_GROWTH:
        return 1
    return growth if progress < HALVED_GROWTH else max(1, growth // 2)


def mean_share(growth: int) -> float:
    """The length of the sequences divided by that of the windows, as a mean over the tokens of a long run."""
    bounds = (0.0, HALVED_GROWTH, NO_GROWTH, 1.0)
    return sum(
        (end - start) / window_parts(step, start, growth) / WHOLE_EVERY
        for start, end in itertools.pairwise(bounds)
        for step in range(WHOLE_EVERY)
    )


def check_sequence_growth(growth: int, length: int, *, is_plain_text: bool) -> None:
    """Raise UsageError if training sequences of `length` tokens cannot be split as `sequence_growth` says."""
    require(growth in SEQUENCE_GROWTHS, f"`sequence_growth` is {growth}; it must be 1, 2 or 4.")
    require(growth == 1 or is_plain_text, "`sequence_growth` is for plain text; leave it out.")
    require(
        length % growth == 0,
        f"`sequence_growth` is {growth}; it must divide the length of the sequences, {length}.",
    )
