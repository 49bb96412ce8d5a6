"""What a plan is made from: the user's choices, the sizes of the encoded data, and the cost of a model on a machine."""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from tinylm.config.jobs import JOBS, JobRow
from tinylm.config.model import ModelConfig
from tinylm.config.presets import SIZES, PresetSettings
from tinylm.config.run import AdapterConfig, DataConfig
from tinylm.config.settings import MachineSettings, TrainSettings
from tinylm.config.training import MUON_OPTIMIZERS, SEQUENCE_GROWTHS, Budget, mean_share
from tinylm.config.validation import check_settings
from tinylm.errors import UsageError
from tinylm.machine.measure import Machine, probe_config
from tinylm.planning import recipes
from tinylm.transformer.build import build_empty_model, count_parameters

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


class Sizes:
    """The sizes of encoded data: here of plain text, in windows of the length of the context. Jobs on other data
    override what differs.

    lr_factor, new_lr_factor: of the learning rate of the recipe, for models that are trained further and for new ones
    dropout: its rule for new models of any preset; `None` for that of the preset
    min_steps_per_epoch: so many batches have all the data together, if there are so many examples
    unvalidated: passes and least steps of a run without a chosen budget that validation cannot end
    is_brief: whether no run of the job can be ended by validation, whose loss falls while the model becomes worse
    min_validation_records: with fewer, the validation loss does not show which weights are better

    data: the encoded data. pack: the user's choice of `TrainingConfig.pack`; `None` without one.
    """

    lr_factor: ClassVar[float] = 1.0
    new_lr_factor: ClassVar[float] = 1.0
    dropout: ClassVar[recipes.DropoutRule | None] = None
    min_steps_per_epoch: ClassVar[int] = 1
    unvalidated: ClassVar[tuple[int, int]] = (recipes.UNVALIDATED_EPOCHS, recipes.UNVALIDATED_STEPS)
    is_brief: ClassVar[bool] = False
    min_validation_records: ClassVar[int] = recipes.MIN_VALIDATION_RECORDS

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """The context of a new model: here the default, or if that is too long, one less than the training tokens.

        context: the default of its size; a notice is appended if it is shortened
        """
        available = data.train_tokens - 1  # the last token is a target only
        if context > available:
            notices.append(
                f"The training text has only {data.train_tokens:,} tokens: the context is shortened to {available}."
            )
        return min(context, available)

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        """Sentences about data that are cut or left out.

        is_new: whether the model is new, so that its context can change

        Raises UsageError for text shorter than a window, and if nothing is scored within the context. (If no pair
        fits, the task raises it.)
        """
        available = data.train_tokens - 1
        if context > available:
            shorter = f", or a `context` of at most {available}" if is_new else ""
            raise UsageError(
                f"The training text has {data.train_tokens} tokens, and a context of {context} needs {context + 1}; "
                f"give more text{shorter}."
            )
        return []

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        """The training sequences for a model with this context, which `check_context` accepts."""
        return Rows(data.train_tokens / context, context, context, constant=True, continues=True)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        """Number of targets in the validation data, as `TrainingConfig.eval_tokens` counts them, and of all tokens."""
        return data.val_tokens, data.val_tokens

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        """Defaults of TrainingConfig for these data."""
        return {}


def fitting_context(train: np.ndarray, val: np.ndarray) -> int:
    """A context that fits nearly all examples; fitting a few very long ones would take most of the memory.

    train, val: (N,) and (M,), the context that each example needs
    """
    usual = int(np.quantile(train, recipes.CONTEXT_QUANTILE, method="higher"))
    longest = max(int(part.max()) for part in (train, val))
    context, multiple = min(longest, recipes.CONTEXT_FACTOR * usual), recipes.CONTEXT_MULTIPLE
    return max(recipes.MIN_CONTEXT, math.ceil(context / multiple) * multiple)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A training run before it is planned.

    objective: what the model learns from the data, a key of JOBS
    data, vocab_size, sizes: the encoded corpus, the size of its vocabulary, and the sizes of its texts
    tokenizer_kind: see Tokenizer
    model: `preset`, `size` and fields of ModelConfig that the user or the job chose; empty with a `base`
    training: the user's choices of fields of TrainingConfig, and of `warmup_steps`; planning adds an `average` where it
        is left open
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
        check_settings(TrainSettings, self.training)
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
    def recipe(self) -> recipes.Recipe:
        """The defaults of this kind of training."""
        return recipes.RECIPES[self.recipe_name]

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
        (decision 043), unless the user relies on them by a `patience`, or by `generations`, of which each begins with
        new weights. A text that is learned by heart is validated on itself.
        """
        if self.data.by_heart:
            return "best"
        few = self.data.val_records < self.sizes.min_validation_records
        if not self.data.val_records:
            few = self.data.val_tokens <= recipes.MIN_VALIDATION_TOKENS  # the first is not scored
        relies_on_them = self.training.get("patience") is not None or self.training.get("generations", 1) > 1
        return "last" if few and not relies_on_them else "best"

    @property
    def effective_budget(self) -> Budget:
        """The chosen budget, or DEFAULT_SECONDS."""
        return self.budget or Budget(time=recipes.DEFAULT_SECONDS)

    @property
    def seconds(self) -> float:
        """Training time in seconds; DEFAULT_SECONDS for a budget in steps or epochs."""
        return self.effective_budget.time or recipes.DEFAULT_SECONDS

    def sequence_growth(self, config: ModelConfig) -> int:
        """How the lengths of sequences grow: as chosen, or as planned for a model (decision 037).

        Sequences of new modern decoders with RoPE grow on plain text, as far as the shortest have at least
        MIN_GROWING_LENGTH tokens.
        """
        if "sequence_growth" in self.training:
            return self.training["sequence_growth"]
        is_decoder = config.architecture == "decoder" and config.position == "rope"
        if not self.is_new_modern or not is_decoder or not self.data.is_plain_text:
            return 1
        context, shortest = config.context, recipes.MIN_GROWING_LENGTH
        return max((n for n in SEQUENCE_GROWTHS if context % n == 0 and context // n >= shortest), default=1)

    @property
    def mtp_weight(self) -> float:
        """The weight of multi-token prediction: the chosen one, or in new modern decoders of plain text with a small
        vocabulary, MTP_WEIGHT (decision 039).
        """
        if "mtp_weight" in self.training:
            return self.training["mtp_weight"]
        is_small = self.vocab_size <= recipes.MTP_MAX_VOCABULARY
        return recipes.MTP_WEIGHT if self.is_new_modern and self.objective == "next-token" and is_small else 0.0

    @property
    def soft_target_bytes(self) -> int:
        """Memory for the soft targets of the text: at each position, an id and a probability of each candidate."""
        id_bytes = 2 if self.vocab_size < 1 << 16 else 4
        return self.data.train_tokens * min(recipes.SOFT_CANDIDATES, self.vocab_size) * (id_bytes + 2)

    def mean_length(self, config: ModelConfig) -> float:
        """Tokens per sequence, as a mean over the run, for windows of the context of a model."""
        return config.context * mean_share(self.sequence_growth(config))

    def rows(self, config: ModelConfig) -> Rows:
        """The training sequences for the context of a model."""
        return self.sizes.rows(self.data, config.context, self.training.get("pack"))


@functools.cache
def matrix_parameters(config: ModelConfig) -> int:
    """Parameters of the matrices that each token is multiplied by, the output layer included.

    Not counted: embeddings (looked up), vectors (gains and biases), and experts that a token is not routed to. In an
    encoder-decoder, both stacks are counted for every token, which is an overestimate.
    """
    total = config.width * config.outputs
    for name, (shape, layers) in layer_matrices(config).items():
        count = shape.numel()
        if ".experts." in name:
            count = count * config.experts_per_token // config.experts
        total += layers * count
    return total


@functools.cache
def layer_matrices(config: ModelConfig) -> Mapping[str, tuple[torch.Size, int]]:
    """The matrices of the first layer of each stack, by name: the shape, and the number of layers of the stack."""
    return {name: (shape, layers) for name, shape, layers in _layer_parameters(config) if len(shape) == 2}


def _layer_parameters(config: ModelConfig) -> Iterator[tuple[str, torch.Size, int]]:
    """Name and shape of each parameter of the first layer of each stack, and the number of layers of that stack.

    All layers of a stack have the same shapes, so only one is built; 1,000 layers would take seconds.
    """
    encoder_layers = None if config.encoder_layers is None else 1
    no_windows: dict[str, Any] = {"local_window": None, "local_layers": (), "local_rope_theta": None}
    first = replace(config, layers=1, encoder_layers=encoder_layers, **no_windows)
    for name, parameter in build_empty_model(first).named_parameters():
        if "layers." in name:
            in_encoder = name.startswith("encoder.")
            yield name, parameter.shape, config.encoder_layers or 1 if in_encoder else config.layers


@functools.cache
def block_parameters(config: ModelConfig) -> int:
    """The number of parameters of all layers, without embeddings, output layer and final norms."""
    return sum(shape.numel() * layers for _, shape, layers in _layer_parameters(config))


def training_flops(config: ModelConfig, length: float | None = None) -> float:
    """FLOPs per token of the forward and the backward pass (Kaplan et al. 2020, section 2.1).

    6 per matrix parameter, and 6 * layers * length * (heads * head_dim) for causal attention, in which a query
    attends to half of the sequence on average.

    length: mean tokens per sequence; `None` for the context
    """
    length = config.context if length is None else length
    return 6 * matrix_parameters(config) + 6 * layers_per_token(config) * length * config.heads * config.head_dim


@functools.cache
def muon_flops(config: ModelConfig) -> int:
    """FLOPs of an optimizer step of Muon: five Newton-Schulz iterations per matrix that it trains, R x C with R <= C.

    An iteration multiplies R x C by C x R, R x R by R x R, and R x R by R x C (Jordan et al. 2024).
    """
    total = 0
    for name, shape, layers in _layer_parameters(config):
        if name.endswith(".weight") and len(shape) == 2 and ".router." not in name:
            rows, columns = sorted(shape)
            total += layers * 5 * 2 * (2 * rows * rows * columns + rows**3)
    return total


def training_speed(machine: Machine, config: ModelConfig, length: float | None = None) -> float:
    """Expected tokens per second of the forward and the backward pass.

    The time per token is that of matrix multiplication, of the other work of each layer, which grows with the width,
    and of the logits (decision 053).

    length: mean tokens per sequence; `None` for the context
    """
    matmul_seconds = training_flops(config, length) / _model_matmul_rate(machine)
    layers, logits = layers_per_token(config), 0.0
    if _has_layer_time(machine):
        probe = probe_config()
        layers *= 1 + recipes.WIDTH_SHARE * (config.width / probe.width - 1)
        logits = max(0, config.vocab_size - probe.vocab_size) / recipes.LOGITS_PER_LAYER
    return 1 / (matmul_seconds + (layers + logits) * _other_seconds(machine))


def _has_layer_time(machine: Machine) -> bool:
    """Whether the time of a layer was measured, and the rate of its products is known."""
    return machine.layer_seconds is not None and machine.matmul_rate > 0


def _other_seconds(machine: Machine) -> float:
    """Expected seconds per token and layer besides matrix multiplication."""
    if machine.layer_seconds is None or not _has_layer_time(machine):
        seconds = recipes.OTHER_SECONDS[device_class(machine)]
        return seconds / machine.threads if machine.device == "cpu" else seconds
    measured = machine.layer_seconds / machine.threads
    probe = probe_config()
    matmul_seconds = training_flops(probe) / probe.layers / _model_matmul_rate(machine)
    return max(measured - matmul_seconds, recipes.MIN_OTHER_SHARE * measured)


def training_step_seconds(
    machine: Machine, config: ModelConfig, tokens: float, optimizer: str, length: float | None = None
) -> float:
    """Expected seconds of an optimizer step with this number of tokens, including the iterations of Muon.

    length: mean tokens per sequence; `None` for the context
    """
    seconds = tokens / training_speed(machine, config, length)
    if optimizer not in MUON_OPTIMIZERS:
        return seconds
    muon = muon_flops(config) / _model_matmul_rate(machine)
    if _has_layer_time(machine):
        per_unit = _other_seconds(machine) / probe_config().width
        muon += recipes.MUON_SHARE * per_unit * count_parameters(config)["total"]
    return seconds + muon


def _model_matmul_rate(machine: Machine) -> float:
    """FLOP/s of matrix multiplication at the sizes that occur in a model."""
    return recipes.MATMUL_EFFICIENCY[device_class(machine)] * machine.matmul_rate


def device_class(machine: Machine) -> str:
    """`cpu` or `gpu`: the key of this machine in the tables of recipes.py."""
    return "cpu" if machine.device == "cpu" else "gpu"


def layers_per_token(config: ModelConfig) -> float:
    """Layers that process a token; in an encoder-decoder the mean of both stacks, since each token is in one."""
    return config.layers if config.encoder_layers is None else (config.encoder_layers + config.layers) / 2
