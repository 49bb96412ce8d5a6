"""The input of a plan: the data and the user's choices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.config.presets import SIZES, PresetSettings
from tinylm.config.run import AdapterConfig, DataConfig
from tinylm.config.sequence_growth import mean_share
from tinylm.config.settings import MachineSettings, SharedSettings
from tinylm.config.training import MUON_OPTIMIZERS, Budget
from tinylm.config.validation import check_settings
from tinylm.errors import UsageError
from tinylm.planning.data_shape import DataShape, Rows, TextShape
from tinylm.planning.recipes import (
    DEFAULT_SECONDS,
    MIN_VALIDATION_RECORDS,
    MIN_VALIDATION_TOKENS,
    RECIPES,
    Recipe,
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A training run before it is planned.

    data, vocab_size, shape: the encoded corpus, the size of its vocabulary, and the result of `data_shape`
    model: the user's choices of `preset`, `size` and fields of ModelConfig; empty with a `base`
    training: the user's choices of fields of TrainingConfig, and of `warmup_steps`
    budget: without one, a run ends when the validation loss stops improving, or after DEFAULT_SECONDS; see also `keep`
    compile: auto, on or off
    base: the model to train further, or the base model of `adapter`
    adapter: the adapter to train; `None` trains the model itself
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

    def __post_init__(self) -> None:
        check_settings(SharedSettings, self.training)
        check_settings(MachineSettings, {"compile": self.compile})
        check_settings(PresetSettings, self.model)
        if self.size != "auto" and self.model.keys() >= SIZES[self.size].keys():
            parts = ", ".join(f"`{name}`" for name in SIZES[self.size])
            raise UsageError(f"`size` sets {parts}, and all of them are given; leave out `size` or one of them.")
        if "pack" in self.training and not self.data.is_chat:
            raise UsageError("`pack` is for conversations, and the text has none; leave it out.")
        if self.training.get("schedule") == "constant" and self.training.get("min_lr") is not None:
            raise UsageError('`min_lr` has no effect with `schedule="constant"`; leave one of them out.')
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

    @property
    def is_new_modern(self) -> bool:
        """Whether a model of preset modern is trained from scratch: decisions 014 and 019 apply to it."""
        return self.base is None and self.recipe_name == "modern"

    @property
    def keep(self) -> str:
        """The weights to keep, one of KEEP: the last ones if the validation data are too few to choose weights by
        (decision 043), unless the user relies on them by a `patience`.
        """
        few = self.data.val_records < MIN_VALIDATION_RECORDS
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
