"""The input of a plan: the encoded data, and the user's choices."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tinylm.config.jobs import JOBS, JobRow
from tinylm.config.model import ModelConfig
from tinylm.config.presets import SIZES, PresetSettings
from tinylm.config.run import AdapterConfig, DataConfig
from tinylm.config.settings import MachineSettings, SharedSettings
from tinylm.config.training import MUON_OPTIMIZERS, Budget, mean_share
from tinylm.config.validation import check_settings
from tinylm.errors import UsageError
from tinylm.planning.recipes import DEFAULT_SECONDS, MIN_VALIDATION_TOKENS, RECIPES, Recipe
from tinylm.planning.sizes import Rows, Sizes


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A training run before it is planned.

    objective: what the model learns from the data, a key of JOBS
    data, vocab_size, sizes: the encoded corpus, the size of its vocabulary, and the sizes of its texts
    tokenizer_kind: see Tokenizer
    model: `preset`, `size` and fields of ModelConfig that the user or the job chose; empty with a `base`
    training: the user's choices of fields of TrainingConfig, and of `warmup_steps`; planning adds `sequence_growth` and
        `average` where they are left open
    budget: without one, a run ends when the validation loss stops improving, or after DEFAULT_SECONDS; see also `keep`
    compile: auto, on or off
    base: the model to train further, or the base model of `adapter`
    adapter: the adapter to train; `None` trains the model itself
    frozen_parameters: of other models that each step runs, such as teachers
    max_context: of a new model, by default; `None` for no limit
    base_loading_bytes: memory that the weights of `base` took while they were read
    parallel, ranks: auto, ddp or fsdp, and the number of processes that train the model together

    Raises UsageError for values outside their range and for choices that contradict each other.
    """

    objective: str
    data: DataConfig
    vocab_size: int
    sizes: Sizes = field(default_factory=Sizes)
    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    compile: str = "auto"
    base: ModelConfig | None = None
    base_loading_bytes: int = 0
    parallel: str = "auto"
    ranks: int = 1
    adapter: AdapterConfig | None = None
    frozen_parameters: int = 0
    max_context: int | None = None
    tokenizer_kind: str = "char"

    def __post_init__(self) -> None:
        check_settings(SharedSettings, self.training)
        check_settings(MachineSettings, {"compile": self.compile})
        check_settings(PresetSettings, self.model)
        if self.size != "auto" and self.model.keys() >= SIZES[self.size].keys():
            parts = ", ".join(f"`{name}`" for name in SIZES[self.size])
            raise UsageError(f"`size` sets {parts}, and all of them are given; leave out `size` or one of them.")
        if self.keeps_first_weights and self.parallel == "fsdp":
            raise UsageError(
                "The loss compares all weights with those of the beginning, which are not sharded; set "
                '`parallel="ddp"`, or train a LoRA.'
            )
        if self.training.get("schedule") == "constant" and self.training.get("min_lr") is not None:
            raise UsageError('`min_lr` has no effect with `schedule="constant"`; leave one of them out.')
        if self.training.get("bpe_dropout") and self.tokenizer_kind != "bpe":
            raise UsageError(
                f"`bpe_dropout` is for a BPE tokenizer, and this one is of kind {self.tokenizer_kind}; leave it out, "
                'or train a new model with `tokenizer="bpe"`.'
            )
        if "momentum" in self.training and self.optimizer not in MUON_OPTIMIZERS:
            raise UsageError(f'`momentum` has no effect with `optimizer="{self.optimizer}"`; leave one of them out.')

    def with_training(self, **settings: Any) -> Self:
        """This request with more choices of fields of TrainingConfig."""
        return replace(self, training={**self.training, **settings})

    @property
    def preset(self) -> str:
        """The preset of the model; for a base, the preset of its initialisation."""
        return self.base.initialisation if self.base else self.model.get("preset", "modern")

    @property
    def size(self) -> str:
        """The chosen size, or `auto`."""
        return self.model.get("size", "auto")

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
    def row(self) -> JobRow:
        """The job of the objective."""
        return JOBS[self.objective]

    @property
    def keeps_first_weights(self) -> bool:
        """Whether the loss compares all weights with those that training started from, a copy of which is kept."""
        return self.adapter is None and self.row.has_reference

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
        few = self.data.val_records < self.sizes.min_validation_records
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
        return self.sizes.rows(self.data, config.context, self.training.get("pack"))
