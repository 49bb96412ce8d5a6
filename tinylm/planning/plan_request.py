"""The input of a plan: the sizes of the encoded data, for each kind of data, and the user's choices."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tinylm.config.model import ModelConfig
from tinylm.config.presets import SIZES, PresetSettings
from tinylm.config.run import AdapterConfig, DataConfig
from tinylm.config.settings import MachineSettings, SharedSettings
from tinylm.config.training import MUON_OPTIMIZERS, OBJECTIVES, Budget, mean_share, objective_for
from tinylm.config.validation import check_settings
from tinylm.errors import UsageError
from tinylm.planning import recipes
from tinylm.planning.recipes import (
    DEFAULT_SECONDS,
    MIN_VALIDATION_RECORDS,
    MIN_VALIDATION_TOKENS,
    RECIPES,
    Recipe,
)
from tinylm.text.chat_tokens import ChatTokens, chat_rows, worth_packing
from tinylm.text.corpus import Corpus
from tinylm.text.corpus_encoding import CHAT_TYPES
from tinylm.text.labels import LabelCorpus, LabelTokens
from tinylm.text.pairs import PairContexts, PairCorpus
from tinylm.text.token_files import TokenFolder

PARTS = ("training", "validation")


@dataclass(frozen=True)
class Rows:
    """The training sequences of an epoch.

    count: number of sequences
    tokens: mean tokens per sequence, without padding; of a pair, source and target together
    longest: maximum tokens per sequence, with the padding of packed rows; of a pair, as for `tokens`
    constant: whether all sequences have the same length, with padding
    continues: whether a batch can span two epochs; otherwise, the last batch of an epoch may be smaller
    """

    count: float
    tokens: float
    longest: int
    constant: bool
    continues: bool = False

    def steps_per_epoch(self, batch_size: int) -> float:
        """Optimizer steps per pass over the training data."""
        steps = self.count / batch_size
        return steps if self.continues else max(1.0, float(math.ceil(steps)))


class DataShape(Protocol):
    """The sizes of one kind of encoded data.

    data: the encoded data. pack: the user's choice of `TrainingConfig.pack`; `None` without one.
    """

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """The context of a new model. context: the default of its size; a notice is appended if it is shortened."""
        ...

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        """Sentences about data that are cut or left out.

        is_new: whether the model is new, so that its context can change

        Raises UsageError for text shorter than a window, and for conversations without a scored token within the
        context. (If no pair fits, `make_task` raises it.)
        """
        ...

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        """The training sequences for a model with this context, which `check_context` accepts."""
        ...

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        """Number of targets in the validation data, as `TrainingConfig.eval_tokens` counts them, and of all tokens."""
        return data.val_tokens, data.val_tokens

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        """Defaults of TrainingConfig for these data."""
        ...


class TextShape(DataShape):
    """Plain text, in windows of the length of the context."""

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """The default, or if it is too long, one less than the number of training tokens."""
        available = data.train_tokens - 1  # the last token is a target only
        if context > available:
            notices.append(
                f"The training text has only {data.train_tokens:,} tokens: the context is shortened to {available}."
            )
        return min(context, available)

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        available = data.train_tokens - 1
        if context > available:
            shorter = f", or a `context` of at most {available}" if is_new else ""
            raise UsageError(
                f"The training text has {data.train_tokens} tokens, and a context of {context} needs {context + 1}; "
                f"give more text{shorter}."
            )
        return []

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        return Rows(data.train_tokens / context, context, context, constant=True, continues=True)

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {}


@dataclass(frozen=True, eq=False)
class PairShape(DataShape):
    """Pairs; those longer than the context are left out."""

    contexts: PairContexts

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """A context that fits nearly all pairs."""
        return fitting_context(*self.contexts)

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        sentences = []
        for name, part in zip(PARTS, self.contexts, strict=True):
            left_out = int((part > context).sum())
            if left_out:
                sentences.append(
                    f"{left_out:,} of {len(part):,} {name} pairs are left out: they do not fit the context of "
                    f"{context}, and the longest needs {part.max()}."
                )
        return sentences

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        train = self.contexts.train
        fitting = int((train <= context).sum())
        longest = 2 * min(int(train.max()), context)  # source and target
        return Rows(fitting, data.train_tokens / data.train_pairs, longest, constant=False)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        return data.val_tokens // 2, data.val_tokens  # about half of a pair is its target

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {"label_smoothing": recipes.PAIR_LABEL_SMOOTHING}


@dataclass(frozen=True, eq=False)
class ChatShape(DataShape):
    """Conversations; those longer than the context are cut.

    train, val: the conversations for training and for validation
    """

    train: ChatTokens
    val: ChatTokens

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """The default, lengthened so that nearly all conversations fit."""
        return max(context, fitting_context(self.train.lengths - 1, self.val.lengths - 1))

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        """As in DataShape. Raises UsageError if no token within the context counts in the loss."""
        named = (("training", self.train), ("validation", self.val))
        for name, part in named:
            part.require_examples(context, name)
        return [sentence for name, part in named for sentence in part.describe_left_out(context, name)]

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        packed = self._packs(context, pack)
        rows = chat_rows(self.train, context, packed)
        return Rows(len(rows), rows.n_tokens / len(rows), rows.width, constant=packed)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        return self.val.n_scored, int(np.minimum(self.val.lengths, context).sum())

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {"pack": self._packs(context, pack)}

    def _packs(self, context: int, pack: bool | None) -> bool:
        """Whether conversations share rows: the user's choice, or what is faster for the context."""
        return worth_packing(self.train, context) if pack is None else bool(pack)


class LabelShape(ChatShape):
    """Texts with a label each, one per row; those longer than the context are cut."""

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        return {"label_smoothing": recipes.CLASSIFICATION_SMOOTHING}

    def _packs(self, context: int, pack: bool | None) -> bool:
        return False


SHAPES: dict[str, Callable[[TokenFolder, int], DataShape]] = {
    Corpus.kind: lambda tokens, end_of_text_id: TextShape(),
    LabelCorpus.kind: lambda tokens, end_of_text_id: LabelShape(LabelTokens(tokens.train), LabelTokens(tokens.val)),
    PairCorpus.kind: lambda tokens, end_of_text_id: PairShape(PairContexts.from_tokens(tokens, end_of_text_id)),
}


def data_shape(data: DataConfig, tokens: TokenFolder, end_of_text_id: int) -> DataShape:
    """The shape of encoded data of any kind."""
    if data.is_chat:
        tokens_type = CHAT_TYPES[data.kind].tokens_type
        return ChatShape(tokens_type(tokens.train), tokens_type(tokens.val))
    return SHAPES[data.kind](tokens, end_of_text_id)


def fitting_context(train: np.ndarray, val: np.ndarray) -> int:
    """A context that fits nearly all examples; fitting a few very long ones would take most of the memory.

    train, val: (N,) and (M,), the context that each example needs
    """
    usual = int(np.quantile(train, recipes.PAIR_CONTEXT_QUANTILE, method="higher"))
    longest = max(int(part.max()) for part in (train, val))
    context, multiple = min(longest, recipes.PAIR_CONTEXT_FACTOR * usual), recipes.PAIR_CONTEXT_MULTIPLE
    return max(recipes.MIN_PAIR_CONTEXT, math.ceil(context / multiple) * multiple)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A training run before it is planned.

    data, vocab_size, shape: the encoded corpus, the size of its vocabulary, and the result of `data_shape`
    tokenizer_kind: see Tokenizer
    model: the user's choices of `preset`, `size` and fields of ModelConfig; empty with a `base`
    training: the user's choices of fields of TrainingConfig, and of `warmup_steps`; planning adds `sequence_growth` and
        `average` where they are left open
    budget: without one, a run ends when the validation loss stops improving, or after DEFAULT_SECONDS; see also `keep`
    compile: auto, on or off
    base: the model to train further, or the base model of `adapter`
    adapter: the adapter to train; `None` trains the model itself
    labels: those of a new classifier
    teacher_parameters, teacher_context: number of parameters of all teachers, and their shortest context
    base_loading_bytes: memory that the weights of `base` took while they were read
    parallel, ranks: auto, ddp or fsdp, and the number of processes that train the model together

    Raises UsageError for values outside their range and for choices that contradict each other.
    """

    data: DataConfig
    vocab_size: int
    shape: DataShape = field(default_factory=TextShape)
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    compile: str = "auto"
    base: ModelConfig | None = None
    base_loading_bytes: int = 0
    parallel: str = "auto"
    ranks: int = 1
    adapter: AdapterConfig | None = None
    labels: tuple[str, ...] = ()
    teacher_parameters: int = 0
    teacher_context: int | None = None
    tokenizer_kind: str = "char"

    def __post_init__(self) -> None:
        check_settings(SharedSettings, self.training)
        check_settings(MachineSettings, {"compile": self.compile})
        check_settings(PresetSettings, self.model)
        if self.size != "auto" and self.model.keys() >= SIZES[self.size].keys():
            parts = ", ".join(f"`{name}`" for name in SIZES[self.size])
            raise UsageError(f"`size` sets {parts}, and all of them are given; leave out `size` or one of them.")
        objective = self.training.get("objective")
        if objective is not None and OBJECTIVES[objective].corpus != self.data.kind:
            name = "`teacher`" if self.teacher_parameters else f'`objective="{objective}"`'
            raise UsageError(
                f"{name} is for {OBJECTIVES[objective].corpus}, and the data are {self.data.kind}; leave it out."
            )
        if "dpo_beta" in self.training and not self.data.has_reference:
            raise UsageError("`dpo_beta` is for preferences, and the data are others; leave it out.")
        if self.labels and self.model.get("tie"):
            raise UsageError("`tie` is for models of text; the output layer of a classifier has labels. Leave it out.")
        if "class_weights" in self.training and not self.data.has_labels:
            raise UsageError("`class_weights` is for texts with labels, and the data are others; leave it out.")
        if self.keeps_first_weights and self.parallel == "fsdp":
            raise UsageError(
                "The loss compares all weights with those of the beginning, which are not sharded; set "
                '`parallel="ddp"`, or train a LoRA.'
            )
        if not self.teacher_parameters and (objective == "distillation" or "teacher_weight" in self.training):
            raise UsageError("Distillation needs a model to learn from, `teacher`, which adapters do not take.")
        if "pack" in self.training and not self.data.is_chat:
            raise UsageError("`pack` is for conversations, and the text has none; leave it out.")
        if self.training.get("schedule") == "constant" and self.training.get("min_lr") is not None:
            raise UsageError('`min_lr` has no effect with `schedule="constant"`; leave one of them out.')
        if self.training.get("bpe_dropout") and self.tokenizer_kind != "bpe":
            raise UsageError(
                f"`bpe_dropout` is for a BPE tokenizer, and this one is of kind {self.tokenizer_kind}; leave it out, "
                'or train a new model with `tokenizer="bpe"`.'
            )
        if "momentum" in self.training and self.optimizer not in MUON_OPTIMIZERS:
            raise UsageError(f'`momentum` has no effect with `optimizer="{self.optimizer}"`; leave one of them out.')

    @property
    def preset(self) -> str:
        """The preset of the model; for a base, the preset of its initialisation."""
        return self.base.initialisation if self.base else self.model.get("preset", "modern")

    @property
    def size(self) -> str:
        """The chosen size, or `auto`."""
        return self.model.get("size", "auto")

    @property
    def model_fields(self) -> dict[str, Any]:
        """The chosen fields of ModelConfig."""
        return {name: value for name, value in self.model.items() if name not in ("preset", "size")}

    @property
    def recipe_name(self) -> str:
        """Key of RECIPES: the kind of the adapter, or the preset."""
        return self.preset if self.adapter is None else self.adapter.kind

    @property
    def recipe(self) -> Recipe:
        """The defaults of this kind of training."""
        return RECIPES[self.recipe_name]

    @property
    def optimizer(self) -> str:
        """The chosen optimizer, or that of the recipe."""
        return self.training.get("optimizer", self.recipe.settings.get("optimizer", "adamw"))

    def objective(self, config: ModelConfig) -> str:
        """The chosen objective, or the default for this model and the data."""
        return self.training.get("objective", objective_for(config.architecture, self.data.kind))

    @property
    def keeps_first_weights(self) -> bool:
        """Whether the loss compares all weights with those that training started from, a copy of which is kept."""
        return self.adapter is None and self.data.has_reference

    @property
    def is_new_modern(self) -> bool:
        """Whether a model of preset modern is trained from scratch: decisions 014 and 019 apply to it."""
        return self.base is None and self.recipe_name == "modern"

    @property
    def keep(self) -> str:
        """The weights to keep, one of KEEP: the last ones if the validation data are too few to choose weights by
        (decision 043), unless the user relies on them by a `patience`. A text that is learned by heart is validated
        on itself.
        """
        if self.data.by_heart:
            return "best"
        enough = recipes.MIN_VALIDATION_LABELS if self.data.has_labels else MIN_VALIDATION_RECORDS
        few = self.data.val_records < enough
        if not self.data.val_records:
            few = self.data.val_tokens <= MIN_VALIDATION_TOKENS  # the first is not scored
        return "last" if few and self.training.get("patience") is None else "best"

    @property
    def effective_budget(self) -> Budget:
        """The chosen budget, or DEFAULT_SECONDS."""
        return self.budget or Budget(time=DEFAULT_SECONDS)

    @property
    def seconds(self) -> float:
        """Training time in seconds; DEFAULT_SECONDS for a budget in steps or epochs."""
        return self.effective_budget.time or DEFAULT_SECONDS

    @property
    def sequence_growth(self) -> int:
        """The chosen growth, or 1."""
        return self.training.get("sequence_growth", 1)

    def mean_length(self, config: ModelConfig) -> float:
        """Tokens per sequence, as a mean over the run, for windows of the context of a model."""
        return config.context * mean_share(self.sequence_growth)

    def rows(self, config: ModelConfig) -> Rows:
        """The training sequences for the context of a model."""
        return self.shape.rows(self.data, config.context, self.training.get("pack"))
