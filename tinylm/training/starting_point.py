"""The model that a training run starts from: new, from another run, or a base model with a new adapter."""

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tinylm.adapters.bottleneck import sublayers
from tinylm.adapters.lora import TARGETS, max_rank, target_modules
from tinylm.config.model import ARCHITECTURES, ModelConfig
from tinylm.config.run import AdapterConfig, RunConfig, run_of
from tinylm.config.training import Budget
from tinylm.config.validation import check_choice
from tinylm.errors import UsageError
from tinylm.formats.foreign import foreign_name, is_foreign
from tinylm.models.adapter import add_adapter
from tinylm.models.open import find_model, open_model
from tinylm.reporter import Reporter
from tinylm.run_directory.find_run import newest_model
from tinylm.run_directory.layout import CHECKPOINTS
from tinylm.run_directory.weights import Weights
from tinylm.system.files import resolve_links
from tinylm.text.answer_spans import ChatFormat, chat_format, read_template, template_tokens
from tinylm.text.chat_corpus import ChatCorpus
from tinylm.text.chat_template import CHATML
from tinylm.text.compression import content_stem
from tinylm.text.corpus import STANDARD_INPUT
from tinylm.text.corpus_encoding import SplitCorpus
from tinylm.text.corpus_loading import TextSource
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, describe_characters
from tinylm.text.tokenizer_choice import choose_tokenizer, load_tokenizer_file
from tinylm.transformer.build import build_model, extend_vocabulary
from tinylm.transformer.stack import Transformer

DEFAULT_RANK = 8


@dataclass
class InitialModel:
    """The model that a training run starts from, before the run is planned.

    architecture: decoder, encoder or encoder-decoder
    vocabulary_owner: how messages name the source of the vocabulary, such as "The model checkpoints/a"
    config, network: `None` for a new model, which is built when its config is planned
    loading_bytes: peak memory for reading the weights of `network`, including the mapped file
    tokenizer: `None` until it is chosen for the text
    loaded_tokenizer: for a new model, the tokenizer loaded from a tokenizer.json
    adapter: the adapter to train on the model
    chat_template: source of the template that renders conversations; `None` for a model that has none
    adds_tokens: whether missing special tokens of a chat template can be added to the tokenizer
    family: Hugging Face family of an imported model
    """

    architecture: str
    vocabulary_owner: str
    config: ModelConfig | None = None
    network: Transformer | None = None
    loading_bytes: int = 0
    tokenizer: Tokenizer | None = None
    loaded_tokenizer: Tokenizer | None = None
    adapter: AdapterConfig | None = None
    chat_template: str | None = None
    adds_tokens: bool = False
    family: str | None = None

    def choose_chat_format(self, text: TextSource) -> ChatFormat:
        """The format of conversations. Also sets `chat_template`: that of `text`, that of the model, or ChatML.

        Raises UsageError for a file that cannot be read, and TinyLMError for one that is too long.
        """
        source = read_template(text.chat_template) if text.chat_template else self.chat_template or CHATML
        extended = self.adds_tokens and source != self.chat_template
        self.chat_template = source
        tokenizer = self.tokenizer or self.loaded_tokenizer
        return chat_format(source, tokenizer, text.train_on or "assistant", extended=extended)

    def build(self, config: ModelConfig, seed: int) -> Transformer:
        """The network in training mode; a new network is initialised from `config` and `seed`."""
        return build_model(config, seed) if self.network is None else self.network.train()


class StartingPoint(Protocol):
    """The starting point of a run: NewModel, TrainedModel or NewAdapter.

    choices: the settings of the model that were given: fields of ModelConfig, `preset` and `size`
    """

    choices: Mapping[str, Any]

    def find_source(self, reporter: Reporter) -> Path | None:
        """The run, Hugging Face folder or GGUF file to load from, never written to; `None` for a new model.

        Raises UsageError if there is no such model, and TinyLMError for a download that fails.
        """
        ...

    def default_out(self, source: Path | None, text: TextSource) -> Path:
        """The run directory to write if none was given."""
        ...

    def load(self, source: Path | None, seed: int) -> InitialModel:
        """Load the model in `source`, if there is one. NewAdapter adds an adapter, initialised from `seed`.

        Raises UsageError for settings that do not fit the model, and TinyLMError for damaged files.
        """
        ...

    def fit_tokenizer(
        self, model: InitialModel, split: SplitCorpus, budget: Budget | None, reporter: Reporter
    ) -> Tokenizer:
        """The tokenizer for the text: trained on it, loaded from a file, or that of the model, extended if needed.

        Raises UsageError for a tokenizer that cannot be used or extended.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class NewModel(StartingPoint):
    """A new model.

    choices: fields of ModelConfig, `preset` and `size`
    tokenizer: auto, char, bpe, or the path of a tokenizer.json
    """

    choices: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    vocab_size: int | None = None

    def find_source(self, reporter: Reporter) -> None:
        return None

    def default_out(self, source: Path | None, text: TextSource) -> Path:
        return CHECKPOINTS / default_run_name(text.paths[0])

    def load(self, source: Path | None, seed: int) -> InitialModel:
        architecture = self.choices.get("architecture", "decoder")
        check_choice("architecture", architecture, ARCHITECTURES)
        loaded = load_tokenizer_file(self.tokenizer or "auto")
        return InitialModel(architecture, f"The tokenizer {self.tokenizer}", loaded_tokenizer=loaded, adds_tokens=True)

    def fit_tokenizer(
        self, model: InitialModel, split: SplitCorpus, budget: Budget | None, reporter: Reporter
    ) -> Tokenizer:
        seconds = None if budget is None else budget.time
        tokenizer = choose_tokenizer(split, self.tokenizer or "auto", self.vocab_size, seconds, reporter)
        if isinstance(split.corpus, ChatCorpus) and split.corpus.chat is not None:
            chat = split.corpus.chat
            missing = [token for token in chat.special_tokens if token not in tokenizer.added_tokens]
            tokenizer = tokenizer.with_special_tokens(missing, [chat.end_token or END_OF_TEXT])
        return tokenizer.with_mask_token() if model.architecture == "encoder" else tokenizer


@dataclass(frozen=True, kw_only=True)
class TrainedModel(StartingPoint):
    """The weights, architecture and tokenizer of a trained model: a run, a Hugging Face folder or a GGUF file.

    extend_vocab: whether the vocabulary is extended for the text
    """

    run: Path
    extend_vocab: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict, init=False)

    def find_source(self, reporter: Reporter) -> Path:
        return find_model(self.run, reporter)

    def default_out(self, source: Path | None, text: TextSource) -> Path:
        return CHECKPOINTS / default_run_name(text.paths[0])

    def load(self, source: Path | None, seed: int) -> InitialModel:
        assert source is not None
        network, config, tokenizer, weights = open_model(source)
        loading_bytes = _loading_bytes(source, weights)
        model = _initial_model(f"The tokenizer of {source}", config, network.float(), tokenizer)
        return replace(model, adds_tokens=True, loading_bytes=loading_bytes)

    def fit_tokenizer(
        self, model: InitialModel, split: SplitCorpus, budget: Budget | None, reporter: Reporter
    ) -> Tokenizer:
        """With `extend_vocab`, add the unknown characters of the text to the tokenizer.

        Special tokens of a chat template that the tokenizer lacks are always added. The network gets rows for new ids,
        in place.
        """
        assert model.tokenizer is not None
        unknown = model.tokenizer.unknown_characters(split.alphabet)
        tokenizer = model.tokenizer
        if self.extend_vocab and unknown:
            tokenizer = self._with_characters(model, unknown)
            reporter.note(f"Added to the vocabulary: {describe_characters(unknown)}.")
        if isinstance(split.corpus, ChatCorpus) and split.corpus.chat is not None:
            chat = split.corpus.chat
            missing = [token for token in chat.special_tokens if token not in tokenizer.added_tokens]
            if missing:
                end_of_text = tokenizer.special.end_of_text
                eos = dict.fromkeys((chat.end_token or end_of_text, *tokenizer.special.eos, end_of_text))
                tokenizer = tokenizer.with_special_tokens(missing, list(eos))
                reporter.note(f"Added to the vocabulary: {', '.join(missing)}.")
        assert model.network is not None and model.config is not None
        if tokenizer.vocab_size > model.config.vocab_size:
            extend_vocabulary(model.network, tokenizer.vocab_size)
            model.config = replace(model.config, vocab_size=tokenizer.vocab_size)
        return tokenizer

    def _with_characters(self, model: InitialModel, unknown: str) -> Tokenizer:
        assert model.tokenizer is not None
        if model.tokenizer.kind != "char":
            raise UsageError(
                f"`extend_vocab` needs a character tokenizer, and this model's is {model.tokenizer.kind}; train a new "
                "model on the text."
            )
        return model.tokenizer.with_characters(unknown)


class AdapterMethod(Protocol):
    """The method of a new adapter, LoRAMethod or BottleneckMethod, with its settings.

    suffix: appended to the name of the base to make the default run directory
    """

    suffix: str

    def config(self, model: Transformer, base: Path, digest: str) -> AdapterConfig:
        """The configuration of the adapter on `model`, which was loaded from `base` and whose weights have `digest`.

        Raises UsageError if the adapter does not fit the model.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoRAMethod(AdapterMethod):
    """The settings of a LoRA update.

    rank: default: 8, or the most that the matrices allow
    alpha: default: twice the rank
    target: keys of `tinylm.adapters.lora.TARGETS`, such as "attention"; one string may have several, as "query,value"
    """

    rank: int | None = None
    alpha: float | None = None
    rank_stabilised: bool = False
    share_b: bool = False
    dropout: float = 0.0
    target: Sequence[str] = ("attention",)
    suffix: str = field(default="-lora", init=False)

    def config(self, model: Transformer, base: Path, digest: str) -> AdapterConfig:
        targets = target_modules(self.target, model)
        if targets == TARGETS["embedding"] and (self.dropout or self.share_b):
            raise UsageError(
                "`dropout` and `share_b` are for linear layers, and the embedding is a lookup table; leave them out."
            )
        rank = min(DEFAULT_RANK, max_rank(model, targets)) if self.rank is None else self.rank
        return AdapterConfig(
            base=str(base),
            base_digest=digest,
            rank=rank,
            alpha=2.0 * rank if self.alpha is None else self.alpha,
            dropout=self.dropout,
            targets=targets,
            rank_stabilised=self.rank_stabilised,
            share_b=self.share_b,
        )


@dataclass(frozen=True, kw_only=True)
class BottleneckMethod(AdapterMethod):
    """The settings of bottleneck adapters with hidden size `bottleneck`, one after each sublayer."""

    bottleneck: int = 16
    dropout: float = 0.0
    suffix: str = field(default="-adapter", init=False)

    def config(self, model: Transformer, base: Path, digest: str) -> AdapterConfig:
        width = model.embedding.weight.shape[1]
        if not 1 <= self.bottleneck <= width:
            raise UsageError(f"`bottleneck` is {self.bottleneck}; it must be from 1 to the model's width, {width}.")
        return AdapterConfig(
            base=str(base),
            base_digest=digest,
            kind="bottleneck",
            rank=self.bottleneck,
            dropout=self.dropout,
            targets=sublayers(model),
        )


@dataclass(frozen=True, kw_only=True)
class NewAdapter(StartingPoint):
    """A new adapter on the base model at the path `base`; default: the newest model under checkpoints/.

    The default run directory is next to a base that is a run, and under checkpoints/ for a model of another tool.
    """

    method: AdapterMethod
    base: Path | None = None
    choices: Mapping[str, Any] = field(default_factory=dict, init=False)

    def find_source(self, reporter: Reporter) -> Path:
        path = newest_model(reporter) if self.base is None else find_model(self.base, reporter)
        return path if path.name else path.absolute()  # Path(".") has no name to append the suffix to

    def default_out(self, source: Path | None, text: TextSource) -> Path:
        assert source is not None
        if is_foreign(source):  # not next to the base, which may be in the Hugging Face cache
            named = source if self.base is None or not self.base.name else self.base
            return CHECKPOINTS / (foreign_name(named) + self.method.suffix)
        run = run_of(source)
        return run.with_name(run.name + self.method.suffix)

    def load(self, source: Path | None, seed: int) -> InitialModel:
        assert source is not None
        network, config, tokenizer, weights = open_model(source)
        adapter = self.method.config(network, resolve_links(source), config.recovered_digest or weights.digest)
        add_adapter(network, adapter, seed)
        model = _initial_model(f"The model {source}", config, network, tokenizer)
        return replace(model, adapter=adapter, loading_bytes=_loading_bytes(source, weights))

    def fit_tokenizer(
        self, model: InitialModel, split: SplitCorpus, budget: Budget | None, reporter: Reporter
    ) -> Tokenizer:
        assert model.tokenizer is not None
        if isinstance(split.corpus, ChatCorpus) and model.chat_template is not None:
            missing = [
                token for token in template_tokens(model.chat_template) if token not in model.tokenizer.added_tokens
            ]
            if missing:
                reporter.warn(
                    f"{', '.join(missing)} of the chat template are not special tokens of the model; they are encoded "
                    "as other text."
                )
        return model.tokenizer


def _loading_bytes(source: Path, weights: Weights) -> int:
    """Bytes for reading the weights: those of a run are copied from the mapped file, foreign ones stay mapped."""
    copies = 1 if is_foreign(source) else 2
    return copies * sum(tensor.nbytes for tensor in weights.tensors.values())


def _initial_model(
    vocabulary_owner: str, config: RunConfig, network: Transformer, tokenizer: Tokenizer
) -> InitialModel:
    return InitialModel(
        architecture=config.model.architecture,
        vocabulary_owner=vocabulary_owner,
        config=config.model,
        network=network,
        tokenizer=tokenizer,
        chat_template=config.tokenizer.chat_template,
        family=config.family,
    )


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
