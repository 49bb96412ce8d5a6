"""A trained model in memory: what `load` returns, to generate, evaluate or compute logits with."""

import copy
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tinylm.adapters.lora import merge_lora
from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.validation import check_choice, describe_value, require
from tinylm.errors import UsageError, first_line
from tinylm.formats.foreign import is_gguf
from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.generation_config import (
    GenerationConfig,
    SpeedConfig,
    is_sampled,
    settings_without_effect,
)
from tinylm.generation.graph_engine import GraphEngine, suits_graph
from tinylm.generation.llama_cpp import Conversion, LlamaCpp
from tinylm.generation.llama_cpp_file import (
    GGUF_TYPES,
    EngineWeights,
    convert,
    is_exact,
    open_llama_cpp,
    reason_against,
)
from tinylm.generation.prompts import EncodedPrompt, Prompt, drop_unknown
from tinylm.generation.text_generator import Continuation, Sample
from tinylm.generation.torch_engine import Engine, TorchEngine
from tinylm.jobs.job import Job, load_job
from tinylm.kernels.cuda_graphs import Step, can_capture, capture
from tinylm.machine.device import DTYPES, autocast
from tinylm.models.adapter import LoadedAdapter, set_adapter_scale
from tinylm.models.evaluation import EvaluatedModel
from tinylm.reporter import LogReporter, Reporter, counted
from tinylm.text.answer_spans import chat_format
from tinylm.text.split import without_unknown
from tinylm.text.tokenizer import MASK, Tokenizer
from tinylm.transformer.architectures import Decoder, Encoder, EncoderDecoder, Transformer
from tinylm.transformer.build import count_parameters

if TYPE_CHECKING:
    from tinylm.jobs.labels.classify import Classified
    from tinylm.jobs.masked.fill_mask import FilledPrompt

Ids = Sequence[Sequence[int]] | Tensor


@dataclass(eq=False, repr=False)
class Model(EvaluatedModel):
    """A trained model with its tokenizer and adapters. Made by `load`.

    path: run directory, Hugging Face folder or GGUF file of the model; with adapters, path of the first adapter.
    network: the torch module, in evaluation mode; its weights are fp32, or `dtype` if they were stored in it.
    dtype: number format of losses, logits and labels. generation_dtype: that of generation.
    quantize: "int8" quantizes the weights for generation.
    data, objective: description of the training text, and the objective, of the selected adapter (initially the first)
        or, without an adapter, of the model; `None` if not recorded.
    note: the note of `load` about device and number format.
    """

    path: Path
    network: Transformer
    config: RunConfig
    tokenizer: Tokenizer
    dtype: str = "fp32"
    generation_dtype: str = "fp32"
    quantize: str = "none"
    adapters: tuple[LoadedAdapter, ...] = ()
    reporter: Reporter = field(default_factory=LogReporter)
    note: str = ""
    data: DataConfig | None = field(init=False)
    objective: str | None = field(init=False)

    def __post_init__(self) -> None:
        self._describe_training(self.adapters[0] if self.adapters else self.config)
        self._prepared: Model | None = None  # a copy for generation by torch
        self._is_prepared = False  # for generation by torch, in place
        self._switches_adapters = False
        self._graph_engine: GraphEngine | None = None
        self._can_capture = True  # until a capture fails, which takes memory that is not freed
        self._llama_cpp: dict[tuple[Any, ...], LlamaCpp | None] = {}  # by engine, cache and adapter scales

    def __repr__(self) -> str:
        model, quantized = self.config.model, "" if self.quantize == "none" else f", {self.quantize} weights"
        parameters = count_parameters(model)["total"]
        lines = [
            f"Model({str(self.path)!r}: {model.architecture}, {parameters:,} parameters, "
            f"{counted(model.layers, 'layer')} x width {model.width}, context {model.context}",
            f"{self.tokenizer.kind} tokenizer, {self.tokenizer.vocab_size:,} ids; {self.network.device.type} in "
            f"{self.dtype}{quantized}",
            *(f"adapter {str(adapter.path)!r}, scale {adapter.scale:g}" for adapter in self.adapters),
        ]
        return ";\n      ".join(lines) + ")"

    def encode(self, text: str) -> list[int]:
        """The token ids of a text. Raises UsageError for characters that are not in the vocabulary."""
        return [int(i) for i in self.tokenizer.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids)

    def select_adapter(self, index: int | None) -> None:
        """Apply only the adapter with this index in `adapters`, from 0, or none (`None`)."""
        prepared = () if self._prepared is None else self._prepared.adapters
        for adapters in (self.adapters, prepared):
            for number, adapter in enumerate(adapters):
                set_adapter_scale(adapter.layers, adapter.scale if number == index else 0.0)
        self._graph_engine = None
        self._describe_training(self.config if index is None else self.adapters[index])

    def _describe_training(self, trained: RunConfig | LoadedAdapter) -> None:
        self.data, self.objective = trained.data, trained.objective

    def logits(self, ids: Ids, source: Ids | None = None) -> Tensor:
        """The logits for token ids: (B, T) -> (B, T, V), in fp32.

        At each position, a decoder predicts the next token, and an encoder the token itself. For the labels of a
        classifier, see `classify`.

        source: (B, S) ids of the source texts, for an encoder-decoder, whose `ids` are those of the targets; other
            models ignore it.

        Raises UsageError for ids that are not two-dimensional or not in the vocabulary, for rows longer than the
        context, and if an encoder-decoder has no `source`.
        """
        inputs = [self._validated_ids(ids)]
        if isinstance(self.network, EncoderDecoder):
            require(source is not None, "An encoder-decoder needs the ids of a source as well.")
            inputs.append(self._validated_ids(source))
        with torch.no_grad(), autocast(self.network.device.type, self.dtype):
            return self.network.logits(self.network(*inputs).hidden).float()

    def _validated_ids(self, ids: Any) -> Tensor:
        tensor = torch.as_tensor(ids, device=self.network.device).long()
        require(tensor.ndim == 2, f"The ids have {tensor.ndim} dimensions; give rows of ids, (B, T).")
        require(tensor.shape[1] <= self.context, f"The ids have rows longer than the context, {self.context}.")
        in_range = ((tensor >= 0) & (tensor < self.network.vocab_size)).all()
        require(bool(in_range), f"Ids must be from 0 to {self.network.vocab_size - 1}.")
        return tensor

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
        num_samples: int = 1,
        json_schema: Mapping[str, Any] | None = None,
        beams: int = 5,
        length_penalty: float = 1.0,
        unknown: str = "error",
        strict: bool = False,
        cache: bool = True,
        engine: str = "auto",
        stream: bool = False,
    ) -> str | list[str] | Iterator[str]:
        """Generate text. A decoder continues the prompt; an encoder fills each `<mask>` in the prompt; an
        encoder-decoder translates each line of the prompt.

        Returns the text without the prompt (an encoder: the filled prompt); a list of texts for `num_samples` above 1;
        with `stream`, an iterator over the chunks of a single text.

        seed: the same seed gives the same text. Default: a random seed. The other settings: see GenerationConfig.

        Raises UsageError for a setting out of range or without effect, and for a prompt that cannot be used, and
        TinyLMError for JSON that is not complete (with `stream`, during the iteration).
        """
        config = GenerationConfig(
            max_tokens=max_tokens,
            num_samples=num_samples,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            json_schema=json_schema,
            seed=secrets.randbits(32) if seed is None else seed,
            beams=beams,
            length_penalty=length_penalty,
            unknown=unknown,
            strict=strict,
            cache=cache,
            engine=engine,
        )
        self._reject_settings_without_effect(config)
        if not isinstance(prompt, str):
            raise TypeError(f"the prompt is {describe_value(prompt)}; it must be a text (of several, call it for each)")
        require(not stream or num_samples == 1, "`stream` is for a single sample; leave out `num_samples`.")
        chunks = self._text_chunks(Prompt(prompt, config))
        if stream:
            return (text for _, text in chunks)
        texts = [""] * num_samples
        for sample, text in chunks:
            texts[sample] += text
        return texts if num_samples > 1 else texts[0]

    def _reject_settings_without_effect(self, config: GenerationConfig) -> None:
        given = [setting.name for setting in fields(config) if getattr(config, setting.name) != setting.default]
        for names, reason in settings_without_effect(self.architecture, is_sampled(config)):
            found = [f"`{name}`" for name in names if name in given]
            require(not found, f"{reason}: leave out {', '.join(found)}.")

    def _text_chunks(self, prompt: Prompt) -> Iterator[tuple[int, str]]:
        """The text of all samples in chunks, each with the index of its sample."""
        match self.network:
            case Decoder():
                yield from self.continue_prompt(prompt)
            case Encoder():
                yield 0, self.fill_mask(prompt).text
            case _:
                for number, sample in enumerate(self.translate(prompt)):
                    line, row = divmod(number, prompt.config.num_samples)
                    yield row, f"\n{sample.text}" if line else sample.text

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

    def close(self) -> None:
        """See `TextGenerator.close`."""
        for engine in filter(None, self._llama_cpp.values()):
            engine.close()

    def continue_encoded(self, encoded: EncodedPrompt, config: GenerationConfig, first_stream: int = 0) -> Continuation:
        """See `TextGenerator.continue_encoded`."""
        speed = config.speed
        engine = self._open_llama_cpp(speed) or self._torch_engine(config)
        return Continuation(engine, self.tokenizer, [encoded], config, first_stream)

    def _require_generator(self) -> None:
        require(not self.labels, f"{self.path} is a classifier, which generates no text; it finds labels of texts.")

    def _torch_engine(self, config: GenerationConfig) -> Engine:
        decoder = self._prepare().network
        assert isinstance(decoder, Decoder)
        if self._can_capture and can_capture(decoder.device) and suits_graph(self.config.model, config):
            self._graph_engine = self._graph_engine or GraphEngine(decoder, self.tokenizer, self._capture)
            return self._graph_engine
        return TorchEngine(decoder, self.tokenizer, config.cache)

    def _capture(self, step: Step) -> Step:
        """The step as a CUDA graph. If it cannot be captured, the step, and later text is generated without graphs."""
        try:
            return capture(step)
        except RuntimeError as error:  # of CUDA, or because memory runs out
            self.reporter.note(f"Capturing a CUDA graph failed ({first_line(error)}); continuing without it.")
            self._can_capture, self._graph_engine = False, None
            return step

    def continue_each(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int
    ) -> Continuation:
        """One sample of each of several prompts, as one batch, for decoders. `num_samples` must be `len(prompts)`."""
        return Continuation(self._torch_engine(config), self.tokenizer, prompts, config, first_stream)

    def fill_mask(self, prompt: Prompt) -> "FilledPrompt":
        """Fill each `<mask>` of a prompt, for encoders, and list the `top_k` candidates for each mask (default: 5).

        Raises the errors of `generate`.
        """
        encoder = self._prepare().network
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
        network = self._prepare().network
        assert isinstance(network, EncoderDecoder)
        return self._job.translate(network, self.tokenizer, prompt, self.reporter, first_stream)

    def prepare_generation(
        self,
        speed: SpeedConfig | None = None,
        *,
        switches_adapters: bool = False,
    ) -> LlamaCpp | None:
        """Open the model in llama.cpp, or convert, fuse and quantize the network in place, with a LoRA merged into it.

        In the second case all later generation uses this network. That saves the memory of the copy that `generate`
        makes, but `evaluate` and `logits` then use the prepared weights.

        switches_adapters: whether adapters will be selected between prompts; this requires torch.

        Returns the model in llama.cpp, or `None` if torch is used. Raises UsageError if llama.cpp is required and
        cannot run the model with these settings, and TinyLMError if it is required and fails.
        """
        self._switches_adapters = switches_adapters
        engine = self._open_llama_cpp(speed or SpeedConfig())
        if engine is None:
            self._prepare(in_place=True)
        return engine

    def _prepare(self, in_place: bool = False) -> "Model":
        """The model with its network converted, fused and quantized for generation by torch, made at first use."""
        self._require_generator()
        if self._prepared is not None or self._is_prepared:
            return self._prepared or self
        prepared = self
        if not in_place:
            # Fusing replaces tensors, so the copy can share those of the original; only a conversion of the number
            # format changes them in place.
            converts = any(parameter.dtype != DTYPES[self.generation_dtype] for parameter in self.network.parameters())
            tensors = () if converts else (*self.network.parameters(), *self.network.buffers())
            shared = {id(tensor): tensor for tensor in tensors}
            network, adapters = copy.deepcopy((self.network, self.adapters), shared)
            prepared = replace(self, network=network, adapters=adapters)
        if in_place and len(self.adapters) == 1 and not self._switches_adapters:
            # whose layers are then fused as well
            merge_lora(prepared.network, dtype=DTYPES[self.generation_dtype])
        prepared.network.to(DTYPES[self.generation_dtype])
        fuse_model(prepared.network, int8=self.quantize == "int8")
        self._prepared, self._is_prepared = (None, True) if in_place else (prepared, False)
        return prepared

    def _engine_weights(self) -> EngineWeights:
        is_plain = self.quantize == "none" and not self.adapters
        return EngineWeights(
            self.network,
            self.config,
            self.tokenizer,
            kind=GGUF_TYPES[self.generation_dtype] if self.quantize == "none" else "q8_0",
            quantized=self.path if is_plain and is_gguf(self.path) else None,
            switches_adapters=self._switches_adapters,
        )

    def convert_for_serving(self) -> Conversion:
        """The model's file for llama.cpp, written if it does not exist, with the tokenizer and the chat template.

        Raises UsageError for a model that llama.cpp cannot run, and TinyLMError if the file cannot be written.
        """
        self._require_generator()
        weights = self._engine_weights()
        if reason := reason_against(weights, SpeedConfig()):
            raise UsageError(f"llama.cpp cannot serve this model: {reason}.")
        if self.chat_template is not None:
            chat_format(self.chat_template, self.tokenizer).template.compile()
        file = convert(weights, self.reporter)
        tokenizer = replace(self.config.tokenizer, chat_template=self.chat_template)
        config = replace(self.config, tokenizer=tokenizer)
        return Conversion(
            file.name, config, self.tokenizer.to_str(), self.network.vocab_size, is_exact(weights), self.note
        )

    def _open_llama_cpp(self, speed: SpeedConfig) -> LlamaCpp | None:
        """The model in llama.cpp, opened at first use, or `None` if torch is to be used."""
        if self._is_prepared:
            require(
                speed.engine != "llama.cpp",
                '`engine="llama.cpp"` is not possible: the model was prepared for torch; load it again.',
            )
            return None  # fused layers cannot be exported
        self._require_generator()
        scales = tuple(layer.adapter_scale for adapter in self.adapters for layer in adapter.layers.values())
        key = speed.engine, speed.cache, scales
        if key not in self._llama_cpp:
            self._llama_cpp[key] = open_llama_cpp(self._engine_weights(), speed, self.reporter)
        return self._llama_cpp[key]

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template: that of the first adapter with one, else the model's own; `None` without."""
        templates = [adapter.chat_template for adapter in self.adapters] + [super().chat_template]
        return next(filter(None, templates), None)
