"""What a model is, how it is trained, on what machine and from which text: plain values, validated once.

Every error quotes the command-line flag and the values allowed. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Any, Self

from tinylm.checks import check_values, flag, one_of, require
from tinylm.errors import TinyLMError, UsageError
from tinylm.records import from_json

ARCHITECTURES = ("decoder", "encoder", "encoder-decoder")
POSITIONS = ("rope", "learned", "sinusoidal", "relative", "none")
ADAPTER_KINDS = ("lora", "bottleneck")
EXPERT_MODES = ("route", "merge")
NORMS = ("rmsnorm", "layernorm", "none")
NORM_PLACEMENTS = ("pre", "post")
ACTIVATIONS = ("swiglu", "gelu", "relu")
INITIALISATIONS = ("modern", "gpt2", "original")
SCHEDULES = ("trapezoid", "cosine", "linear", "inverse-sqrt", "constant")
OPTIMIZERS = ("adamw", "adam", "muon")
DEVICES = ("cuda", "mps", "cpu")
DTYPES = ("fp32", "bf16", "fp16")
DATA_KINDS = ("text", "pairs")

# Products of a model's numbers that are bounded, so that any accepted model can be described in seconds.
MOST_BLOCKS = 1 << 14  # feed-forward layers: layers times experts (Qwen3-MoE: 48 x 128, DeepSeek-V3: 61 x 256)
MOST_POSITION_ENTRIES = 1 << 25  # of a table of positions: context times the width of what it is added to, or rotates
MOST_PARAMETERS = 1 << 40
LEAST_AVERAGE = 1e-6  # of the mean age of an average, as a share of the steps; its inverse must be finite


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a transformer. `kv_heads` below `heads` is grouped-query attention, 1 is multi-query attention.

    `layers` are the decoder's where there is an encoder, too, which has `encoder_layers`. The layers in `local_layers`,
    counted from 0, look back over `local_window` tokens. More than one of `experts` makes a mixture of each
    feed-forward layer; `expert_balance` is the weight of the loss that shares tokens out among them. Without
    `attention_scale`, the products of queries and keys are not divided by the root of the head's width. `dropout` is of
    the embedding and of what each sublayer adds, `attention_dropout` of the weights in attention.
    """

    vocab_size: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    ffn_width: int
    position: str = "rope"
    rope_theta: float = 10_000.0
    norm: str = "rmsnorm"
    norm_placement: str = "pre"
    norm_gain: bool = True
    norm_bias: bool = False
    qk_norm: bool = True
    bias: bool = False
    activation: str = "swiglu"
    tie: bool = True
    scale_embedding: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    initialisation: str = "modern"
    architecture: str = "decoder"
    encoder_layers: int | None = None
    relative_clip: int = 16
    local_window: int | None = None
    local_layers: tuple[int, ...] = ()
    experts: int = 1
    experts_per_token: int = 2
    expert_mode: str = "route"
    expert_balance: float = 0.01
    residual: bool = True
    attention_scale: bool = True

    def __post_init__(self) -> None:
        check_values(vars(self))
        one_of("architecture", self.architecture, ARCHITECTURES)
        one_of("expert_mode", self.expert_mode, EXPERT_MODES)
        one_of("position", self.position, POSITIONS)
        one_of("norm", self.norm, NORMS)
        one_of("norm_placement", self.norm_placement, NORM_PLACEMENTS)
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("initialisation", self.initialisation, INITIALISATIONS)
        if self.width % self.heads:
            raise UsageError(
                f"--heads {self.heads} does not divide --width {self.width}; "
                f"use a width that is a multiple of {self.heads}, or one of {divisors(self.width)} heads."
            )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"--kv-heads {self.kv_heads} does not divide --heads {self.heads}; use one of {divisors(self.heads)}."
            )
        require(
            self.position != "rope" or self.head_width % 2 == 0,
            f"--position rope rotates pairs, but --width {self.width} over --heads {self.heads} leaves "
            f"{self.head_width} a head; make that even, or choose --position learned.",
        )
        require(
            self.position != "sinusoidal" or self.width % 2 == 0,
            f"--position sinusoidal needs an even --width; {self.width} is odd.",
        )

        self._check_local_layers()
        require(
            self.experts == 1 or self.experts_per_token <= self.experts,
            f"--experts-per-token {self.experts_per_token} is more than --experts {self.experts}.",
        )
        require(
            self.expert_mode == "route" or self.experts == 1 or self.experts_per_token > 1,
            "--expert-mode merge takes the mean of several experts; make --experts-per-token 2 or more.",
        )
        if self.architecture == "encoder-decoder":
            require(self.encoder_layers is not None, "--architecture encoder-decoder needs --encoder-layers.")
        else:
            require(
                self.encoder_layers is None,
                f"--encoder-layers is for --architecture encoder-decoder, and --architecture is {self.architecture}.",
            )
        self._check_size()

    def _check_size(self) -> None:
        blocks = (self.layers + (self.encoder_layers or 0)) * self.experts
        require(
            blocks <= MOST_BLOCKS,
            f"--layers times --experts is {blocks}; it must be at most {MOST_BLOCKS}.",
        )
        position_width = {"rope": self.head_width, "sinusoidal": self.width}.get(self.position, 0)
        require(
            self.context * position_width <= MOST_POSITION_ENTRIES,
            f"--position {self.position} with --context {self.context} needs a table of "
            f"{self.context * position_width} numbers; it must be at most {MOST_POSITION_ENTRIES}: choose a shorter "
            "--context.",
        )
        require(
            self.approximate_parameters <= MOST_PARAMETERS,
            f"A model of about {self.approximate_parameters:.1e} parameters is too large; it must have at most "
            f"{MOST_PARAMETERS:.1e}: choose a smaller --width, --layers or --vocab-size.",
        )

    @property
    def approximate_parameters(self) -> int:
        """Parameters without those of norms, biases and routers, which are few; computed without building the model."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_width
        feedforward = (3 if self.activation == "swiglu" else 2) * self.width * self.ffn_width * self.experts
        position = 0
        if self.position == "learned":
            position = self.context * self.width
        elif self.position == "relative":
            attention += 2 * (2 * self.relative_clip + 1) * self.head_width
        decoding = self.layers * (attention + feedforward)
        encoding = (self.encoder_layers or 0) * (attention + feedforward)
        crossing = self.layers * attention if self.encoder_layers else 0
        embeddings = (1 if self.tie else 2) * self.vocab_size * self.width
        return embeddings + 2 * position + decoding + encoding + crossing

    def _check_local_layers(self) -> None:
        if self.local_window is None:
            require(
                not self.local_layers, "--local-layers needs --local-window, the tokens such a layer looks back over."
            )
            return
        require(
            self.architecture != "encoder",
            "--local-window is for layers that look back; an encoder's look both ways.",
        )
        require(len(self.local_layers) > 0, "--local-window needs --local-layers, the layers that look back over it.")
        beyond = [layer for layer in self.local_layers if not 0 <= layer < self.layers]
        require(
            not beyond,
            f"--local-layers names layer {beyond[0] if beyond else ''}, and the layers are numbered from 0 to "
            f"{self.layers - 1}.",
        )
        require(len(set(self.local_layers)) == len(self.local_layers), "--local-layers names a layer twice.")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to train: optimizer steps, passes over the training text, or seconds; exactly one is given."""

    steps: int | None = None
    epochs: float | None = None
    time: float | None = None

    def __post_init__(self) -> None:
        check_values(vars(self))
        given = [flag(f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        require(len(given) <= 1, f"{' and '.join(given)} contradict each other; give one of them.")
        require(len(given) == 1, "A run needs a budget: --steps, --epochs or --time.")

    @property
    def kind(self) -> str:
        return "time" if self.time is not None else "steps" if self.steps is not None else "epochs"

    def total_steps(self, steps_per_epoch: float) -> int | None:
        """The budget in optimizer steps; `None` when it is counted in seconds."""
        if self.epochs is not None:
            return max(1, math.ceil(self.epochs * steps_per_epoch))
        return self.steps


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One run of the trainer. `warmup` is a fraction of the budget; `*_every` count steps, `patience` evaluations.

    `epsilon` is what Adam adds to the root of its second moment.
    """

    budget: Budget
    batch_size: int
    micro_batch: int
    lr: float
    min_lr: float
    warmup: float
    schedule: str = "cosine"
    optimizer: str = "adamw"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    grad_clip: float = 1.0
    patience: int | None = None
    label_smoothing: float = 0.0
    average: float = 0.0
    eval_every: int = 100
    eval_tokens: int = 1_000_000
    save_every: int = 100
    log_every: int = 10
    log_gradients: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            self.warmup <= 1,
            "--warmup-steps is more than the whole run; give fewer, or a longer budget.",
        )
        check_values(vars(self))
        require(
            self.average == 0 or self.average >= LEAST_AVERAGE,
            f"--average is {self.average:g}; it must be 0, or from {LEAST_AVERAGE:g} to 0.5.",
        )
        require(self.min_lr <= self.lr, f"--min-lr {self.min_lr} is above --lr {self.lr}; it is where --lr ends.")
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        require(
            self.micro_batch <= self.batch_size,
            f"--micro-batch {self.micro_batch} is larger than --batch-size {self.batch_size}; it is a part of it.",
        )


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """What was decided about the machine when the run began, and is not decided again when it resumes.

    `product_rate` is the FLOP/s of matrix products that the plan was made for; `None` where it was not measured.
    """

    device: str
    dtype: str
    compile: bool
    threads: int
    product_rate: float | None = None

    def __post_init__(self) -> None:
        check_values(vars(self))
        one_of("device", self.device, DEVICES)
        one_of("dtype", self.dtype, DTYPES)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the text came from and what it was found to be; what follows `train_characters` is for validation.

    `kind` is text, or pairs of a source and a target. `corpus` and `val_corpus` are paths for the reader: no command
    opens them. `format` and `unknown` are how they were read, as --format and --unknown. `fingerprint` is the SHA-256
    of the documents, `val_fingerprint` that of a validation corpus of its own. The encoded text is in the user's cache
    under a key that follows from the fingerprints and the `encoder`, or, with `tokens_in_run`, in the run directory.
    """

    kind: str = "text"
    corpus: tuple[str, ...]
    val_corpus: tuple[str, ...] = ()
    text_key: str = "text"
    encoding: str = "utf-8"
    format: str = "auto"
    unknown: str = "error"
    train_characters: int
    fingerprint: str
    val_fingerprint: str | None = None
    encoder: str = ""
    tokens_in_run: bool = False
    characters: int
    bytes: int
    documents: int
    train_tokens: int
    val_tokens: int
    train_pairs: int = 0

    def __post_init__(self) -> None:
        check_values(vars(self))
        one_of("kind", self.kind, DATA_KINDS)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer that belongs to the weights, by the SHA-256 of its file."""

    kind: str
    sha256: str

    def __post_init__(self) -> None:
        check_values(vars(self))


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """An adapter, lora or bottleneck, and the base it was made for: its folder, and the digest of its weights.

    `rank` is the inner width of either kind; `alpha` and the fields after `targets` are a lora's alone.
    """

    kind: str = "lora"
    base: str
    base_digest: str
    rank: int
    alpha: float = 1.0
    dropout: float
    targets: tuple[str, ...]
    rank_stabilised: bool = False
    share_b: bool = False

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ADAPTER_KINDS)
        check_values(vars(self))
        require(len(self.targets) > 0, "--target names no module.")

    @property
    def scale(self) -> float:
        """What a lora multiplies its product B A by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All of `config.json`. `adapter` is given when the run holds an adapter instead of a model's own weights.

    `merged` has the digests of the adapters that were merged into these weights, and `unmerged_digest` is that of the
    weights before the first of them. `merged_steps` has the step of those weights and of each merged adapter; it is
    empty in folders written before it was recorded.
    """

    format: int = FORMAT
    version: str
    created: str
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig | None = None
    training: TrainingConfig | None = None
    runtime: RuntimeConfig | None = None
    adapter: AdapterConfig | None = None
    merged: tuple[str, ...] = ()
    unmerged_digest: str | None = None
    merged_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_values(vars(self))
        kind = "pairs" if self.model.architecture == "encoder-decoder" else "text"
        require(
            self.data is None or self.data.kind == kind,
            f"--architecture {self.model.architecture} is trained on {kind}, and the run names another kind of data.",
        )

    @property
    def recovered_digest(self) -> str | None:
        """Of the weights that these are again, up to rounding, since all that was merged into those was taken out."""
        return None if self.merged else self.unmerged_digest

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Raises TinyLMError when the values are not those of a run folder that this version can read."""
        found = values.get("format") if isinstance(values, dict) else None
        if type(found) is int and found > FORMAT:
            raise TinyLMError(
                f"it was written by a newer tinylm (format {found}, this one reads {FORMAT}); upgrade tinylm"
            )
        if type(found) is int and 1 <= found < FORMAT:
            raise TinyLMError(
                f"it was written by an older tinylm (format {found}, this one reads {FORMAT}); train the model again"
            )
        if found != FORMAT:
            raise TinyLMError("it is not a tinylm run configuration (it names no format)")
        try:
            config = from_json(cls, values)
        except (TypeError, ValueError, OverflowError, UsageError) as error:
            raise TinyLMError(f"it is not a tinylm run configuration ({error})") from error
        return typing.cast(Self, config)
