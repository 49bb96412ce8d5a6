"""The sections of a report that need the model.

They are attention maps, losses of tokens, adapter updates, scores and memorisation.
"""

import base64
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinylm.adapters.adapter import ClassificationHead
from tinylm.adapters.bottleneck import Bottleneck
from tinylm.analysis.memorisation import Memorisation, measure_memorisation
from tinylm.errors import TinyLMError, UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig, MemorisationConfig
from tinylm.jobs.job import EvaluationTokens, Scoring, load_job
from tinylm.jobs.pairs.corpus import PairTokens
from tinylm.jobs.run_tokens import reopen_ids, reopen_part
from tinylm.machine.device import autocast, choose_device
from tinylm.models.model import Model
from tinylm.run_report.curves import number
from tinylm.text.corpus import document_end
from tinylm.text.token_files import Tokens
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder, Encoder, EncoderDecoder
from tinylm.transformer.attention import DotProduct, RelativeDotProduct, attention_weights
from tinylm.transformer.build import count_parameters

NUM_SAMPLES = 20  # and as many continuations of training text and of held-out text: 60 texts, one batch
# Limits above which memorisation is measured only if it is asked for.
MAX_FLOPS = 1e12  # of generation
MAX_CHARACTERS = 100_000_000  # of training text
MAX_CONFUSION = 40  # labels of a confusion table
MAX_TEXT = 300  # shown characters of a match


def describe_copied_text(model: Model, wanted: bool | None) -> dict[str, Any] | None:
    """The measured memorisation of a model as JSON values, or only `left_out`: the reason why it was not measured.

    wanted: True measures it with the default settings of MemorisationConfig, at any cost. False returns `None`. `None`
        measures it with NUM_SAMPLES if the work is within MAX_FLOPS and MAX_CHARACTERS, and returns `None` for models
        that are not decoders of plain text.

    Raises the errors of `measure_memorisation`.
    """
    if wanted is False:
        return None
    if wanted:
        return _section(measure_memorisation(model), MemorisationConfig())
    data = model.data
    if not isinstance(model.network, Decoder) or data is None or not data.is_plain_text:
        return None
    config = MemorisationConfig(num_samples=NUM_SAMPLES)
    if data.train_characters > MAX_CHARACTERS:
        return {"left_out": "the training text is long"}
    # Estimated FLOPs of generating the samples and the two kinds of continuations
    tokens = config.sample_length * data.train_tokens / max(1, data.train_characters)
    if 2 * count_parameters(model.config.model)["total"] * 3 * config.num_samples * tokens > MAX_FLOPS:
        return {"left_out": "the model is large"}
    return _section(measure_memorisation(model, config=config), config)


def _section(result: Memorisation, config: MemorisationConfig) -> dict[str, Any]:
    sources = [
        {
            "source": source.source,
            "samples": source.samples,
            "characters": source.characters,
            "copied": number(source.copied),
            "low": number(source.copied_low),
            "high": number(source.copied_high),
            "longest": source.longest,
            "matches": [{"characters": match.characters, "text": match.text[:MAX_TEXT]} for match in source.matches],
        }
        for source in result.sources
    ]
    lengths = {name: getattr(config, name) for name in ("min_match", "sample_length", "prefix_length")}
    return {**lengths, "sources": sources}


def score_validation(model: Model, run: Path) -> dict[str, Any] | None:
    """The scores of a model on the beginning of its validation text: see `Job.excerpt`.

    `metrics`: values by name, as in Evaluation. `compared`: the name of the metric that the baselines have as well.
    `baselines`: the value of this metric by baseline. Returns `None` for a model without validation text.

    Raises TinyLMError if the text cannot be read, and UsageError if nothing is scored.
    """
    if model.data is None:
        return None
    job, tokenizer, reporter = load_job(model.objective_on(model.data.kind)), model.tokenizer, model.reporter
    parameters = count_parameters(model.config.model)["total"]
    tokens = job.excerpt(tokenizer, reopen_part(run, model.data, tokenizer, "val"), parameters)
    text = EvaluationTokens(model.data.kind, tokens, document_end=document_end(model.data.format))
    result = job.evaluate(Scoring(model.network, tokenizer, text, EvaluationConfig(), model.dtype, reporter))
    result = replace(result, labels=model.labels or None)
    training: Tokens | None = None  # if they cannot be read, since some baselines do not need them
    with contextlib.suppress(TinyLMError):
        opened = reopen_part(run, model.data, tokenizer, "train")
        opened[:1]  # checks the first token file; the baselines read no other
        training = opened
    baselines = {} if job.baselines is None else job.baselines(tokenizer, tokens, training, reporter)
    confusion: dict[str, Any] = {}
    if result.labels is not None and len(result.labels) > MAX_CONFUSION:
        confusion = {"mistakes": result.mistakes()}
    elif result.labels is not None:
        confusion = {"labels": result.labels, "confusion": result.confusion}
    return {
        "metrics": {k: number(value, 6) for k, value in result.to_json().items() if isinstance(value, int | float)},
        "baselines": {name: number(value) for name, value in baselines.items()},
        "compared": job.compared,
        **confusion,
    }


@contextlib.contextmanager
def recorded_attention(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context manager that yields a dict. Each forward pass stores the attention weights of its first sequence there.

    Keys are names of attention modules, such as `layers.0.attention`; values are (H, T, S), in fp32.
    """
    weights: dict[str, Tensor] = {}

    def storing(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def store(core: DotProduct | RelativeDotProduct, inputs: tuple[Any, ...]) -> None:
            q, k, _, mask, causal = inputs
            weights[name] = attention_weights(core.scores(q, k), mask, causal)[0].detach().float().cpu()

        return store

    with contextlib.ExitStack() as stack:
        for name, module in network.named_modules():
            if isinstance(module, DotProduct | RelativeDotProduct):
                handle = module.register_forward_pre_hook(storing(name.removesuffix(".core")))
                stack.callback(handle.remove)
        yield weights


PASSAGE_TOKENS = 256
MAP_TOKENS = 40  # maximum rows and columns of an attention map
ALTERNATIVES = 5
MASK_EVERY = 7  # one token in MASK_EVERY is masked in the passage of an encoder
MAX_TOKEN_TEXT = 40  # characters
MAX_UPDATES = 500  # adapter layers


class ScoredPassage(NamedTuple):
    """Inputs of a model, and the tokens that it predicts.

    inputs: ids for the network, (1, T) each. targets: (T,), the token that each position predicts, or -1 for none.
    Inputs of a decoder or an encoder may be longer than the context; they are then split into windows.
    shown: all ids of the passage. first: index in `shown` of the token that position 0 predicts.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    shown: list[int]
    first: int


@dataclass(frozen=True)
class ModelOptions:
    """Options of the sections that need the model.

    prompt: text of the attention maps. Default: the beginning of the validation text.
    memorisation: as `wanted` of `describe_copied_text`.
    device: as in `load`. Raises UsageError for an unknown or unavailable one.
    """

    prompt: str | None = None
    memorisation: bool | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        choose_device(self.device)


def describe_model(model: Model, run: Path, options: ModelOptions, map_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """The sections of the report that need the model, and sentences about sections that cannot be made.

    map_bytes: approximate limit on the bytes of the attention maps, before base64.
    """
    sections: dict[str, Any] = {}
    problems: list[str] = []
    validation: Tokens | None = None

    def add(name: str, section: Callable[..., Any], *arguments: Any) -> None:
        try:
            if (value := section(model, *arguments)) is not None:
                sections[name] = value
        except (TinyLMError, OSError) as error:
            problems.append(f"No {name}: {error}")

    try:
        validation = None if model.data is None else reopen_ids(run, model.data, model.tokenizer, "val")
    except TinyLMError as error:
        problems.append(f"No passage, no evaluation and no memorisation: {error}")
    with torch.no_grad(), autocast(model.network.device.type, model.dtype):
        text = None if model.labels else validation
        if text is not None:
            add("passage", _scored_passage, text)
        if (shown := text if options.prompt is None else options.prompt) is not None:
            add("attention", _attention, shown, map_bytes)
    with torch.no_grad():  # in fp32
        add("updates", _updates)
    if validation is not None:
        add("evaluation", score_validation, run)
        add("memorisation", describe_copied_text, options.memorisation)
    elif options.memorisation and model.data is None:
        problems.append("No memorisation: the model has no training text of its own.")
    return sections, problems


def _passage(model: Model, ids: Tokens, limit: int) -> ScoredPassage:
    """The beginning of a text, or for an encoder-decoder its first pair that fits, with at most `limit` tokens.

    Raises UsageError if no pair fits.
    """
    device = model.network.device
    if isinstance(model.network, EncoderDecoder):
        length = min(limit, model.context)
        pairs = PairTokens(np.asarray(ids), model.tokenizer.end_of_text_id)
        fitting = pairs.fitting(length)
        if not len(fitting):
            raise UsageError(f"no validation pair has at most {length} tokens.")
        batch = pairs.batch(fitting[:1])
        assert batch.source is not None
        targets = batch.targets[0]
        return ScoredPassage((batch.ids.to(device), batch.source.to(device)), targets, targets.tolist(), 0)
    tokens = torch.from_numpy(ids[:limit].astype(np.int64)).to(device)
    if isinstance(model.network, Encoder):
        masked = torch.arange(len(tokens), device=device) % MASK_EVERY == MASK_EVERY // 2
        inputs = tokens.masked_fill(masked, model.tokenizer.mask_id)
        return ScoredPassage((inputs[None],), tokens.masked_fill(~masked, -1), tokens.tolist(), 0)
    return ScoredPassage((tokens[None, :-1],), tokens[1:], tokens.tolist(), 1)


def _scored_passage(model: Model, text: Tokens) -> dict[str, Any] | None:
    """The `tokens` of the beginning of a text, its `kind`, and the text of its `source`; `None` without inputs.

    Each token has its `text`. Predicted tokens also have `loss`, in nats, and `likeliest`: the texts of the most
    probable tokens with their probabilities.
    """
    passage = _passage(model, text, PASSAGE_TOKENS)
    if not passage.inputs[0].shape[1]:
        return None
    windows = zip(*(ids.split(model.context, dim=1) for ids in passage.inputs), strict=True)
    hidden = torch.cat([model.network(*window).hidden[0] for window in windows])  # (T, D)
    log_p = F.log_softmax(model.network.logits(hidden).float(), dim=-1)  # (T, V)
    best = log_p.topk(min(ALTERNATIVES, log_p.shape[-1]))  # (T, K)
    tokens: list[dict[str, Any]] = [{"text": text} for text in token_texts(model.tokenizer, passage.shown)]
    for position, target in enumerate(passage.targets.tolist()):
        if target >= 0:
            texts = token_texts(model.tokenizer, best.indices[position].tolist())
            likeliest = zip(texts, (number(math.exp(p), 3) for p in best.values[position].tolist()), strict=True)
            tokens[position + passage.first] |= {
                "loss": number(-log_p[position, target].item(), 4),
                "likeliest": list(likeliest),
            }
    kind = {Decoder: "next", Encoder: "masked", EncoderDecoder: "target"}[type(model.network)]
    source = passage.inputs[1][0].tolist() if kind == "target" else []
    return {"kind": kind, "tokens": tokens, "source": model.decode(source)}


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself, at most MAX_TOKEN_TEXT characters; "" for ids beyond the vocabulary."""
    return [
        tokenizer.decode([token], skip_special_tokens=False)[:MAX_TOKEN_TEXT] if token < tokenizer.vocab_size else ""
        for token in ids
    ]


def _attention(model: Model, shown: str | Tokens, map_bytes: int) -> list[dict[str, Any]]:
    """Attention maps by kind. Each has the texts of `rows` and `columns`, and `layers`, each with the number of `heads`
    and the `weights` (H, T, S): multiplied by 255, rounded to one byte each, in base64.

    shown: a prompt, or a text whose beginning is shown. Raises UsageError for a prompt without tokens.
    """
    config = model.config.model
    is_pair = config.architecture == "encoder-decoder"
    heads = config.heads * (2 * config.layers + (config.encoder_layers or 0) if is_pair else config.layers)
    length = min(MAP_TOKENS, model.context, max(4, math.isqrt(map_bytes // heads)))
    inputs = _prompt_inputs(model, shown, length) if isinstance(shown, str) else _passage(model, shown, length).inputs
    if not inputs[0].shape[1]:
        raise UsageError("the prompt has no tokens.")
    with recorded_attention(model.network) as weights:
        model.network(*inputs)
    texts = [token_texts(model.tokenizer, ids[0].tolist()) for ids in inputs]
    maps: dict[str, dict[str, Any]] = {}
    for name, layer in weights.items():
        if "cross_attention" in name:
            kind, rows, columns = "cross-attention", texts[0], texts[1]
        elif name.startswith("encoder."):
            kind, rows, columns = "self-attention of the encoder", texts[1], texts[1]
        else:
            kind, rows, columns = "self-attention", texts[0], texts[0]
        packed = (layer.clamp(0, 1) * 255).round().to(torch.uint8).contiguous().numpy().tobytes()
        part = maps.setdefault(kind, {"kind": kind, "rows": rows, "columns": columns, "layers": []})
        part["layers"].append({"heads": len(layer), "weights": base64.b64encode(packed).decode("ascii")})
    return list(maps.values())


def _prompt_inputs(model: Model, prompt: str, length: int) -> tuple[Tensor, ...]:
    """Ids of the prompt for the network; for an encoder-decoder, the prompt is the source of a translation."""

    def rows(ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=model.network.device).long()

    ids = model.encode(prompt)[:length]
    if not isinstance(model.network, EncoderDecoder):
        return (rows(ids),)
    end = model.tokenizer.end_of_text_id
    target = model.encode(str(model.generate(prompt, max_tokens=length)))
    return rows([end, *target][:length]), rows([*ids[: length - 1], end])


def _updates(model: Model) -> list[dict[str, Any]] | None:
    """The Frobenius norm of the update of each layer of the first adapter, and its ratio to that of the base weight.

    The update of a LoRA layer is s B A. That of a bottleneck is the product of its matrices, U D, without a ratio.
    At most MAX_UPDATES layers, without a new output layer; `None` without an adapter.
    """
    updates = []
    for adapter in model.adapters[:1]:
        layers = {name: layer for name, layer in adapter.layers.items() if not isinstance(layer, ClassificationHead)}
        for name, layer in list(layers.items())[:MAX_UPDATES]:
            if isinstance(layer, Bottleneck):
                update, base = layer.up.weight.float() @ layer.down.weight.float(), 0.0
            else:
                update = layer.delta_weight().float()  # type: ignore[operator]  # a LoRA layer has this method
                weight: Tensor = layer.base.weight  # type: ignore[assignment]  # mypy: Tensor | Module
                base = torch.linalg.matrix_norm(weight.float()).item()
            norm = torch.linalg.matrix_norm(update).item()
            updates.append({"layer": name, "norm": number(norm), "relative": number(norm / base) if base else None})
    return updates or None
