"""The model that a training run starts from: new, from another run, or a base model with a new adapter."""

import abc
import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tinylm.adapters.adapter import add_head
from tinylm.adapters.bottleneck import sublayers
from tinylm.adapters.lora import TARGETS, max_rank, target_modules
from tinylm.config.jobs import data_kinds
from tinylm.config.model import ARCHITECTURES, ModelConfig
from tinylm.config.run import AdapterConfig, run_of
from tinylm.config.settings import MODEL_NAMES, AdapterSettings, LoRASettings, TrainSettings
from tinylm.config.validation import check_choice, require
from tinylm.errors import UsageError
from tinylm.formats.foreign import foreign_name, is_foreign
from tinylm.models.adapter import add_adapter
from tinylm.models.open import find_model, open_model
from tinylm.models.teachers import Teacher
from tinylm.planning.cost import parameters_by_part
from tinylm.reporter import Reporter
from tinylm.run_directory.layout import CHECKPOINTS, newest_model
from tinylm.run_directory.loading import LoadedModel
from tinylm.system.files import resolve_links
from tinylm.text.answer_spans import ChatFormat, template_tokens
from tinylm.text.compression import STANDARD_INPUT, content_stem
from tinylm.text.split import SplitCorpus
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, describe_characters
from tinylm.text.tokenizer_choice import choose_tokenizer, load_tokenizer_file
from tinylm.training.training_request import TrainingRequest
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_model, extend_vocabulary, make_classifier

DEFAULT_RANK = 8


@dataclass(kw_only=True)
class StartingPoint(abc.ABC):
    """What a new run is trained from.

    architecture: decoder, encoder or encoder-decoder
    vocabulary_owner: how messages name the source of the vocabulary, such as "The model checkpoints/a"
    tokenizer: the tokenizer of the model; of a new model, one that was given, and `None` if it is chosen for the text
    chat_template: source of the template that renders conversations; `None` for a model that has none
    adds_tokens: whether missing special tokens of a chat template can be added to the tokenizer
    choices: the settings of a new model that were given: fields of ModelConfig, `preset` and `size`
    base: configuration of an existing model
    loading_bytes: peak memory for reading the weights of an existing model, including the mapped file
    adapter: the adapter to train on the model
    family: Hugging Face family of an imported model
    has_teachers: whether the model learns from others
    objective: of the training of an existing model; `None` if that is not known
    """

    architecture: str
    vocabulary_owner: str
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None
    adds_tokens: bool = True
    choices: Mapping[str, Any] = field(default_factory=dict)
    base: ModelConfig | None = None
    loading_bytes: int = 0
    adapter: AdapterConfig | None = None
    family: str | None = None
    has_teachers: bool = False
    objective: str | None = None

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """The kinds of data that the model can be trained on, the default first."""
        labels = True if self.labels else None
        return data_kinds(self.architecture, self.objective, has_labels=labels, has_teachers=self.has_teachers)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a classifier; empty for a model that is none."""
        return () if self.base is None else self.base.labels

    @abc.abstractmethod
    def add_labels(self, labels: tuple[str, ...], architecture: str) -> None:
        """Give a model an output layer for labels. architecture: of a new model, unless it was chosen"""

    @abc.abstractmethod
    def fit_tokenizer(self, split: SplitCorpus, seconds: float | None, reporter: Reporter) -> Tokenizer:
        """The tokenizer for the text: trained on it, loaded from a file, or that of the model, extended if needed.

        seconds: the budget in time

        Raises UsageError for a tokenizer that cannot be used or extended.
        """

    @abc.abstractmethod
    def build(self, config: ModelConfig, seed: int) -> Transformer:
        """The network in training mode; a new network is initialised from `config` and `seed`."""

    @abc.abstractmethod
    def trainable_parameters(self, config: ModelConfig) -> int:
        """Number of the parameters that are trained in a model with this configuration."""


@dataclass(kw_only=True)
class NewModel(StartingPoint):
    """A new model, which is built when its configuration is planned.

    tokenizer_choice: auto, char, bpe, or the path of a tokenizer.json
    vocab_size: of a BPE tokenizer; by default, chosen for the text
    """

    tokenizer_choice: str = "auto"
    vocab_size: int | None = None

    @classmethod
    def choose(cls, given: Mapping[str, Any], teachers: Sequence[Teacher]) -> Self:
        """A new model by the given settings, with the tokenizer of its teachers. Raises UsageError for a tokenizer that
        cannot be loaded.
        """
        choices = {name: value for name, value in given.items() if name in MODEL_NAMES}
        if "local_layers" in choices:
            choices["local_layers"] = tuple(choices["local_layers"])
        architecture = choices.get("architecture", "decoder")
        check_choice("architecture", architecture, ARCHITECTURES)
        tokenizer = given.get("tokenizer", "auto")
        owner, loaded = f"The tokenizer {tokenizer}", load_tokenizer_file(tokenizer)
        if teachers:
            owner, loaded = f"The teacher {teachers[0].path}", teachers[0].tokenizer
        return cls(
            architecture=architecture,
            vocabulary_owner=owner,
            tokenizer=loaded,
            choices=choices,
            tokenizer_choice=tokenizer,
            vocab_size=given.get("vocab_size"),
            has_teachers=bool(teachers),
        )

    def add_labels(self, labels: tuple[str, ...], architecture: str) -> None:
        """As `StartingPoint.add_labels`. By default, the model has a BPE tokenizer, which has an id for
        each character.
        """
        require(not self.choices.get("tie"), "`tie` is for models of tokens; this one has labels. Leave it out.")
        self.architecture = self.choices.get("architecture", architecture)
        self.choices = {**self.choices, "architecture": self.architecture, "labels": labels, "tie": False}
        if self.tokenizer_choice == "auto":
            self.tokenizer_choice = "bpe"

    def fit_tokenizer(self, split: SplitCorpus, seconds: float | None, reporter: Reporter) -> Tokenizer:
        tokenizer = self.tokenizer
        if tokenizer is None or self.vocab_size is not None:
            tokenizer = choose_tokenizer(split, self.tokenizer_choice, self.vocab_size, seconds, reporter)
        if (chat := split.corpus.rendering) is not None:
            tokenizer = tokenizer.with_special_tokens(_missing(chat, tokenizer), [chat.end_token or END_OF_TEXT])
        return tokenizer.with_mask_token() if self.architecture == "encoder" else tokenizer

    def build(self, config: ModelConfig, seed: int) -> Transformer:
        return build_model(config, seed)

    def trainable_parameters(self, config: ModelConfig) -> int:
        return parameters_by_part(config)["total"]


@dataclass(kw_only=True)
class TrainedModel(StartingPoint):
    """A model that is trained further: of a run, a Hugging Face folder or a GGUF file.

    extend_vocab: whether the vocabulary is extended for the text
    """

    tokenizer: Tokenizer
    base: ModelConfig
    network: Transformer
    extend_vocab: bool = False

    @classmethod
    def of(cls, loaded: LoadedModel, source: Path, vocabulary_owner: str, **others: Any) -> Self:
        """The model that was loaded from `source`; `others` are further fields."""
        network, config, tokenizer, weights = loaded
        copies = 1 if is_foreign(source) else 2  # those of a run are copied from the mapped file
        return cls(
            architecture=config.model.architecture,
            vocabulary_owner=vocabulary_owner,
            tokenizer=tokenizer,
            chat_template=config.tokenizer.chat_template,
            base=config.model,
            network=network,
            loading_bytes=copies * sum(tensor.nbytes for tensor in weights.tensors.values()),
            family=config.family,
            objective=config.objective,
            **others,
        )

    def add_labels(self, labels: tuple[str, ...], architecture: str) -> None:
        make_classifier(self.network, len(labels))
        self.base = replace(self.base, labels=labels, tie=False)

    def fit_tokenizer(self, split: SplitCorpus, seconds: float | None, reporter: Reporter) -> Tokenizer:
        """With `extend_vocab`, add the unknown characters of the text to the tokenizer.

        Special tokens of a chat template that the tokenizer lacks are always added. The network gets rows for new ids,
        in place.
        """
        tokenizer = self.tokenizer
        unknown = tokenizer.unknown_characters(split.alphabet)
        if self.extend_vocab and unknown:
            if tokenizer.kind != "char":
                raise UsageError(
                    f"`extend_vocab` needs a character tokenizer, and this model's is {tokenizer.kind}; train a new "
                    "model on the text."
                )
            tokenizer = tokenizer.with_characters(unknown)
            reporter.note(f"Added to the vocabulary: {describe_characters(unknown)}.")
        chat = split.corpus.rendering
        if chat is not None and (missing := _missing(chat, tokenizer)):
            end_of_text = tokenizer.special.end_of_text
            eos = dict.fromkeys((chat.end_token or end_of_text, *tokenizer.special.eos, end_of_text))
            tokenizer = tokenizer.with_special_tokens(missing, list(eos))
            reporter.note(f"Added to the vocabulary: {', '.join(missing)}.")
        if tokenizer.vocab_size > self.base.vocab_size:
            extend_vocabulary(self.network, tokenizer.vocab_size, is_classifier=bool(self.labels))
            self.base = replace(self.base, vocab_size=tokenizer.vocab_size)
        return tokenizer

    def build(self, config: ModelConfig, seed: int) -> Transformer:
        return self.network.train()

    def trainable_parameters(self, config: ModelConfig) -> int:
        return sum(parameter.numel() for parameter in self.network.parameters() if parameter.requires_grad)


@dataclass(kw_only=True)
class AdaptedModel(TrainedModel):
    """A frozen base model with a new adapter."""

    adapter: AdapterConfig
    adds_tokens: bool = False

    def add_labels(self, labels: tuple[str, ...], architecture: str) -> None:
        add_head(self.network, len(labels))
        self.adapter = replace(self.adapter, labels=labels)

    def fit_tokenizer(self, split: SplitCorpus, seconds: float | None, reporter: Reporter) -> Tokenizer:
        tokens = [] if split.corpus.rendering is None else template_tokens(split.corpus.rendering.template.source)
        if missing := [token for token in tokens if token not in self.tokenizer.added_tokens]:
            reporter.warn(
                f"{', '.join(missing)} of the chat template are not special tokens of the model; they are encoded as "
                "other text."
            )
        return self.tokenizer


def find_source(request: TrainingRequest, reporter: Reporter) -> Path | None:
    """The run, Hugging Face folder or GGUF file to load from, never written to; `None` for a new model.

    For an adapter, the default is the newest model under checkpoints/.

    Raises UsageError if there is no such model, and TinyLMError for a download that fails.
    """
    if request.adapter_kind is None:
        init_from = request.given.get("init_from")
        return None if init_from is None else find_model(Path(init_from), reporter)
    path = newest_model(reporter) if request.model is None else find_model(request.model, reporter)
    return path if path.name else path.absolute()  # Path(".") has no name to append a suffix to


SUFFIXES = {"lora": "-lora", "bottleneck": "-adapter"}  # of the default run directory, by kind of adapter


def default_out(request: TrainingRequest, source: Path | None) -> Path:
    """The run directory to write if none was given: checkpoints/<name of the text>.

    An adapter is written beside a base that is a run, and under checkpoints/ for a model of another tool.
    """
    if request.adapter_kind is None or source is None:
        return CHECKPOINTS / default_run_name(request.paths[0])
    suffix = SUFFIXES[request.adapter_kind]
    if is_foreign(source):  # not next to the base, which may be in the Hugging Face cache
        named = source if request.model is None or not request.model.name else request.model
        return CHECKPOINTS / (foreign_name(named) + suffix)
    run = run_of(source)
    return run.with_name(run.name + suffix)


def load_start(request: TrainingRequest, source: Path | None, teachers: Sequence[Teacher] = ()) -> StartingPoint:
    """Load the model at `source`, the path from `find_source`, and add a new adapter if the request is for one.

    teachers: the models that a decoder learns from

    Raises UsageError for settings that do not fit the model, and TinyLMError for damaged files.
    """
    if source is None:
        return NewModel.choose(request.given, teachers)
    settings, loaded = request.settings, open_model(source)
    if isinstance(settings, TrainSettings):
        loaded.network.float()
        if teachers and not teachers[0].tokenizer.has_ids_of(loaded.tokenizer):
            raise UsageError(f"{source} and its teacher {teachers[0].path} have different tokenizers.")
        return TrainedModel.of(
            loaded,
            source,
            f"The tokenizer of {source}",
            extend_vocab=settings.extend_vocab,
            has_teachers=bool(teachers),
        )
    adapter = _adapter_config(settings, loaded, source)
    add_adapter(loaded.network, adapter, request.given.get("seed", 0))
    return AdaptedModel.of(loaded, source, f"The model {source}", adapter=adapter)


def _adapter_config(settings: LoRASettings | AdapterSettings, base: LoadedModel, source: Path) -> AdapterConfig:
    """The configuration of an adapter on the model at `source`. Raises UsageError if the adapter does not fit it."""
    shared: dict[str, Any] = {
        "kind": settings.kind,
        "base": str(resolve_links(source)),
        "base_digest": base.config.recovered_digest or base.weights.digest,
        "dropout": settings.dropout,
    }
    if isinstance(settings, AdapterSettings):
        width = base.config.model.width
        if not 1 <= settings.bottleneck <= width:
            raise UsageError(f"`bottleneck` is {settings.bottleneck}; it must be from 1 to the model's width, {width}.")
        return AdapterConfig(rank=settings.bottleneck, targets=sublayers(base.network), **shared)
    chosen = "attention" if settings.target is None else settings.target
    target = (chosen,) if isinstance(chosen, str) else chosen
    targets = target_modules(target, base.network)
    if targets == TARGETS["embedding"] and (settings.dropout or settings.share_b):
        raise UsageError(
            "`dropout` and `share_b` are for linear layers, and the embedding is a lookup table; leave them out."
        )
    rank = min(DEFAULT_RANK, max_rank(base.network, targets)) if settings.rank is None else settings.rank
    return AdapterConfig(
        rank=rank,
        alpha=2.0 * rank if settings.alpha is None else settings.alpha,
        targets=targets,
        rank_stabilised=settings.rank_stabilised,
        share_b=settings.share_b,
        **shared,
    )


def _missing(chat: ChatFormat, tokenizer: Tokenizer) -> list[str]:
    """The special tokens of conversations that the tokenizer lacks."""
    return [token for token in chat.special_tokens if token not in tokenizer.added_tokens]


def default_run_name(corpus_path: str) -> str:
    """The default name of a run that is trained on `corpus_path`: a file, a folder, a glob pattern or standard input.

    It is the name of the file or folder, without its suffix (see `content_stem`); for a pattern, that of the closest
    parent folder whose name has no wildcards; for standard input, stdin.
    """
    if corpus_path == STANDARD_INPUT:
        return "stdin"
    path = Path(corpus_path)
    while glob.has_magic(path.name) and not path.exists():
        path = path.parent
    return content_stem(resolve_links(path).name) or "run"
