"""The configuration of a run, as stored in `config.json`: model, training, machine, corpus, tokenizer and adapter.

Frozen dataclasses that are validated like those of `model.py`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import typing
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from tinylm import __version__
from tinylm.config.jobs import JOBS, JobRow, all_data, row_for, rows_on, without_effect
from tinylm.config.model import ModelConfig, check_labels
from tinylm.config.training import TrainingConfig, check_sequence_growth
from tinylm.config.validation import (
    COUNT_FROM_0,
    COUNT_FROM_1,
    FRACTION,
    Range,
    Setting,
    check_fields,
    describe_value,
    from_json,
    require,
)
from tinylm.errors import NotTrainedError, TinyLMError, UsageError

ADAPTER_KINDS = {  # with the class that trains and saves the weights of each (see `TrainedWeights`)
    "lora": "tinylm.models.adapter_kinds:LoRAWeights",
    "bottleneck": "tinylm.models.adapter_kinds:BottleneckWeights",
}
DEVICES = ("cuda", "mps", "cpu")
DTYPES = ("fp32", "bf16", "fp16")
TRAIN_ON = ("assistant", "last", "all")  # the messages of a conversation that count in the loss
LAST = "last"  # in a run directory, the folder of the last save, which the run is resumed from
RANK, ALPHA = Range(1, 1 << 16), Range(0, 1e6, open_low=True)
TRAINED_SECONDS = Range(0, 1e30)
MAX_TEMPLATE = 1 << 17  # characters of a chat template; published ones have up to 20,000


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The special tokens of a tokenizer, as strings of its vocabulary.

    end_of_text: between documents. bos: at the beginning of a prompt and of each document if `add_bos`.
    eos: generation stops at any of these tokens, and at `end_of_text`.
    pad: the padding token, for chat templates and exports; tinylm does not use it for its own batches.
    """

    end_of_text: str = "<|endoftext|>"
    bos: str | None = None
    eos: tuple[str, ...] = ()
    pad: str | None = None
    add_bos: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        require(not self.add_bos or self.bos is not None, "`add_bos` needs `bos`, the token to add.")

    @property
    def stops(self) -> tuple[str, ...]:
        """The tokens at which generation stops."""
        return tuple(dict.fromkeys((*self.eos, self.end_of_text)))


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Settings for the machine, chosen when the run was created; resuming does not change them.

    device, dtype: of the computation. compile: whether layers are compiled. threads: number of CPU threads.
    matmul_rate, layer_seconds: FLOP/s of matrix multiplication and seconds per token and layer that the plan of the
        run is based on (see Machine); `None` if not measured.
    job: id of the torchrun job that began the run (see Rendezvous), by which a restart finds the run; `None` without
        torchrun.
    """

    device: Annotated[str, DEVICES]
    dtype: Annotated[str, DTYPES]
    compile: bool
    threads: Annotated[int, Range(1, 1024)]
    matmul_rate: Annotated[float | None, Range(0, 1e18, open_low=True)] = None
    layer_seconds: Annotated[float | None, Range(0, 1, open_low=True)] = None
    job: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


MAX_SHORT_TEXT = 15_000  # characters of a text that is learned by heart (decision 047)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus of a run: how it was read, and what it contains.

    kind: text, pairs of a source and a target, chat (conversations), preferences (pairs of these), or labels (texts,
        each with a label).
    corpus, val_corpus: paths, for information only: resuming a run does not open them.
    text_key, encoding, format, exclude, skip_bad, unknown: the settings with which the corpus was read.
    val_records: number of validation records (lines, JSON, pairs, conversations): those of `val_corpus`, or else drawn
        from `corpus`. 0 if the validation text is continuous.
    train_characters: number of characters of `corpus` for training, about that if records were drawn. Otherwise they
        are at its beginning, and without a `val_corpus` the rest is the validation text.
    fingerprint, val_fingerprint: SHA-256 of the documents, and of a separate validation corpus.
    encoder: the version of the code that encoded the text. The key of the encoded text in the user's cache is computed
        from it, the fingerprints, `train_characters`, `val_records` and the tokenizer; with `tokens_in_run`, the
        encoded text is in the run directory instead.
    train_on: the messages of a conversation that count in the loss: assistant, last (its last message) or all.
    characters, bytes, documents, line_breaks: size of `corpus`; `line_breaks` is `None` if not counted.
    train_tokens, val_tokens: tokens for training and for validation.
    val_bytes: size in UTF-8 of the validation tokens but the first, which is not scored, with the line breaks between
        documents that are lines; plain text only, and `None` in runs of older versions.
    train_pairs: number of pairs for training; 0 for other kinds.
    """

    kind: Annotated[str, all_data()] = "text"
    corpus: tuple[str, ...]
    val_corpus: tuple[str, ...] = ()
    text_key: str = "text"
    encoding: str = "utf-8"
    format: str = "auto"
    exclude: tuple[str, ...] = ()
    skip_bad: bool = False
    unknown: str = "error"
    train_characters: Annotated[int, COUNT_FROM_0]
    fingerprint: str
    val_fingerprint: str | None = None
    encoder: str = ""
    tokens_in_run: bool = False
    characters: Annotated[int, COUNT_FROM_0]
    bytes: Annotated[int, COUNT_FROM_0]
    documents: Annotated[int, COUNT_FROM_0]
    line_breaks: Annotated[int | None, COUNT_FROM_0] = None
    train_tokens: Annotated[int, COUNT_FROM_0]
    val_tokens: Annotated[int, COUNT_FROM_0]
    val_bytes: Annotated[int | None, COUNT_FROM_0] = None
    val_records: Annotated[int, COUNT_FROM_0] = 0
    train_pairs: Annotated[int, COUNT_FROM_0] = 0
    train_on: Annotated[str, Setting("Scored parts of conversations.", None, TRAIN_ON, jobs="chat")] = "assistant"

    def __post_init__(self) -> None:
        check_fields(self)

    def effective(self) -> dict[str, Any]:
        """The settings that have an effect on this kind of data, and its sizes, by name."""
        others = set.intersection(*(without_effect(self, row) for row in rows_on(self.kind)))
        others |= {name for name in ("exclude", "skip_bad", "train_pairs") if not getattr(self, name)}
        return {name: value for name, value in vars(self).items() if value is not None and name not in others}

    @property
    def by_heart(self) -> bool:
        """Whether the text is short and its own validation text: it is to be learned as it is."""
        return self.val_fingerprint == self.fingerprint and self.characters <= MAX_SHORT_TEXT

    @property
    def is_plain_text(self) -> bool:
        """Whether the data are plain text, from which windows of any length can be taken."""
        return self.kind == "text"


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer that belongs to the weights.

    kind: char, bpe or other. sha256: of tokenizer.json and the special tokens.
    chat_template: a Jinja template that turns a conversation into text; `None` for a model that has none.
    """

    kind: str
    sha256: str
    special: SpecialTokens = SpecialTokens()
    chat_template: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, without=("chat_template",))
        length = len(self.chat_template or "")
        require(length <= MAX_TEMPLATE, f"`chat_template` has {length} characters; it can have at most {MAX_TEMPLATE}.")


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The estimates of the plan of a new run, for comparison with the actual values; resuming does not change them.

    steps: number of optimizer steps. seconds: duration of training. memory: in bytes.
    """

    steps: Annotated[int, COUNT_FROM_1]
    seconds: Annotated[float, TRAINED_SECONDS]
    memory: Annotated[int, COUNT_FROM_0]

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A LoRA or bottleneck adapter, and the base model that it was trained on.

    kind: one of ADAPTER_KINDS.
    base, base_digest: path of the base model, for information only, and the digest of its weights.
    rank: rank of a LoRA update, or hidden size of a bottleneck. targets: names of the adapted modules.
    alpha: numerator of the scale (LoRA). rank_stabilised: divide `alpha` by sqrt(rank) instead of rank (LoRA).
    dropout: of the adapter's input while training.
    share_b: modules with the same last part of their names and the same output size share one B (LoRA).
    labels: of the output layer that the adapter adds to make a classifier; empty if it adds none.
    """

    kind: Annotated[str, tuple(ADAPTER_KINDS)] = "lora"
    base: str
    base_digest: str
    rank: Annotated[int, RANK]
    alpha: Annotated[float, ALPHA] = 1.0
    dropout: Annotated[float, FRACTION]
    targets: tuple[str, ...]
    rank_stabilised: bool = False
    share_b: bool = False
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_labels(self.labels)
        require(len(self.targets) > 0, "`target` names no module.")

    def effective(self) -> dict[str, Any]:
        """The settings that have an effect on this kind of adapter, by name."""
        others = set() if self.kind == "lora" else {"alpha", "rank_stabilised", "share_b"}
        others |= set() if self.labels else {"labels"}
        return {name: value for name, value in vars(self).items() if name not in others}

    @property
    def scale(self) -> float:
        """The factor of a LoRA update B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A model that a run learned from.

    path: for information only. digest: of its weights. parameters: their approximate number.
    """

    path: str
    digest: str
    parameters: Annotated[int, COUNT_FROM_1]

    def __post_init__(self) -> None:
        check_fields(self)


def run_of(path: Path) -> Path:
    """The run directory of a path that names weights: the parent of a `last/` in a run, otherwise the path itself."""
    is_last = path.name == LAST and not os.path.lexists(path / "config.json")
    return path.parent if is_last and os.path.lexists(path.parent / "config.json") else path


def new_run_id() -> str:
    """A random id for a new run."""
    return uuid.uuid4().hex


class TrainingParts(NamedTuple):
    """The parts of a RunConfig that every run has which was trained."""

    training: TrainingConfig
    runtime: RuntimeConfig
    data: DataConfig


FORMAT = 4  # of config.json and the other files of a run
FORMER_TRAINING = ("r_drop", "log_gradients")  # fields of TrainingConfig that older runs have recorded


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The content of `config.json`.

    format: version of the file format. version: of tinylm. created: time in ISO 8601.
    data: `None` for an imported model. training: `None` for an imported or merged model. runtime: `None` for an
        imported one; of a merged one, that of the adapter, for the number format of its losses.
    adapter: set if the run holds an adapter instead of the weights of a model.
    teachers: the models whose predictions the run learned from.
    family: the family (Hugging Face's model type) of an imported model, whose weights keep their dtype.
    merged: digests of the adapters that were merged into these weights. unmerged_digest: digest of the weights before
        the first merge. merged_steps: the step of those weights and of each merged adapter; empty if not recorded.
    planned: the estimates of the plan, for a run that was trained.
    id: random id of a run that was trained, 32 hexadecimal digits; moving or renaming the run does not change it.
    """

    format: Annotated[int, COUNT_FROM_1] = FORMAT
    version: str
    created: str
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig | None = None
    training: TrainingConfig | None = None
    runtime: RuntimeConfig | None = None
    adapter: AdapterConfig | None = None
    teachers: tuple[TeacherConfig, ...] = ()
    family: str | None = None
    merged: tuple[str, ...] = ()
    unmerged_digest: str | None = None
    merged_steps: Annotated[tuple[int, ...], COUNT_FROM_0] = ()
    planned: Estimates | None = None
    id: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.id is None or re.fullmatch("[0-9a-f]{32}", self.id) is not None,
            "the id of the run is not 32 hexadecimal digits",
        )
        architecture = self.model.architecture
        fitting = {name: row for name, row in JOBS.items() if architecture in row.architectures}
        if self.training is not None:
            objective = self.training.objective
            require(objective in fitting, f"The objective {objective} does not fit `architecture` {architecture}.")
            fitting = {objective: fitting[objective]}
            if self.data is not None:
                length = self.training.sequence_length or self.model.context
                check_sequence_growth(self.training.sequence_growth, length, is_plain_text=self.data.is_plain_text)
        require(
            self.training is None or bool(self.labels) == JOBS[self.training.objective].has_labels,
            "A run has labels if its objective predicts them, and only then.",
        )
        require(
            self.training is None or bool(self.teachers) == JOBS[self.training.objective].has_teachers,
            "A run has teachers if its objective learns from them, and only then.",
        )
        require(
            self.training is None
            or self.training.generations == 1
            or (self.objective == "next-token" and self.adapter is None),
            "Several `generations` are for runs that train a decoder on plain text.",
        )
        if self.training is not None and self.training.join > 1:
            self.while_training.model.side_by_side(self.training.join)  # raises UsageError
        require(
            self.data is None or self.data.kind in {row.data for row in fitting.values()},
            f"A run of the objective {' or '.join(fitting)} is trained on "
            f"{' or '.join(row.data for row in fitting.values())}; this one has other data.",
        )

    def training_parts(self, run: Path) -> TrainingParts:
        """How the run at `run` was trained. Raises NotTrainedError if it was merged or imported."""
        if self.training is None or self.runtime is None or self.data is None:
            raise NotTrainedError(run)
        return TrainingParts(self.training, self.runtime, self.data)

    @property
    def while_training(self) -> Self:
        """This configuration with the model that is trained: of a run that joins generations, that of each."""
        if self.training is None or self.training.join == 1:
            return self
        model = self.model.member(self.training.join)
        return dataclasses.replace(self, model=model, training=dataclasses.replace(self.training, join=1))

    @property
    def objective(self) -> str | None:
        """The objective of training; `None` for an imported or merged model."""
        return None if self.training is None else self.training.objective

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels that the model, or the base with this adapter, distinguishes; empty unless it is a classifier."""
        return self.model.labels if self.adapter is None else self.adapter.labels or self.model.labels

    @property
    def frozen_parameters(self) -> int:
        """The approximate number of parameters of the models that the run learned from."""
        return sum(teacher.parameters for teacher in self.teachers)

    @property
    def row(self) -> JobRow:
        """The job of training, or of a model whose training is not recorded, the default for such a model."""
        return row_for(self.model.architecture, self.objective, has_labels=bool(self.labels))

    @property
    def loss_unit(self) -> str:
        """The unit of the losses of a run, such as "nats per token"."""
        return self.row.unit

    def bits_per_byte(self, val_loss: float | None) -> float | None:
        """A validation loss in nats per token, converted to bits per byte of the whole validation text.

        `None` without a loss, for objectives that do not predict the next token, and for a run that has not recorded
        `val_bytes`.
        """
        data = self.data
        if val_loss is None or not self.row.predicts_text or data is None or not data.val_bytes:
            return None
        bits = val_loss / math.log(2) * (data.val_tokens - 1) / data.val_bytes
        return bits if math.isfinite(bits) else None

    @property
    def recovered_digest(self) -> str | None:
        """Digest of the base weights that these equal (up to rounding) after all merges were undone; else `None`."""
        return None if self.merged else self.unmerged_digest

    @property
    def tokens_per_step(self) -> int | None:
        """Training tokens per optimizer step.

        `None` for pairs and conversations, whose number of tokens varies, and for a run without recorded training.
        """
        if self.training is None or self.data is None or not self.data.is_plain_text:
            return None
        return self.training.batch_size * (self.training.sequence_length or self.model.context)

    @classmethod
    def new(cls, **fields: Any) -> Self:
        """The configuration of a new run, with the current time and the version of tinylm."""
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(version=__version__, created=created, **fields)

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The configuration from the JSON values of a `config.json`, without its `digest`.

        Raises TinyLMError for values of another format version and for anything that is not a valid configuration.
        """
        found = values.get("format") if isinstance(values, dict) else None
        if type(found) is int and found > FORMAT:
            raise TinyLMError(
                f"it was written by a newer tinylm (format {describe_value(found)}, this one reads {FORMAT}); upgrade "
                "tinylm"
            )
        if type(found) is int and 1 <= found < FORMAT:
            raise TinyLMError(
                f"it was written by an older tinylm (format {found}, this one reads {FORMAT}); train the model again"
            )
        if found != FORMAT:
            raise TinyLMError("it is not a tinylm run configuration (it names no format)")
        if isinstance(training := values.get("training"), dict):
            kept = {name: value for name, value in training.items() if name not in FORMER_TRAINING}
            values = {**values, "training": kept}
        try:
            config = from_json(cls, values)
        except (TypeError, ValueError, OverflowError, UsageError) as error:
            raise TinyLMError(f"it is not a tinylm run configuration ({error})") from error
        return typing.cast(Self, config)


def describe_loss(nats: float, bits: float | None, unit: str) -> str:
    """A loss for people to read. bits: the same in bits per byte, where they exist. unit: of `nats`"""
    loss = f"{nats:.4f} {unit}"
    return loss if bits is None else f"{bits:.4f} bits per byte ({loss})"
