"""The mapping between the config and the tensors of a Hugging Face model family and those of tinylm.

`convert_tensors` and `ExportedTensors` apply a family's rules in the two directions. Foreign names are those of the
tensors in files of the family's causal language models. Except for UsageError from ModelConfig, all errors are
ValueErrors with a reason that completes the sentence "Cannot import PATH: " or "Cannot read PATH as GGUF: ".
"""

import collections
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from tinylm.config.model import MAX_LABELS, ModelConfig
from tinylm.config.run import SpecialTokens
from tinylm.config.validation import describe_value
from tinylm.formats.foreign_config import ForeignConfig
from tinylm.run_directory.tensor_file import DTYPES
from tinylm.transformer.build import build_empty_model

PARAMETERS = ("weight", "bias")
DEFAULT_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}  # of transformers, which does not write them


class LazyTensor(Protocol):
    """A tensor in a file, which `load` reads or dequantizes. dtype: `None` if that in the file is not supported."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype | None: ...
    def load(self) -> Tensor: ...


Source = Mapping[str, Tensor | LazyTensor]


class Rule:
    """The correspondence of a foreign module to one tinylm module or, if its weight is fused, to several.

    foreign, ours: names of the modules, which may contain {layer} and {expert}. A fused weight is the concatenation of
    the rows of `ours`, which have equal shapes.
    transposed: the weight is stored as (in, out), as in GPT-2's Conv1D.
    interleaved: a fused weight has the query, key and value rows of the first head, then those of the second, and so on
        (GPT-NeoX).
    """

    def __init__(self, foreign: str, *ours: str, transposed: bool = False, interleaved: bool = False) -> None:
        self.foreign = foreign
        self.ours = ours
        self.transposed = transposed
        self.interleaved = interleaved

    def split(self, tensor: Tensor, heads: int) -> list[Tensor]:
        """Split a foreign parameter into the parameters of `ours`: views, or copies if the rows are interleaved."""
        return self.split_outputs(tensor.T if self.transposed and tensor.dim() == 2 else tensor, heads)

    def split_outputs(self, tensor: Tensor, heads: int) -> list[Tensor]:
        """Split a tensor (out, ...), with one row per output of the foreign module, into the rows of each of `ours`."""
        if self.interleaved:
            parts = tensor.unflatten(0, (heads, len(self.ours), -1))  # (H, parts, W) or (H, parts, W, D)
            return [parts[:, i].flatten(0, 1) for i in range(len(self.ours))]
        return list(tensor.chunk(len(self.ours)))

    def join(self, tensors: Sequence[Tensor], heads: int) -> Tensor:
        """Join parameters of `ours` into the foreign parameter: the inverse of `split`."""
        tensor = self.join_outputs(tensors, heads)
        return tensor.T if self.transposed and tensor.dim() == 2 else tensor

    def join_outputs(self, tensors: Sequence[Tensor], heads: int) -> Tensor:
        """Join tensors into one (out, ...), one row per output of the foreign module: inverse of `split_outputs`."""
        if self.interleaved:
            parts = [part.unflatten(0, (heads, -1)) for part in tensors]  # each (H, W) or (H, W, D)
            return torch.stack(parts, dim=1).flatten(0, 2)  # (H, parts, W) or (H, parts, W, D) -> (out) or (out, D)
        return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


# The modules of a mixture of experts in transformers 5, which stacks the experts of a layer in memory; files store them
# separately.
STACKED_ROUTER, STACKED_EXPERTS = "model.layers.{layer}.mlp.gate", "model.layers.{layer}.mlp.experts"
# The parameters of STACKED_EXPERTS in definition order, each (E, out, in), with the projections that it fuses.
STACKED_PARAMETERS = (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family.

    name: `model_type` of its config.json; architecture: its class for causal language models in transformers.
        classifier: its class for the labels of texts; by default, named like `architecture`.
    read_config: converts a config.json to fields of ModelConfig. write_config: converts a ModelConfig with all defaults
        filled in (see `families.resolve`) to fields of a config.json; settings that the family cannot represent
        are lost (see `families.choose_family`).
    prefix: of the names of the base model's tensors; absent in files saved from the base class.
    without_effect: fields of its config that do not change the logits.
    unused_tensors: regular expressions of the names of stored buffers that are computed from the config.
    stacked: whether adapters that were trained with transformers 5 name STACKED_ROUTER and STACKED_EXPERTS.
    renamed: names of modules in files, with their names in recent versions of transformers where those differ.
    """

    name: str
    architecture: str
    read_config: Callable[[ForeignConfig], dict[str, Any]]
    write_config: Callable[[ModelConfig], dict[str, Any]]
    rules: tuple[Rule, ...]
    prefix: str = "model."
    without_effect: frozenset[str] = frozenset()
    unused_tensors: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    stacked: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    classifier: str = ""

    def fields(self, config: ModelConfig) -> dict[str, Any]:
        """The content of a config.json, without token ids. config: with all defaults filled in."""
        labels: dict[str, Any] = {}
        if config.labels:
            labels["id2label"] = {str(number): label for number, label in enumerate(config.labels)}
            labels["label2id"] = {label: number for number, label in enumerate(config.labels)}
        architecture = self._classifier if config.labels else self.architecture
        return {"architectures": [architecture], "model_type": self.name, **self.write_config(config), **labels}

    def config(self, values: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
        """The ModelConfig of a config.json. file: its name in messages.

        Raises ValueError for a field that is missing, invalid or not supported, and UsageError for values that
        ModelConfig rejects.
        """
        foreign = ForeignConfig(values, file)
        named = foreign.value("architectures")
        base = re.sub("(For[A-Z].*|LMHeadModel)$", "Model", self.architecture)
        is_classifier = named == [self._classifier]
        if named is not None and not is_classifier and named not in ([self.architecture], [base]):
            raise ValueError(f"its architectures are {str(named)[:100]}; tinylm reads {self.architecture}")
        fields = self.read_config(foreign)
        if is_classifier:
            fields |= {"labels": read_labels(foreign), "tie": False}
        foreign.check_all_read(self.without_effect)
        return ModelConfig(**fields)

    @property
    def _classifier(self) -> str:
        return self.classifier or re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", self.architecture)

    def modules(self, config: ModelConfig) -> Iterator[tuple[Rule, str, tuple[str, ...]]]:
        """Yield, for every layer and expert, each rule with the name of the foreign module and those of tinylm."""
        for rule in self.rules:
            for layer in range(config.layers if "{layer}" in rule.foreign else 1):
                for expert in range(config.experts if "{expert}" in rule.foreign else 1):
                    foreign = "score" if config.labels and rule.ours == ("output",) else rule.foreign
                    names = [name.format(layer=layer, expert=expert) for name in (foreign, *rule.ours)]
                    yield rule, names[0], tuple(names[1:])

    def parameters(self, config: ModelConfig) -> "list[Parameter]":
        """The foreign parameters of a model of this configuration.

        Raises ValueError if the family has no tensor for one of the model's parameters.
        """
        expected = build_empty_model(config).state_dict()
        found = [
            Parameter(
                rule, f"{foreign}.{kind}", names, tuple(rule.join([expected[n] for n in names], config.heads).shape)
            )
            for rule, foreign, ours in self.modules(config)
            for kind in PARAMETERS
            if (names := tuple(f"{name}.{kind}" for name in ours)) and all(name in expected for name in names)
        ]
        covered = {name for parameter in found for name in parameter.ours}
        if missing := expected.keys() - covered:
            raise ValueError(f"{self.architecture} has no tensor for {min(missing)}")
        return found


def read_labels(config: ForeignConfig) -> tuple[str, ...]:
    """The labels of a classifier. Raises ValueError unless `id2label` names each number from 0 on, and for a model of
    several labels per text.
    """
    config.require("problem_type", None, "single_label_classification")
    found = config.value("id2label") if config.has("id2label") else DEFAULT_LABELS
    if not isinstance(found, dict) or not 2 <= len(found) <= MAX_LABELS:
        raise ValueError(f"its id2label is {describe_value(found)}; it must be an object with 2 to {MAX_LABELS} labels")
    labels = [found.get(str(number)) for number in range(len(found))]
    if not all(isinstance(label, str) for label in labels):
        raise ValueError("its id2label does not name a label for each number from 0 on")
    return tuple(map(str, labels))


@dataclass(frozen=True)
class Parameter:
    """A foreign parameter: its name and shape, the names of the tinylm parameters in it, and the rule to split it."""

    rule: Rule
    foreign: str
    ours: tuple[str, ...]
    shape: tuple[int, ...]


class _LazyMapping(Mapping[str, Tensor]):
    """Tensors by name, each made from the entry of its name in `_sources` whenever it is looked up."""

    _sources: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:  # Mapping's own would make the tensor
        return name in self._sources

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class ConvertedTensors(_LazyMapping):
    """Tensors under tinylm's names, each converted from its source whenever it is looked up."""

    def __init__(self, parameters: Sequence[tuple[Parameter, Tensor | LazyTensor]], heads: int) -> None:
        self._sources: dict[str, tuple[Rule, int, Tensor | LazyTensor]] = {
            name: (parameter.rule, index, source)
            for parameter, source in parameters
            for index, name in enumerate(parameter.ours)
        }
        self._heads = heads

    def __getitem__(self, name: str) -> Tensor:
        rule, index, source = self._sources[name]
        return rule.split(_load(source), self._heads)[index]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without loading it."""
        dtype = self._sources[name][2].dtype
        assert dtype is not None
        return dtype


def _load(source: Tensor | LazyTensor) -> Tensor:
    return source if isinstance(source, Tensor) else source.load()


def convert_tensors(family: Family, config: ModelConfig, tensors: Source) -> ConvertedTensors:
    """The tensors of a model of this family under tinylm's names, in their own dtypes, converted on demand.

    Raises ValueError for a tensor that is missing, unknown, of another shape than `config` requires, or of a dtype that
    is not in DTYPES, and for a stored output layer that differs from the embedding to which `config` ties it.
    """
    if config.layers * config.experts > len(tensors):  # checked before a model of this size is built
        of_experts = f" of {config.experts:,} experts" if config.experts > 1 else ""
        raise ValueError(f"it claims {config.layers:,} layers{of_experts} and has {len(tensors):,} tensors")
    lacks_prefix = not any(name.startswith(family.prefix) for name in tensors)  # saved from the base model
    unprefixed = tuple(f"{rule.foreign}." for rule in family.rules if not rule.foreign.startswith(family.prefix))
    names = {
        name: family.prefix + name if lacks_prefix and not name.startswith(unprefixed) else name for name in tensors
    }
    sources = {names[name]: tensor for name, tensor in tensors.items()}
    parameters = family.parameters(config)
    for parameter in parameters:
        _check(parameter, sources.get(parameter.foreign))
    known = {parameter.foreign for parameter in parameters}
    unused = [re.compile(pattern) for pattern in family.unused_tensors]
    unknown = sorted(n for n in sources.keys() - known if not any(pattern.fullmatch(n) for pattern in unused))
    if config.tie:
        unknown = _without_tied_output(family, sources, unknown)
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ValueError(f"it has a tensor that {family.architecture} does not have: {unknown[0][:200]}{more}")
    return ConvertedTensors([(p, sources[p.foreign]) for p in parameters], config.heads)


def _check(parameter: Parameter, source: Tensor | LazyTensor | None) -> None:
    if source is None:
        raise ValueError(f"it lacks the tensor {parameter.foreign}")
    if tuple(source.shape) != parameter.shape:
        raise ValueError(
            f"its tensor {parameter.foreign} has the shape {list(source.shape)}; its configuration requires "
            f"{list(parameter.shape)}"
        )
    if source.dtype not in DTYPES.values():
        raise ValueError(f"its tensor {parameter.foreign} is not of the type float32, float16 or bfloat16")


def _without_tied_output(family: Family, sources: Source, unknown: list[str]) -> list[str]:
    """`unknown` without a stored tied output layer. Raises ValueError if the layer differs from the embedding."""
    foreign = {rule.ours[0]: f"{rule.foreign}.weight" for rule in family.rules}
    output, embedding = foreign["output"], foreign["embedding"]
    if output not in unknown:
        return unknown
    if sources[output].dtype not in DTYPES.values() or not torch.equal(
        _load(sources[output]), _load(sources[embedding])
    ):
        raise ValueError(f"its {output} differs from {embedding}, although tie_word_embeddings is true")
    return [name for name in unknown if name != output]


class ExportedTensors(_LazyMapping):
    """Tensors under a family's names, each built from tensors under tinylm's names whenever it is looked up.

    Raises ValueError if the family has no tensor for one of the parameters.
    """

    def __init__(self, family: Family, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self._sources: dict[str, Parameter] = {parameter.foreign: parameter for parameter in family.parameters(config)}
        self._tensors = tensors
        self._heads = config.heads

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._sources[name]
        return parameter.rule.join([self._tensors[ours].detach() for ours in parameter.ours], self._heads)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without building it."""
        return self._sources[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, without building it."""
        tensors = self._tensors
        own = (
            tensors.dtype(ours) if isinstance(tensors, ConvertedTensors) else tensors[ours].dtype
            for ours in self._sources[name].ours
        )
        return functools.reduce(torch.promote_types, own)


@dataclass(frozen=True)
class ForeignModel:
    """A model that was opened from the format of another tool, or is to be exported to one.

    family: a key of `FAMILIES`, also for a run that was imported; `None` for other runs of tinylm.
    tensors: by tinylm's names, in their own dtypes; those of a file are mapped or converted when they are looked up.
    tokenizer: validated content of a tokenizer.json. It may have fewer ids than the embedding has rows.
    chat_template: Jinja source, not yet checked; `None` without one.
    dtypes: names of the dtypes in the file, by decreasing total number of elements; empty for a run of tinylm.
    """

    family: str | None
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    tokenizer: str
    special: SpecialTokens
    chat_template: str | None
    dtypes: tuple[str, ...] = ()


def rank_dtypes(sizes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Names of dtypes by decreasing total number of elements. sizes: name of the dtype and elements of each tensor."""
    counts: collections.Counter[str] = collections.Counter()
    for name, count in sizes:
        counts[name] += count
    return tuple(name for name, _ in counts.most_common())
