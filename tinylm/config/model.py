"""The configuration of a model: its architecture and its sizes.

Frozen dataclasses of plain values. Each is validated when it is created, and raises UsageError for a value, or a
combination of values, that is not allowed. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from tinylm.config.validation import (
    FRACTION,
    Panel,
    Range,
    Setting,
    check_fields,
    describe_value,
    require,
)
from tinylm.errors import UsageError

ARCHITECTURES = ("decoder", "encoder", "encoder-decoder")
POSITIONS = ("rope", "learned", "sinusoidal", "relative", "none")
EXPERT_MODES = ("route", "merge")
NORMS = ("rmsnorm", "layernorm", "none")
NORM_PLACEMENTS = ("pre", "post", "sandwich")
ACTIVATIONS = ("swiglu", "gelu", "relu", "gelu-exact", "geglu", "geglu-exact")
GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu-exact")  # three matrices instead of two
ROPE_SCALINGS = ("linear", "llama3", "yarn")
INITIALISATIONS = ("modern", "gpt2", "original")
JOINED_SIZES = ("width", "heads", "kv_heads", "ffn_width")  # of models side by side, the sums of theirs

# Bounds of the size of a model: any accepted model can be built on the meta device in seconds.
MAX_BLOCKS = 1 << 14  # feed-forward layers: layers times experts (Qwen3-MoE: 48 x 128, DeepSeek-V3: 61 x 256)
MAX_POSITION_ENTRIES = 1 << 25  # context times width (sinusoidal) or head dimension (RoPE)
MAX_PARAMETERS = 1 << 40
# Large published models have 128 layers, 512 experts, width 18,432 or a vocabulary of 262,144.
VOCABULARY, LAYERS, WIDTH, CONTEXT = Range(1, 1 << 24), Range(1, 1024), Range(1, 1 << 16), Range(1, 1 << 20)
HEADS = EXPERTS = Range(1, 1024)
THETA, FACTOR, BETA = Range(1, 1e12), Range(1, 1e6), Range(1e-6, 1e6)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaled RoPE frequencies, for a context longer than that of pre-training.

    kind: one of ROPE_SCALINGS.
    factor: divisor of all frequencies (linear), or of the low ones (llama3, yarn).
    original_context: context length in tokens before scaling (llama3, yarn).
    low_freq_factor, high_freq_factor: llama3 divides frequencies with fewer than `low_freq_factor` periods in the
        original context, keeps those with more than `high_freq_factor`, and interpolates between.
    beta_slow, beta_fast: for yarn, the numbers of periods that `low_freq_factor` and `high_freq_factor` are for llama3.
    attention_factor: factor of the rotated queries and keys (yarn); `None`: 0.1 * ln(factor) + 1.
    """

    kind: Annotated[str, ROPE_SCALINGS]
    factor: Annotated[float, FACTOR]
    original_context: Annotated[int | None, CONTEXT] = None
    low_freq_factor: Annotated[float, Range(0, 1e6, open_low=True)] = 1.0
    high_freq_factor: Annotated[float, Range(0, 1e6, open_low=True)] = 4.0
    beta_fast: Annotated[float, BETA] = 32.0
    beta_slow: Annotated[float, BETA] = 1.0
    attention_factor: Annotated[float | None, Range(0, 1000, open_low=True)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.kind == "linear" or self.original_context is not None,
            f"RoPE scaling of the kind {self.kind} needs `original_context`.",
        )
        require(
            self.attention_factor is None or self.kind == "yarn",
            f"`attention_factor` is for RoPE scaling of the kind yarn, not {self.kind}.",
        )
        require(
            self.low_freq_factor < self.high_freq_factor,
            f"`low_freq_factor` is {self.low_freq_factor}; it must be below `high_freq_factor` "
            f"({self.high_freq_factor}).",
        )
        require(
            self.beta_slow < self.beta_fast,
            f"`beta_slow` is {self.beta_slow}; it must be below `beta_fast` ({self.beta_fast}).",
        )


MAX_LABELS, MAX_LABEL = 1000, 200  # number of labels, and characters of each


def check_labels(labels: Sequence[str]) -> None:
    """Raise UsageError for names that no output of a model can have, for too many and for repeated ones."""
    require(len(labels) <= MAX_LABELS, f"There are {len(labels):,} labels; a model has at most {MAX_LABELS:,}.")
    require(len(set(labels)) == len(labels), "A label is named twice.")
    longest = max(labels, key=len, default="")
    require(len(longest) <= MAX_LABEL, f"The label {longest[:40]!r}... has more than {MAX_LABEL} characters.")
    require(all(len(label.splitlines()) == 1 for label in labels), "A label is empty, or has a line break.")


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers, as in 0,2,4. Raises UsageError."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"{describe_value(text)} is not a list of layer numbers, such as 0,2,4.") from None


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The fields of ModelConfig that can be chosen. `None` leaves the value to the preset, the size or the plan."""

    architecture: Annotated[
        str | None,
        Setting(
            "Decoder (next token), encoder (masked tokens) or encoder-decoder (pairs); default: decoder.",
            Panel.MODEL,
            ARCHITECTURES,
        ),
    ] = None
    layers: Annotated[
        int | None, Setting("Transformer blocks (in an encoder-decoder: of the decoder).", Panel.MODEL, LAYERS)
    ] = None
    encoder_layers: Annotated[
        int | None, Setting("Transformer blocks of the encoder (default: --layers).", Panel.MODEL, LAYERS)
    ] = None
    heads: Annotated[int | None, Setting("Attention heads.", Panel.MODEL, HEADS)] = None
    kv_heads: Annotated[
        int | None,
        Setting(
            "Key/value heads: fewer than --heads is grouped-query, 1 is multi-query attention.", Panel.MODEL, HEADS
        ),
    ] = None
    width: Annotated[int | None, Setting("Hidden size (d_model).", Panel.MODEL, WIDTH)] = None
    ffn_width: Annotated[
        int | None, Setting("Hidden size of the feed-forward layers (d_ff).", Panel.MODEL, Range(1, 1 << 18))
    ] = None
    context: Annotated[int | None, Setting("Context length in tokens.", Panel.MODEL, CONTEXT)] = None
    position: Annotated[str | None, Setting("Position encoding.", Panel.MODEL, POSITIONS)] = None
    rope_theta: Annotated[float | None, Setting("Base of the RoPE frequencies (theta).", Panel.MODEL, THETA)] = None
    norm: Annotated[str | None, Setting("Normalisation layer.", Panel.MODEL, NORMS)] = None
    norm_placement: Annotated[
        str | None,
        Setting(
            "Norms before sublayers (pre), after residual sums (post), or before and after sublayers (sandwich).",
            Panel.MODEL,
            NORM_PLACEMENTS,
        ),
    ] = None
    norm_gain: Annotated[bool | None, Setting("Learned gain in normalisation layers.", Panel.MODEL_SWITCHES)] = None
    norm_bias: Annotated[bool | None, Setting("Learned bias in normalisation layers.", Panel.MODEL_SWITCHES)] = None
    residual: Annotated[bool | None, Setting("Residual connections around the sublayers.", Panel.MODEL_SWITCHES)] = None
    attention_scale: Annotated[
        bool | None, Setting("Scale attention scores by 1/sqrt(head dimension).", Panel.MODEL_SWITCHES)
    ] = None
    qk_norm: Annotated[bool | None, Setting("Normalise queries and keys (QK-norm).", Panel.MODEL_SWITCHES)] = None
    bias: Annotated[bool | None, Setting("Biases in linear layers.", Panel.MODEL_SWITCHES)] = None
    relative_clip: Annotated[
        int | None, Setting("Clipping distance of relative positions (default: 16).", Panel.MODEL, CONTEXT, metavar="K")
    ] = None
    local_window: Annotated[
        int | None,
        Setting("Sliding-window size of the local attention layers, in tokens.", Panel.MODEL, CONTEXT, metavar="W"),
    ] = None
    local_layers: Annotated[
        Sequence[int] | None,
        Setting(
            "Layers with a sliding window, counted from 0 (default: every second layer).",
            Panel.MODEL,
            metavar="0,2,...",
            parse=parse_layers,
        ),
    ] = None
    experts: Annotated[
        int | None,
        Setting(
            "Experts per feed-forward layer (mixture of experts); 1 is a dense model.",
            Panel.EXPERTS,
            EXPERTS,
            metavar="E",
        ),
    ] = None
    experts_per_token: Annotated[
        int | None, Setting("Experts per token (top-k routing; default: 2).", Panel.EXPERTS, EXPERTS, metavar="K")
    ] = None
    expert_mode: Annotated[
        str | None,
        Setting(
            "route: mix the outputs of the chosen experts; merge: mix their weight matrices.",
            Panel.EXPERTS,
            EXPERT_MODES,
        ),
    ] = None
    expert_balance: Annotated[
        float | None, Setting("Weight of the load-balancing loss.", Panel.EXPERTS, Range(0, 1000))
    ] = None
    activation: Annotated[
        str | None, Setting("Activation function of the feed-forward layers.", Panel.MODEL, ACTIVATIONS)
    ] = None
    tie: Annotated[
        bool | None,
        Setting(
            "Tie output layer and embedding (default: yes, except in short runs of a modern decoder).",
            Panel.MODEL_SWITCHES,
        ),
    ] = None
    scale_embedding: Annotated[bool | None, Setting("Multiply embeddings by sqrt(d_model).", Panel.MODEL_SWITCHES)] = (
        None
    )
    initialisation: Annotated[str | None, Setting("Weight initialisation.", Panel.MODEL, INITIALISATIONS)] = None
    dropout: Annotated[
        float | None, Setting("Dropout of the embedding and of each sublayer's output.", Panel.MODEL, FRACTION)
    ] = None
    attention_dropout: Annotated[float | None, Setting("Dropout of the attention weights.", Panel.MODEL, FRACTION)] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelSettings):
    """The architecture of a transformer and its sizes. ModelSettings describes the fields that can be chosen.

    vocab_size: number of token ids.
    head_dim: dimension of each attention head; default: width / heads.
    rotary_dim: RoPE rotates the first `rotary_dim` features of each head; `None`: all of them.
    rope_scaling: scaling of the RoPE frequencies for a longer context; `None`: no scaling.
    local_rope_theta: base of the RoPE frequencies, without scaling, in layers with a sliding window; `None`: as in the
        other layers.
    norm_placement: "sandwich" is x + norm(sublayer(norm(x))).
    norm_epsilon: added to the variance (LayerNorm; default: 1e-5) or the mean square (RMSNorm; default: 1e-6).
    norm_unit_offset: the gain of an RMSNorm is 1 + weight.
    qkv_bias, output_bias, ffn_bias: biases of the projections to queries, keys and values, of the attention's output,
        and of the feed-forward layers; `None`: as `bias`.
    parallel_residual: x + attention(norm(x)) + feedforward(norm(x)) instead of one sublayer after the other.
    embedding_scale: factor of the embedding, which overrides `scale_embedding`.
    attention_multiplier: multiply the attention scores by this number instead of dividing them by sqrt(head_dim).
    normalise_top_k: divide the router weights of a token's experts by their sum; `None`: if `experts_per_token` is
        above 1.
    labels: the labels that a classifier distinguishes: its output layer has a row for each of them instead of each
        token. Empty for other models.
    """

    vocab_size: Annotated[int, VOCABULARY]
    context: int = field()
    layers: int = field()
    heads: int = field()
    kv_heads: int = field()
    width: int = field()
    ffn_width: int = field()
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
    relative_clip: int = 16
    local_layers: tuple[int, ...] = ()
    experts: int = 1
    experts_per_token: int = 2
    expert_mode: str = "route"
    expert_balance: float = 0.01
    residual: bool = True
    attention_scale: bool = True
    head_dim: Annotated[int, WIDTH] = typing.cast(int, None)  # an integer after __post_init__
    rotary_dim: Annotated[int | None, WIDTH] = None
    rope_scaling: RopeScaling | None = None
    local_rope_theta: Annotated[float | None, THETA] = None
    norm_epsilon: Annotated[float | None, Range(0, 1, open_low=True)] = None
    norm_unit_offset: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    ffn_bias: bool | None = None
    parallel_residual: bool = False
    embedding_scale: Annotated[float | None, Range(0, 1e6, open_low=True)] = None
    attention_multiplier: Annotated[float | None, Range(0, 1000, open_low=True)] = None
    normalise_top_k: bool | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_heads()
        self._check_positions()
        self._check_norms_and_residuals()
        self._check_local_layers()
        self._check_experts()
        if self.architecture == "encoder-decoder":
            require(self.encoder_layers is not None, '`architecture="encoder-decoder"` needs `encoder_layers`.')
        else:
            require(
                self.encoder_layers is None,
                f'`encoder_layers` is for `architecture="encoder-decoder"`; `architecture` is {self.architecture}.',
            )
        check_labels(self.labels)
        if self.labels:
            require(self.architecture != "encoder-decoder", "`labels` are for encoders and decoders.")
            require(not self.tie, "The output layer of a classifier has `labels`, so it is not tied: `tie=False`.")
        self._check_size()

    def effective(self) -> dict[str, Any]:
        """The settings that have an effect on this model, by name: those of what it does not have are left out."""
        without_effect: set[str] = set()
        if self.position != "rope":
            without_effect |= {"rope_theta"}
        if self.position != "relative":
            without_effect |= {"relative_clip"}
        if self.norm == "none":
            without_effect |= {"norm_gain", "norm_bias", "qk_norm", "norm_unit_offset"}
        if self.local_window is None:
            without_effect |= {"local_layers"}
        if self.experts == 1:
            without_effect |= {"experts", "experts_per_token", "expert_mode", "expert_balance", "normalise_top_k"}
        if self.embedding_scale is not None:
            without_effect |= {"scale_embedding"}
        if not self.labels:
            without_effect |= {"labels"}
        return {name: value for name, value in vars(self).items() if value is not None and name not in without_effect}

    def _check_heads(self) -> None:
        """Check the numbers of heads, and fill in `head_dim` if it is not given."""
        if typing.cast(int | None, self.head_dim) is None:
            if self.width % self.heads:
                raise UsageError(
                    f"`heads` is {self.heads}; it must divide `width` ({self.width}): use one of "
                    f"{divisors(self.width)}, or a width that is a multiple of {self.heads}."
                )
            object.__setattr__(self, "head_dim", self.width // self.heads)
        if self.heads % self.kv_heads:
            raise UsageError(
                f"`kv_heads` is {self.kv_heads}; it must divide `heads` ({self.heads}): use one of "
                f"{divisors(self.heads)}."
            )
        require(
            self.attention_multiplier is None or self.attention_scale,
            "`attention_multiplier` replaces the division by sqrt(head_dim); it contradicts `attention_scale=False`.",
        )

    def _check_positions(self) -> None:
        require(
            self.position != "sinusoidal" or self.width % 2 == 0,
            f'`position="sinusoidal"` needs an even `width`; {self.width} is odd.',
        )
        if self.position != "rope":
            for name in ("rotary_dim", "rope_scaling", "local_rope_theta"):
                require(getattr(self, name) is None, f'`{name}` has no effect without `position="rope"`.')
            return
        if self.rotary_dim is not None:
            require(
                self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim,
                f"`rotary_dim` is {self.rotary_dim}; it must be even, and at most the head dimension "
                f"({self.head_dim}).",
            )
        else:
            require(
                self.head_dim % 2 == 0,
                f'`position="rope"` needs an even head dimension; `width` {self.width} divided by `heads` '
                f'{self.heads} is {self.head_dim}. Change one of them, or choose `position="learned"`.'
                if self.head_dim == self.width // self.heads
                else f'`position="rope"` needs an even `head_dim`; {self.head_dim} is odd.',
            )
        require(
            self.rope_scaling is None or self.rope_scaling.kind != "yarn" or self.rope_theta > 1,
            "`rope_scaling` of the kind yarn needs a `rope_theta` above 1.",
        )
        if self.local_rope_theta is not None:
            require(
                self.local_window is not None,
                "`local_rope_theta` needs `local_window`, the size of the sliding window.",
            )
            require(self.architecture == "decoder", "`local_rope_theta` is for decoders.")

    def _check_norms_and_residuals(self) -> None:
        require(self.norm_epsilon is None or self.norm != "none", '`norm_epsilon` has no effect with `norm="none"`.')
        require(
            not self.norm_unit_offset or (self.norm == "rmsnorm" and self.norm_gain),
            '`norm_unit_offset` needs `norm="rmsnorm"` and `norm_gain`.',
        )
        require(self.norm_placement != "sandwich" or self.residual, '`norm_placement="sandwich"` needs `residual`.')
        if self.parallel_residual:
            require(
                self.norm_placement == "pre" and self.residual,
                '`parallel_residual` needs `norm_placement="pre"` and `residual`.',
            )
            require(
                self.architecture != "encoder-decoder",
                "`parallel_residual` is for blocks without cross-attention; an encoder-decoder has it.",
            )

    def _check_experts(self) -> None:
        require(
            self.experts == 1 or self.experts_per_token <= self.experts,
            f"`experts_per_token` is {self.experts_per_token}; it must be at most `experts` ({self.experts}).",
        )
        require(
            self.expert_mode == "route" or self.experts == 1 or self.experts_per_token > 1,
            '`expert_mode="merge"` averages several experts; set `experts_per_token` to 2 or more.',
        )
        require(self.normalise_top_k is None or self.experts > 1, "`normalise_top_k` has no effect without `experts`.")

    def _check_size(self) -> None:
        blocks = (self.layers + (self.encoder_layers or 0)) * self.experts
        require(
            blocks <= MAX_BLOCKS,
            f"`layers` times `experts` is {blocks}; it must be at most {MAX_BLOCKS}.",
        )
        position_width = {"rope": self.head_dim, "sinusoidal": self.width}.get(self.position, 0)
        require(
            self.context * position_width <= MAX_POSITION_ENTRIES,
            f"`position` {self.position} with `context` {self.context} needs a table of "
            f"{self.context * position_width} numbers; it must be at most {MAX_POSITION_ENTRIES}: choose a shorter "
            "`context`.",
        )
        require(
            self.approximate_parameters <= MAX_PARAMETERS,
            f"A model of about {self.approximate_parameters:.1e} parameters is too large; it must have at most "
            f"{MAX_PARAMETERS:.1e}: choose a smaller `width`, `layers` or `vocab_size`.",
        )

    @property
    def outputs(self) -> int:
        """The number of logits: one for each token id or, of a classifier, for each label."""
        return len(self.labels) or self.vocab_size

    @property
    def approximate_parameters(self) -> int:
        """Approximate number of parameters, without norms, biases and routers."""
        attention = 2 * self.width * (self.heads + self.kv_heads) * self.head_dim
        feedforward = (3 if self.activation in GATED_ACTIVATIONS else 2) * self.width * self.ffn_width * self.experts
        position = 0
        if self.position == "learned":
            position = self.context * self.width
        elif self.position == "relative":
            attention += 2 * (2 * self.relative_clip + 1) * self.head_dim
        decoder = self.layers * (attention + feedforward)
        encoder = (self.encoder_layers or 0) * (attention + feedforward)
        cross_attention = self.layers * attention if self.encoder_layers else 0
        embeddings = (self.vocab_size + (0 if self.tie else self.outputs)) * self.width
        return embeddings + 2 * position + decoder + encoder + cross_attention

    def _check_local_layers(self) -> None:
        if self.local_window is None:
            require(not self.local_layers, "`local_layers` needs `local_window`, the size of the sliding window.")
            return
        require(
            self.architecture != "encoder",
            "`local_window` is for causal attention; the attention of an encoder is bidirectional.",
        )
        require(len(self.local_layers) > 0, "`local_window` needs `local_layers`, the layers with a sliding window.")
        beyond = [layer for layer in self.local_layers if not 0 <= layer < self.layers]
        require(
            not beyond,
            f"`local_layers` names layer {describe_value(beyond[0]) if beyond else ''}; layers are numbered from 0 to "
            f"{self.layers - 1}.",
        )
        require(len(set(self.local_layers)) == len(self.local_layers), "`local_layers` names a layer twice.")

    @property
    def is_joinable(self) -> bool:
        """Whether several of these models can be one model, side by side (see `tinylm.training.join`)."""
        kinds = (self.architecture, self.position, self.norm, self.norm_placement)
        has_scales = self.norm_unit_offset or self.scale_embedding or self.embedding_scale is not None
        is_plain = self.norm_gain and self.residual and not has_scales and self.experts == 1
        return is_plain and kinds == ("decoder", "rope", "rmsnorm", "pre")

    def side_by_side(self, number: int) -> Self:
        """The model that is `number` of these side by side.

        Raises UsageError if it is not joinable, and for a model that is too large.
        """
        require(self.is_joinable, "`join` is for models of `preset` modern, without experts; leave it out.")
        return self._with_sizes(lambda size: size * number)

    def member(self, number: int) -> Self:
        """The inverse of `side_by_side`. Raises UsageError for a model that is not `number` of another one."""
        require(
            all(getattr(self, name) % number == 0 for name in JOINED_SIZES),
            f"A model with {', '.join(f'{name} {getattr(self, name)}' for name in JOINED_SIZES)} is not {number} side "
            "by side.",
        )
        return self._with_sizes(lambda size: size // number)

    def _with_sizes(self, change: Callable[[int], int]) -> Self:
        sizes: dict[str, Any] = {name: change(getattr(self, name)) for name in JOINED_SIZES}
        return dataclasses.replace(self, **sizes)

    @property
    def derived_defaults(self) -> dict[str, Any]:
        """The defaults of fields that depend on other fields, by name."""
        return {"head_dim": self.width // self.heads}


def divisors(number: int) -> str:
    """The divisors of a number, in ascending order, for a message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
