"""What a new run starts from: a new model, an existing one, or an existing one with a new adapter."""

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tinylm.config.jobs import data_kinds
from tinylm.config.model import ARCHITECTURES, ModelConfig
from tinylm.config.run import AdapterConfig, run_of
from tinylm.config.settings import MODEL_NAMES, TrainSettings
from tinylm.config.validation import check_choice, require
from tinylm.errors import UsageError, concerning
from tinylm.models.open import find_model, imported_run, is_foreign, open_model
from tinylm.models.teachers import Teacher, open_teachers
from tinylm.reporter import Reporter
from tinylm.run_directory.layout import CHECKPOINTS, newest_model
from tinylm.run_directory.loading import LoadedModel, adapter_kind, trained_weights
from tinylm.system.files import resolve_links
from tinylm.text.chat_format import template_tokens
from tinylm.text.files import STANDARD_INPUT, content_stem
from tinylm.text.split import SplitCorpus
from tinylm.text.tokenizer import END_OF_TEXT, MASK, Tokenizer, describe_characters
from tinylm.text.tokenizer_choice import TRAINED, choose_tokenizer, load_tokenizer
from tinylm.training.training_request import TrainingRequest
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_model, extend_vocabulary, make_classifier


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a new run is trained from; implements `tinylm.jobs.job.Reader`.

    The network of a base is changed by `build` alone, after the plan.

    base: the existing model, as it was opened; `None` for a new one
    source: its path
    adapter: the adapter that is trained on it; `None` to train all weights
    extend_vocab: whether its vocabulary is extended for the text
    choices: the settings of a new model that were given: fields of ModelConfig, `preset` and `size`
    tokenizer_choice: of a new model: auto, char, bpe, or the path of a tokenizer.json
    vocab_size: of its BPE tokenizer; by default, chosen for the text
    tokenizer: of the base, of the teachers or from a file; `None` if it is chosen for the text
    vocabulary_owner: how messages name the source of that tokenizer, such as "The model checkpoints/a"
    teachers: the models that it learns from
    labels: of the output layer; empty without one for labels
    """

    base: LoadedModel | None = None
    source: Path | None = None
    adapter: AdapterConfig | None = None
    extend_vocab: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_choice: str = "auto"
    vocab_size: int | None = None
    tokenizer: Tokenizer | None = None
    vocabulary_owner: str
    teachers: tuple[Teacher, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """decoder, encoder or encoder-decoder."""
        return self.choices.get("architecture", "decoder") if self.base is None else self.base.config.model.architecture

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """The kinds of data that the model can be trained on, the default first."""
        objective = None if self.base is None else self.base.config.objective
        labels = True if self.labels else None
        return data_kinds(self.architecture, objective, has_labels=labels, has_teachers=bool(self.teachers))

    @property
    def chat_template(self) -> str | None:
        """Source of the template of conversations; `None` for a model that has none."""
        return None if self.base is None else self.base.config.tokenizer.chat_template

    @property
    def adds_tokens(self) -> bool:
        """Whether special tokens that a template of conversations lacks are added to the tokenizer."""
        return self.adapter is None

    @property
    def loading_bytes(self) -> int:
        """Peak memory for reading the weights of the base, including the mapped file."""
        if self.base is None or self.source is None:
            return 0
        copies = 1 if is_foreign(self.source) else 2  # the weights of a run are copied from the mapped file
        return copies * sum(tensor.nbytes for tensor in self.base.weights.tensors.values())

    def with_labels(self, labels: tuple[str, ...], architecture: str) -> Self:
        """The start of a model with an output layer for labels. architecture: of a new model, unless it was chosen

        By default, a new model has a BPE tokenizer, which has an id for each character.
        """
        if self.base is not None:
            return replace(self, labels=labels, adapter=self.adapter and replace(self.adapter, labels=labels))
        require(not self.choices.get("tie"), "`tie` is for models of tokens; this one has labels. Leave it out.")
        choices = {"architecture": architecture, **self.choices, "labels": labels, "tie": False}
        tokenizer = "bpe" if self.tokenizer_choice == "auto" else self.tokenizer_choice
        return replace(self, labels=labels, choices=choices, tokenizer_choice=tokenizer)

    def fit_tokenizer(self, text: SplitCorpus, seconds: float | None, reporter: Reporter) -> Tokenizer:
        """The tokenizer for the text: that of the base, extended if needed, one that was given, or one that is trained.

        Special tokens of a chat template that the tokenizer lacks are added, except for an adapter.

        seconds: the budget in time

        Raises UsageError for a tokenizer that cannot be used or extended.
        """
        tokenizer, chat = self.tokenizer, text.corpus.rendering
        if tokenizer is None or self.vocab_size is not None:
            tokenizer = choose_tokenizer(text, self.tokenizer_choice, self.vocab_size, seconds, reporter)
        if self.adapter is not None:
            tokens = [] if chat is None else template_tokens(chat.template.source)
            if missing := [token for token in tokens if token not in tokenizer.added_tokens]:
                reporter.warn(
                    f"{', '.join(missing)} of the chat template are not special tokens of the model; they are encoded "
                    "as other text."
                )
            return tokenizer
        unknown = tokenizer.unknown_characters(text.alphabet) if self.extend_vocab else ""
        if unknown:
            require(
                tokenizer.kind == "char",
                f"`extend_vocab` needs a character tokenizer, and this model's is {tokenizer.kind}; train a new model "
                "on the text.",
            )
            tokenizer = tokenizer.with_characters(unknown)
            reporter.note(f"Added to the vocabulary: {describe_characters(unknown)}.")
        missing = (
            [] if chat is None else [token for token in chat.special_tokens if token not in tokenizer.added_tokens]
        )
        if chat is not None and self.base is None:
            tokenizer = tokenizer.with_special_tokens(missing, [chat.end_token or END_OF_TEXT])
        elif chat is not None and missing:
            eos = dict.fromkeys((chat.end_token or tokenizer.special.end_of_text, *tokenizer.special.stops))
            tokenizer = tokenizer.with_special_tokens(missing, list(eos))
            reporter.note(f"Added to the vocabulary: {', '.join(missing)}.")
        is_new_encoder = self.base is None and self.architecture == "encoder"
        return tokenizer.with_special_tokens([MASK]) if is_new_encoder else tokenizer

    def model_config(self, vocab_size: int) -> ModelConfig | None:
        """The base with the labels and a vocabulary of at least this size, or as it is under an adapter; `None` for a
        new model.
        """
        if self.base is None or self.adapter is not None:
            return self.base and self.base.config.model
        config = self.base.config.model
        if self.labels != config.labels:
            config = replace(config, labels=self.labels, tie=False)
        return replace(config, vocab_size=max(vocab_size, config.vocab_size))

    def build(self, config: ModelConfig, seed: int) -> Transformer:
        """The network with the planned configuration, in training mode; new weights are drawn from the seed."""
        if self.base is None:
            return build_model(config, seed)
        network = self.base.network
        if self.adapter is not None:
            trained_weights(self.adapter).add(network, seed)
            return network.train()
        network.float()
        if config.labels != self.base.config.model.labels:
            make_classifier(network, len(config.labels))
        if config.vocab_size > network.vocab_size:
            extend_vocabulary(network, config.vocab_size, is_classifier=bool(config.labels))
        return network.train()


@concerning("init_from", "model")
def open_start(request: TrainingRequest, source: Path | None, reporter: Reporter) -> Start:
    """Open the model at `source`, the path from `find_source`, and the teachers; configure a new adapter.

    Raises UsageError for settings that do not fit the model, and TinyLMError for damaged files.
    """
    settings, given = request.settings, request.given
    teachers = open_teachers(request.teachers, reporter)
    if source is None:
        choices = request.select(MODEL_NAMES)
        check_choice("architecture", choices.get("architecture", "decoder"), ARCHITECTURES)
        choice = given.get("tokenizer", "auto")
        return Start(
            choices=choices,
            tokenizer_choice=choice,
            vocab_size=given.get("vocab_size"),
            tokenizer=teachers[0].tokenizer if teachers else None if choice in TRAINED else load_tokenizer(choice),
            vocabulary_owner=f"The teacher {teachers[0].path}" if teachers else f"The tokenizer {choice}",
            teachers=teachers,
        )
    base = open_model(source)
    opened: dict[str, Any] = {"base": base, "source": source, "tokenizer": base.tokenizer, "labels": base.config.labels}
    if not isinstance(settings, TrainSettings):
        adapter = adapter_kind(settings.kind).configure(settings, base, source)
        return Start(adapter=adapter, vocabulary_owner=f"The model {source}", **opened)
    if teachers and not teachers[0].tokenizer.has_ids_of(base.tokenizer):
        raise UsageError(f"{source} and its teacher {teachers[0].path} have different tokenizers.")
    owner = f"The tokenizer of {source}"
    return Start(extend_vocab=settings.extend_vocab, teachers=teachers, vocabulary_owner=owner, **opened)


@concerning("init_from", "model")
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


MAX_NAME_BYTES = 200  # of a run; a file system allows 255 with what is added
SHORT_NAME = 50  # characters of a longer name
SUFFIXES = {"lora": "-lora", "bottleneck": "-adapter"}  # of the default run directory, by kind of adapter


def default_out(request: TrainingRequest, source: Path | None) -> Path:
    """The run directory to write if none was given: checkpoints/<name of the text>.

    An adapter is written beside a base that is a run, and under checkpoints/ for a model of another tool.
    """
    if request.adapter_kind is None or source is None:
        return CHECKPOINTS / default_run_name(request.paths[0])
    if not is_foreign(source):
        run = run_of(source)
    else:  # not beside the base, which may be in the Hugging Face cache
        run = imported_run(source if request.model is None or not request.model.name else request.model)
    return run.with_name(run.name + SUFFIXES[request.adapter_kind])


def default_run_name(corpus_path: str) -> str:
    """The default name of a run that is trained on `corpus_path`: a file, a folder, a glob pattern or standard input.

    It is the name of the file or folder, without its suffix (see `content_stem`), or the beginning of a long one; for a
    pattern, that of the closest parent folder whose name has no wildcards; for standard input, stdin.
    """
    if corpus_path == STANDARD_INPUT:
        return "stdin"
    path = Path(corpus_path)
    try:
        while glob.has_magic(path.name) and not path.exists():
            path = path.parent
        name = content_stem(resolve_links(path).name)
    except ValueError:  # a NUL, which no name has
        name = ""
    return (name if len(os.fsencode(name)) <= MAX_NAME_BYTES else name[:SHORT_NAME]) or "run"
