"""A trained model in memory: what `load` returns, to generate, evaluate or compute logits with."""

import operator
import secrets
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from tinylm.config.jobs import JOBS, JobRow, applicable, changed_settings, data_kinds, objective_for, rows_on
from tinylm.config.run import RunConfig
from tinylm.config.settings import ChatSettings, TextFileSettings, UnknownCharacterSettings
from tinylm.config.similar_names import require_settings
from tinylm.config.validation import check_choice, describe_value, require
from tinylm.errors import TinyLMError, UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.result import Evaluation
from tinylm.generation.conversion_cache import Conversion
from tinylm.generation.generation_config import GenerationConfig, SpeedConfig, is_sampled, settings_without_effect
from tinylm.generation.prompts import EncodedPrompt, Prompt, drop_unknown
from tinylm.generation.text_generator import Continuation, Sample, TextGenerator
from tinylm.jobs.evaluated_text import evaluation_source, evaluation_tokens
from tinylm.jobs.job import EvaluationTokens, Job, Scoring, load_job
from tinylm.jobs.reading import ModelReader
from tinylm.jobs.run_tokens import reopen_ids
from tinylm.kernels.process import keep_freed_blocks
from tinylm.machine.device import autocast
from tinylm.machine.torch_settings import each_with_usual_settings, usual_settings
from tinylm.models.load_adapter import LoadedAdapter
from tinylm.models.model_engine import ModelEngine
from tinylm.reporter import counted
from tinylm.system.html import html_table
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.chat_format import chat_format
from tinylm.text.file_selection import TextSource
from tinylm.text.readers import require_encodable
from tinylm.text.token_files import Tokens
from tinylm.text.tokenizer import MASK
from tinylm.text.tokenizer_choice import without_unknown
from tinylm.transformer.architectures import Decoder, Encoder, EncoderDecoder, Transformer
from tinylm.transformer.build import count_parameters

if TYPE_CHECKING:
    from tinylm.jobs.labels.classifier import Classified
    from tinylm.jobs.masked.job import FilledPrompt

Ids = Sequence[Sequence[int]] | np.ndarray | Tensor


@dataclass(frozen=True, kw_only=True)
class ReadingSettings(TextFileSettings, ChatSettings, UnknownCharacterSettings):
    """How the text of an evaluation is read; see TextSource."""


@dataclass(eq=False, repr=False, kw_only=True)
class Model(TextGenerator):
    """A trained model with its tokenizer and adapters. Made by `load`.

    path: run directory, Hugging Face folder or GGUF file of the model; with adapters, path of the first adapter.
    network: the torch module, in evaluation mode; its weights are fp32, or `dtype` if they were stored in it.
    dtype: number format of losses, logits and labels.
    data, objective: description of the training text, and the objective, of the selected adapter (initially the first)
        or, without an adapter, of the model; `None` if not recorded.
    note: the note of `load` about device and number format.
    """

    engine: ModelEngine
    path: Path
    network: Transformer
    dtype: str
    adapters: tuple[LoadedAdapter, ...]
    note: str
    objective: str | None = field(init=False)

    def __post_init__(self) -> None:
        self._describe_training(self.adapters[0].config if self.adapters else self.config)

    def __repr__(self) -> str:
        rows = self._rows()
        lines = [
            f"Model({str(self.path)!r}: {rows['model']}",
            f"{rows['tokens']}; {rows['computation']}",
            *(f"adapter {str(adapter.path)!r}, scale {adapter.scale:g}" for adapter in self.adapters),
        ]
        return ";\n      ".join(lines) + ")"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        adapters = {f"adapter {n}": f"{a.path}, scale {a.scale:g}" for n, a in enumerate(self.adapters, start=1)}
        return html_table({"path": str(self.path), **self._rows(), **adapters})

    def _rows(self) -> dict[str, str]:
        model, quantize = self.config.model, self.engine.quantize
        parameters = count_parameters(model)["total"]
        return {
            "model": f"{model.architecture}, {parameters:,} parameters, {counted(model.layers, 'layer')} x width "
            f"{model.width}, context {model.context}",
            "tokens": f"{self.tokenizer.kind} tokenizer, {self.tokenizer.vocab_size:,} ids",
            "computation": f"{self.network.device.type} in {self.dtype}"
            + ("" if quantize == "none" else f", {quantize} weights"),
        }

    def encode(self, text: str) -> list[int]:
        """The token ids of a text. Raises UsageError for characters that are not in the vocabulary."""
        return [int(i) for i in self.tokenizer.encode(require_encodable(text, "The text"))]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids. Raises UsageError for ids that are not in the vocabulary."""
        tensor = self._checked_ids(ids if isinstance(ids, Tensor | np.ndarray) else list(ids))
        require(tensor.ndim == 1, f"The ids have {tensor.ndim} dimensions; give those of one text.")
        return self.tokenizer.decode(tensor.tolist())

    def select_adapter(self, index: SupportsIndex | None) -> None:
        """Apply only the adapter with this index in `adapters`, from 0, or none (`None`). Raises UsageError for another
        index.
        """
        if index is not None:
            count, given = len(self.adapters), index
            try:
                index = -1 if isinstance(index, bool) else operator.index(index)
            except TypeError:
                index = -1
            require(0 <= index < count, f"There is no adapter {given!r}: the model has {count}, counted from 0.")
        self.engine.select(index)
        self._describe_training(self.config if index is None else self.adapters[index].config)

    def _describe_training(self, trained: RunConfig | None) -> None:
        self.data, self.objective = (None, None) if trained is None else (trained.data, trained.objective)

    @usual_settings()
    def logits(self, ids: Ids, source: Ids | None = None) -> Tensor:
        """The logits for token ids: (B, T) -> (B, T, V), in fp32.

        At each position, a decoder predicts the next token, and an encoder the token itself. For the labels of a
        classifier, see `classify`.

        source: (B, S) ids of the source texts, for an encoder-decoder, whose `ids` are those of the targets; other
            models ignore it.

        Raises UsageError for ids that are not two-dimensional or not in the vocabulary, for rows longer than the
        context, and if an encoder-decoder has no `source`, or one of another number of rows.
        """
        inputs = [self._validated_rows(ids)]
        if isinstance(self.network, EncoderDecoder):
            require(source is not None, "An encoder-decoder needs the ids of a source as well.")
            inputs.append(self._validated_rows(source))
            rows = [len(tensor) for tensor in inputs]
            require(
                rows[0] == rows[1], f"There are {rows[0]} rows of ids and {rows[1]} of sources; give as many of each."
            )
        with torch.no_grad(), autocast(self.network.device.type, self.dtype):
            return self.network.logits(self.network(*inputs).hidden).float()

    def _validated_rows(self, ids: Any) -> Tensor:
        tensor = self._checked_ids(ids)
        require(tensor.ndim == 2, f"The ids have {tensor.ndim} dimensions; give rows of ids, (B, T).")
        require(tensor.shape[1] <= self.context, f"The ids have rows longer than the context, {self.context}.")
        return tensor

    def _checked_ids(self, ids: Any) -> Tensor:
        try:
            tensor = torch.as_tensor(ids, device=self.network.device)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError("Ids must be whole numbers, in rows of the same length.") from None
        is_whole = not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex())
        require(is_whole, "Ids must be whole numbers.")
        tensor = tensor.long()
        in_range = ((tensor >= 0) & (tensor < self.network.vocab_size)).all()
        require(bool(in_range), f"Ids must be from 0 to {self.network.vocab_size - 1}.")
        return tensor

    def generate(self, prompt: str = "", *, stream: bool = False, **settings: Any) -> str | list[str] | Iterator[str]:
        """Generate text. A decoder continues the prompt; an encoder fills each `<mask>` in the prompt; an
        encoder-decoder translates each line of the prompt.

        Returns the text without the prompt (an encoder: the filled prompt); a list of texts for `num_samples` above 1;
        with `stream`, an iterator over the chunks of a single text.

        settings: fields of GenerationConfig, such as `max_tokens` and `temperature`. The same seed gives the same text;
            the default is a random seed. `stop` may be one text. `None` stands for the default.

        Raises UsageError for a setting out of range or without effect, and for a prompt that cannot be used, TypeError
        for unknown settings, and TinyLMError for JSON that is not complete (with `stream`, during the iteration).
        """
        require_settings(settings, [field.name for field in fields(GenerationConfig)])
        chosen = {name: value for name, value in settings.items() if value is not None}
        stop = chosen.get("stop", ())
        if not isinstance(stop, bytes) and isinstance(stop, Iterable):
            chosen["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        config = GenerationConfig(**{"seed": secrets.randbits(32), **chosen})
        given = [setting.name for setting in fields(config) if getattr(config, setting.name) != setting.default]
        without_effect = settings_without_effect(self.architecture, is_sampled(config))
        for names, reason in (*without_effect, (("logprobs",), "A text has no log-probabilities")):
            found = [f"`{name}`" for name in names if name in given]
            require(not found, f"{reason}: leave out {', '.join(found)}.")
        if not isinstance(prompt, str):
            raise TypeError(f"the prompt is {describe_value(prompt)}; it must be a text (of several, call it for each)")
        require(not stream or config.num_samples == 1, "`stream` is for a single sample; leave out `num_samples`.")
        chunks = each_with_usual_settings(self._text_chunks(Prompt(prompt, config)))
        if stream:
            return (text for _, text in chunks)
        texts = [""] * config.num_samples
        for sample, text in chunks:
            texts[sample] += text
        return texts if config.num_samples > 1 else texts[0]

    def _text_chunks(self, prompt: Prompt) -> Generator[tuple[int, str]]:
        match self.network:
            case Decoder():
                yield from self.continue_prompt(prompt)
            case Encoder():
                yield 0, self.fill_mask(prompt).text
            case _:
                for number, sample in enumerate(self.translate(prompt)):
                    line, row = divmod(number, prompt.config.num_samples)
                    yield row, f"\n{sample.text}" if line else sample.text

    @usual_settings()
    def classify(self, texts: str | Sequence[str], *, unknown: str = "skip") -> "list[Classified]":
        """The label of each text, with the probabilities of all labels. A text longer than the context is cut.

        unknown: error, or skip: characters outside the vocabulary are left out.

        Raises UsageError for a model that was not trained on texts with labels, and for a text that is empty.
        """
        check_choice("unknown", unknown, ("error", "skip"))
        require(
            bool(self.labels),
            f"{self.path} is not a classifier; train one on texts with labels, such as JSONL with 'text' and 'label'.",
        )
        texts = (texts,) if isinstance(texts, str) else texts
        known = [without_unknown(text, self.tokenizer, unknown, f"Text {n}") for n, text in enumerate(texts, start=1)]
        require(all(known), "A text is empty, or has no character that is in the vocabulary; leave it out.")
        return self._job.classify(self.network, self.tokenizer, self.labels, known, self.dtype)

    @property
    def _job(self) -> Job:
        """The job of the model, which has functions for models that do not continue texts."""
        return load_job(self.objective_on(self.data_kinds[0]))

    def continue_each(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int
    ) -> Continuation:
        """One sample of each of several prompts, as one batch, for decoders. `num_samples` must be `len(prompts)`."""
        return Continuation(self.engine.torch, self.tokenizer, prompts, config, first_stream)

    def fill_mask(self, prompt: Prompt) -> "FilledPrompt":
        """Fill each `<mask>` of a prompt, for encoders, and list the `top_k` candidates for each mask (default: 5).

        Raises the errors of `generate`.
        """
        encoder = self.engine.torch_network
        assert isinstance(encoder, Encoder)
        parts = prompt.text.split(MASK)
        text = MASK.join(
            drop_unknown(part, self.tokenizer, prompt.config, prompt.name, self.reporter) for part in parts
        )
        return self._job.fill_mask(encoder, self.tokenizer, text, prompt.config.top_k, prompt.name)

    def translate(self, prompt: Prompt, first_stream: int = 0) -> Iterator[Sample]:
        """Yield the target of each line of a prompt, in order, for encoder-decoders.

        With a temperature above 0, yields `num_samples` sampled targets of each line. Target i, counted over all lines,
        has the random stream (seed, first_stream + i). Raises the errors of `generate`.
        """
        network = self.engine.torch_network
        assert isinstance(network, EncoderDecoder)
        return self._job.translate(network, self.tokenizer, prompt, self.reporter, first_stream)

    @usual_settings()
    def evaluate(
        self,
        files: str | Path | Sequence[str | Path] | TextSource | None = None,
        *,
        text: str | None = None,
        ranks: Ranks = ONE_RANK,
        **settings: Any,
    ) -> Evaluation:
        """Loss, perplexity and further metrics on a text, or on the answers of conversations; for an encoder-decoder,
        on pairs.

        files: files, folders, glob patterns, or - for standard input; or a TextSource, which also sets how they are
            read. Default: the validation text of the run.
        text: the text itself, in place of files (pairs: a source, a tab and a target per line).
        ranks: from `tinylm.distributed.ranks.join_ranks`. Each rank has the model and calls this method with the same
            arguments. The ranks share the work and get the same result. Only rank 0 reads files.
        settings: fields of EvaluationConfig, such as `stride`, and of ReadingSettings, which apply to `files` by name.
            `None` stands for the default.

        The loss is computed under autocast to `dtype`, from fp32 weights if the model has them.

        Raises UsageError for a setting, a text or a file that cannot be used, TypeError for unknown settings, and
        TinyLMError for damaged data.
        """
        names = {field.name for field in fields(EvaluationConfig)}
        require_settings(settings, names | {field.name for field in fields(ReadingSettings)})
        chosen = {name: value for name, value in settings.items() if value is not None}
        config = EvaluationConfig(**{name: value for name, value in chosen.items() if name in names})
        reading = ReadingSettings(**{name: value for name, value in chosen.items() if name not in names})
        given = changed_settings(config)
        applicable(EvaluationConfig, given, self.rows)

        # Read and encode the text, on all ranks
        with evaluation_source(files, text, self.data_kinds[0], changed_settings(reading)) as source:
            tokens = self._shared_tokens(source, ranks)
        objective = self.objective_on(tokens.kind)
        applicable(EvaluationConfig, given, (JOBS[objective],))

        # Evaluate, and compare with baselines
        torch.set_num_threads(ranks.share_threads(torch.get_num_threads()))
        keep_freed_blocks()
        job = load_job(objective)
        result = job.evaluate(Scoring(self.network, self.tokenizer, tokens, config, self.dtype, self.reporter, ranks))
        if result.confusion is not None:
            return replace(result, labels=self.labels)
        if not config.baselines or job.baselines is None:
            return result
        scores = None
        if ranks.is_first:
            scores = job.baselines(self.tokenizer, tokens.codes, self._training_tokens(), self.reporter)
        return replace(result, baselines=ranks.first(scores))

    def objective_on(self, data: str) -> str:
        """The objective for a kind of data: that of training if it fits, else the default for the architecture.

        Raises UsageError if the architecture has none for this kind.
        """
        return objective_for(self.architecture, data, self.objective)

    @property
    def rows(self) -> tuple[JobRow, ...]:
        """The jobs that the model can be evaluated on."""
        rows = (row for kind in self.data_kinds for row in rows_on(kind))
        return tuple(row for row in rows if self.architecture in row.architectures)

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """The kinds of data that the model can be evaluated on, the default first."""
        return data_kinds(self.architecture, self.objective, has_labels=bool(self.labels))

    def _shared_tokens(self, source: TextSource | None, ranks: Ranks) -> EvaluationTokens:
        ranks.require_device(self.network.device.type)
        if not ranks.is_first:
            ranks.wait()
            kind, document_end = ranks.first(None)
            return EvaluationTokens(kind, ranks.broadcast({})["codes"].numpy(), document_end)
        reader = ModelReader(self.data_kinds, self.labels, self.tokenizer, self.chat_template)
        text = evaluation_tokens(source, self.path, self.data, self.tokenizer, reader, self.reporter)
        ranks.announce()
        if ranks.size > 1:
            ranks.first([text.kind, text.document_end])
            ranks.broadcast({"codes": torch.from_numpy(np.array(text.codes))})
        return text

    def _training_tokens(self) -> Tokens | None:
        if self.data is None:
            self.reporter.warn(f"{self.path} has no training text of its own, so baselines that need it are left out.")
            return None
        try:
            tokens = reopen_ids(self.path, self.data, self.tokenizer, "train")
            tokens[:1]  # checks the first token file; the baselines read no other
            return tokens
        except TinyLMError as error:
            self.reporter.warn(f"Baselines that need the training text are left out: {error}")
            return None

    def conversion_record(self, file: Path) -> Conversion:
        """The record of the file to which the engine has converted the model, with its tokenizer and chat template."""
        tokenizer = replace(self.config.tokenizer, chat_template=self.chat_template)
        config, rows = replace(self.config, tokenizer=tokenizer), self.network.vocab_size
        return Conversion(file.name, config, self.tokenizer.to_str(), rows, self.engine.is_exact, self.note)

    def convert_for_serving(self) -> Conversion:
        """The model's file for llama.cpp, written if it does not exist.

        Raises UsageError for a model that llama.cpp cannot run, and TinyLMError if the file cannot be written.
        """
        if reason := self.engine.reason_against_llama_cpp(SpeedConfig()):
            raise UsageError(f"The model cannot be served, which is done by llama.cpp on a CPU: {reason}.")
        if self.chat_template is not None:
            chat_format(self.chat_template, self.tokenizer).template.compile()
        return self.conversion_record(self.engine.convert())

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template: that of the first adapter with one, else the model's own; `None` without."""
        templates = [adapter.chat_template for adapter in self.adapters] + [super().chat_template]
        return next(filter(None, templates), None)
