"""Read GGUF files as models, write them for llama.cpp, and Modelfiles for ollama.

A file that is read is untrusted; its header is checked before anything else is read (gguf_file.py). A file is written
under a temporary name, read again, compared with the model, and only then renamed.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor

from tinylm.config.model import MAX_BLOCKS, ModelConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.families import choose_family, convert, differing_fields, find_family, resolve
from tinylm.formats.family import ExportedTensors, ForeignModel, convert_tensors, rank_dtypes
from tinylm.formats.gguf_architectures import (
    ARCHITECTURES,
    BY_FAMILY,
    ROPE_FACTORS,
    Architecture,
    ConfigReader,
    llama3_factors,
)
from tinylm.formats.gguf_file import TENSOR_TYPES, GGUFFile, Metadata, TensorInfo, open_gguf
from tinylm.formats.gguf_tensors import CHUNK, SAME, Change, GGUFTensor, TensorRule, load_tensor
from tinylm.formats.gguf_tokenizer import ReadTokenizer, read_tokenizer, write_numbers, write_tokenizer
from tinylm.run_directory.tensor_file import DTYPES
from tinylm.system.files import flush_folder, is_unicode, replacing
from tinylm.text.tokenizer_file import short_repr, token_ids, validate_tokenizer
from tinylm.text.tokenizer_libraries import TokenizerLibraryError, wrap_library_errors

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q5_1": 9, "BF16": 32}  # llama_ftype of llama.cpp
QUANTIZED = ("q8_0", "q5_1", "q4_0")  # the types of these that store blocks of 32 numbers
_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
_ALWAYS_F32 = ("position_embd.weight", "ffn_gate_inp.weight", ROPE_FACTORS)  # as in llama.cpp's converter
QUANTIZATION_VERSION = 2
# Largest allowed error of a stored number, relative to the largest absolute value in its tensor: half a step of the
# largest block, and for the end of the range that Q4_0 lacks, a step. Copied blocks must be exact.
_ERRORS = {"F32": 2**-22, "F16": 2**-10, "BF16": 2**-8, "Q8_0": 1 / 127, "Q5_1": 0.034, "Q4_0": 0.126}
SAMPLES = (  # texts on which tokenizers are compared
    "",
    "The quick brown fox doesn't jump.",
    "  two  spaces\n\n\ttab\r\nend ",
    "3.14159 + 2024 = 12345678",
    "def f(x):\n    return x ** 2  # ok",
    "ÄÖÜ äöü ß, naïve façade",
    "中文字符和标点。日本語のテキスト",
    "👍🏽 🇫🇷 \u200d emoji",
    "<|endoftext|><|im_start|>user",
    "I'LL we've IT'S",
)
TOLERANCE = 1e-6  # relative, of settings that a file stores in 32 bits


def read_gguf(path: Path) -> ForeignModel:
    """Open the model in a GGUF file. Its tensors are mapped; quantized tensors become float32 when they are looked up.

    Raises TinyLMError for a file that is damaged, or whose architecture, tensor types, tokenizer or any other setting
    is not supported.
    """
    try:
        file = open_gguf(path)
        values, tensors = read_model(file)
        family, config, converted = convert(values, tensors, "metadata")
        tokenizer = read_tokenizer(file.metadata, values["model_type"], config.vocab_size)
    except OSError as error:
        raise TinyLMError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise TinyLMError(f"Cannot read {path} as GGUF: {error}.") from error
    dtypes = rank_dtypes((info.type.name, info.elements) for info in file.tensors.values())
    return ForeignModel(family, config, converted, tokenizer.text, tokenizer.special, tokenizer.chat_template, dtypes)


def read_model(file: GGUFFile) -> tuple[dict[str, Any], dict[str, "GGUFTensor"]]:
    """The fields of a Hugging Face config.json, and the tensors under Hugging Face's names.

    Raises ValueError for metadata that is missing or not supported, and for tensors that are unknown or do not fit.
    """
    metadata, infos, data = file
    metadata.require("general.type", "model")
    if metadata.integer("split.count", 0, low=0) > 1:
        raise ValueError("it is a part of a model; join the parts first, by llama-gguf-split")
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"its architecture is {short_repr(name)}; tinylm reads {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[name]
    values = read_config(architecture, metadata, infos, lambda name: load_tensor(data, infos[name]))
    experts = values.get("num_experts", values.get("num_local_experts", 0))
    layers = values.get("num_hidden_layers", values.get("n_layer", 0))
    if layers > len(infos) or layers * experts > MAX_BLOCKS:
        of_experts = f" of {experts:,} experts" if experts else ""
        raise ValueError(f"it claims {layers:,} layers{of_experts} and has {len(infos):,} tensors")
    tensors: dict[str, GGUFTensor] = {}
    unknown = set(infos) - {ROPE_FACTORS}
    for place in architecture.places(layers, experts):
        if place.stored in infos:
            heads = values[place.change.heads] if place.change.heads else 0
            tensors[place.foreign] = GGUFTensor(data, infos[place.stored], place.change, heads, place.expert)
            tensors[place.foreign].check(experts)
            unknown.discard(place.stored)
    if unknown:
        raise ValueError(f"it has the tensor {short_repr(min(unknown))}, which its architecture does not have")
    return values, tensors


def read_config(
    architecture: Architecture, metadata: Metadata, tensors: Mapping[str, TensorInfo], load: Any
) -> dict[str, Any]:
    """The fields of a Hugging Face config.json. load: reads the tensor of a name in the file.

    Raises ValueError for metadata that is missing or not supported.
    """
    reader = ConfigReader(metadata, architecture.name, tensors, load)
    values = architecture.read_config(reader)
    reader.check_all_read()
    return values


# Writing.


@dataclass(frozen=True)
class _Planned:
    """A tensor to write. heads: argument of `change`; 0 if it needs none.

    sources: Hugging Face names of the tensors in it: one, or one per expert. blocks: bytes that are written as they
    are: quantized ones of another file, or the RoPE divisors (ROPE_FACTORS), which have no source.
    """

    info: TensorInfo  # its offset is not used
    sources: tuple[str, ...]
    change: Change = SAME
    heads: int = 0
    blocks: np.ndarray | None = None


@dataclass(frozen=True)
class _Plan:
    """The content of the file. config: that of the model, resolved. tensors: by Hugging Face names.

    planned: the tensors to write. metadata: by key.
    """

    model: ForeignModel
    config: ModelConfig
    architecture: Architecture
    tensors: Mapping[str, Tensor]
    planned: tuple[_Planned, ...]
    metadata: dict[str, Any]


def write_gguf(
    path: Path,
    model: ForeignModel,
    dtype: str = "f16",
    name: str | None = None,
    quantized: GGUFFile | None = None,
    end_id: int | None = None,
) -> str:
    """Write a model as a GGUF file; return the name of the architecture.

    dtype: of the matrices: f32, f16, bf16 or one of QUANTIZED; a matrix whose rows are not blocks is written as f16,
        and those of _ALWAYS_F32 as f32. All vectors are written as f32.
    name: value of general.name; default: the file name without its suffix.
    quantized: a file with the same model, whose quantized tensors are copied as they are.
    end_id: the end token of a file for generation from ids to ids (`write_numbers`), which has no tokenizer.

    Raises UsageError for a model, a tokenizer or weights that GGUF cannot represent with this dtype, for a file name
    that a Modelfile cannot contain, and for a folder that cannot be created. Raises
    TinyLMError if writing fails or the file differs from the model when it is read again.
    """
    check_name(path)
    plan = _make_plan(model, dtype.upper(), name or path.stem, quantized, end_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Cannot write to {path.parent}: {error.strerror}; choose another `out`.") from error
    try:
        with replacing(path) as unfinished:
            _write(plan, unfinished)
            try:
                _verify(plan, unfinished, has_tokenizer=end_id is None)
            except ValueError as error:
                raise TinyLMError(f"{path} was written, but is not the same model when read again: {error}.") from error
        flush_folder(path.parent)
    except OSError as error:
        raise TinyLMError(f"Cannot write {path}: {error.strerror or error}.") from error
    return plan.architecture.name


# The plan of a file.


def _make_plan(model: ForeignModel, dtype: str, name: str, quantized: GGUFFile | None, end_id: int | None) -> _Plan:
    config = resolve(model.config)
    family = choose_family(model.config, model.family)
    architecture = BY_FAMILY[family.name]
    tensors = ExportedTensors(family, model.config, model.tensors)
    planned = tuple(_plan_tensors(architecture, config, tensors, dtype, quantized))
    unplanned = set(tensors) - {source for tensor in planned for source in tensor.sources}
    if unplanned:
        raise UsageError(f"GGUF's {architecture.name} has no place for the tensor {min(unplanned)}.")
    try:
        if end_id is not None:
            tokenizer = write_numbers(end_id, config.vocab_size)
        else:
            spec = validate_tokenizer(model.tokenizer)
            tokenizer = write_tokenizer(spec, model.special, model.chat_template, config.vocab_size)
    except ValueError as error:
        raise UsageError(f"The tokenizer cannot be written as GGUF: {error}.") from error
    metadata = {
        "general.architecture": architecture.name,
        "general.type": "model",
        "general.name": name,
        "general.file_type": _FILE_TYPES[dtype],
        "general.quantization_version": QUANTIZATION_VERSION,
        **architecture.write_metadata(config),
        **tokenizer,
    }
    plan = _Plan(model, config, architecture, tensors, planned, metadata)
    _check_expressible(plan)
    return plan


def _plan_tensors(
    architecture: Architecture, config: ModelConfig, tensors: ExportedTensors, dtype: str, quantized: GGUFFile | None
) -> Iterator[_Planned]:
    heads = {"num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "": 0}
    places: dict[str, list[TensorRule]] = {}
    for place in architecture.places(config.layers, config.experts):
        if place.foreign in tensors:
            places.setdefault(place.stored, []).append(place)
    for stored, parts in places.items():
        first = parts[0]
        shape = tensors.shape(first.foreign)
        shape = shape[::-1] if first.change.transposes else shape
        shape = shape if first.expert is None else (len(parts), *shape)
        if len(shape) == 1 or stored.endswith(_ALWAYS_F32):
            kind = _TYPES["F32"]
        else:
            kind = _TYPES["F16" if shape[-1] % _TYPES[dtype].elements else dtype]
        blocks = None
        copied = None if quantized is None else quantized.tensors.get(stored)
        if quantized is not None and copied is not None and copied.shape == shape and copied.type.name not in DTYPES:
            kind = copied.type
            blocks = np.frombuffer(quantized.data, dtype=np.uint8, count=copied.size, offset=copied.offset)
        sources = tuple(part.foreign for part in parts)
        yield _Planned(TensorInfo(stored, shape, kind, 0), sources, first.change, heads[first.change.heads], blocks)
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        factors = llama3_factors(config.rope_scaling, config.rope_theta, config.head_dim)
        yield _Planned(
            TensorInfo(ROPE_FACTORS, tuple(factors.shape), _TYPES["F32"], 0), (), blocks=factors.numpy().view(np.uint8)
        )


def _check_expressible(plan: _Plan) -> None:
    window, context = plan.config.local_window, plan.config.context
    if plan.architecture.ignores_windows and window is not None and window < context:
        raise UsageError(
            f"GGUF's {plan.architecture.name} has full attention: llama.cpp ignores the `local_window` of {window} "
            f"tokens, which is shorter than the context of {context}. Write a Hugging Face folder instead."
        )
    infos = {planned.info.name: planned.info for planned in plan.planned}
    blocks = {planned.info.name: planned.blocks for planned in plan.planned if planned.blocks is not None}
    try:
        metadata, load = Metadata(plan.metadata), lambda name: torch.from_numpy(blocks[name].view(np.float32))
        values = read_config(plan.architecture, metadata, infos, load)
        found = resolve(find_family(values).config(values))
    except ValueError as error:
        raise UsageError(f"GGUF's {plan.architecture.name} cannot represent this model: {error}.") from error
    if lost := differing_fields(plan.config, found, TOLERANCE):
        settings = " and ".join(f"`{name}` {getattr(plan.config, name)}" for name in lost[:3])
        raise UsageError(f"GGUF's {plan.architecture.name} cannot represent this model's {settings}.")


# Writing.


def _write(plan: _Plan, path: Path) -> None:
    import gguf

    kinds = gguf.GGUFValueType
    by_type = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    by_item = {str: kinds.STRING, float: kinds.FLOAT32, int: kinds.INT32}  # of a list, which must not be empty
    writer = gguf.GGUFWriter(None, plan.architecture.name)
    for key, value in plan.metadata.items():
        if key == "general.architecture":  # GGUFWriter adds it
            continue
        types = [kinds.ARRAY, by_item[type(value[0])]] if isinstance(value, list) else [by_type[type(value)]]
        writer.add_key_value(key, value, *types)
    for planned in plan.planned:
        info = planned.info
        kind = gguf.GGMLQuantizationType[info.type.name]
        writer.add_tensor_info(info.name, info.shape, np.dtype(np.float32), info.size, kind)
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for planned in plan.planned:
            stored = (planned.change.write(plan.tensors[source], planned.heads) for source in planned.sources)
            parts = [planned.blocks] if planned.blocks is not None else [_encode(t, planned.info) for t in stored]
            writer.write_tensor_data(parts[0] if len(parts) == 1 else np.concatenate(parts))
    finally:
        writer.close()


def _encode(tensor: Tensor, info: TensorInfo) -> np.ndarray:
    """The numbers of a tensor as bytes of the type in `info`.

    Raises UsageError for numbers that a floating-point type cannot represent.
    """
    flat = tensor.detach().cpu().reshape(-1)
    if info.type.name in DTYPES:
        dtype = DTYPES[info.type.name]
        if not float(flat.abs().max()) <= torch.finfo(dtype).max:
            raise UsageError(
                f"The tensor {info.name} has numbers that {info.type.name.lower()} cannot represent; write the model "
                "with `dtype` f32 or bf16."
            )
        return flat.to(dtype).contiguous().view(torch.uint8).numpy()
    import gguf

    kind = gguf.GGMLQuantizationType[info.type.name]
    parts = (part.float().numpy() for part in flat.split(CHUNK))  # CHUNK is a multiple of the numbers in a block
    return np.concatenate([gguf.quants.quantize(part, kind).reshape(-1) for part in parts])


# Checking.


def _verify(plan: _Plan, path: Path, has_tokenizer: bool) -> None:
    """Read the file and compare its configuration, tensors and tokenizer with the plan. Raises ValueError."""
    file = open_gguf(path)
    values, tensors = read_model(file)
    config = find_family(values).config(values)
    if lost := differing_fields(plan.config, resolve(config), TOLERANCE):
        raise ValueError(f"its {lost[0]} differs")
    convert_tensors(find_family(values), config, tensors)  # checks their names and shapes
    for planned in plan.planned:
        for source in planned.sources:
            # In the layout of the file: a norm that is stored as 1 + weight has the precision of that sum.
            written, found = plan.tensors[source], tensors[source].load()
            written, found = (planned.change.write(tensor, planned.heads) for tensor in (written, found))
            _compare(source, written, found, 0.0 if planned.blocks is not None else _ERRORS[planned.info.type.name])
    if has_tokenizer:
        tokenizer = read_tokenizer(file.metadata, values["model_type"], config.vocab_size)
        _compare_tokenizers(plan.model, tokenizer)


def _compare(name: str, written: Tensor, found: Tensor, error: float) -> None:
    written = written.detach().cpu().float()
    largest = float(written.abs().max())
    if written.shape != found.shape or not float((written - found.float()).abs().max()) <= error * largest:
        raise ValueError(f"its tensor {name} differs")


def _compare_tokenizers(model: ForeignModel, found: ReadTokenizer) -> None:
    if token_ids(json.loads(found.text)) != token_ids(validate_tokenizer(model.tokenizer)):
        raise ValueError("its vocabulary differs")
    if (found.special.end_of_text, found.special.add_bos) != (model.special.end_of_text, model.special.add_bos):
        raise ValueError("its special tokens differ")
    for text, ours, theirs in zip(SAMPLES, _sample_ids(model.tokenizer), _sample_ids(found.text), strict=True):
        if ours != theirs:
            raise ValueError(f"its tokenizer gives other ids for {text!r}")


def _sample_ids(tokenizer: str) -> list[list[int]]:
    """The ids of each of SAMPLES. tokenizer: content of a tokenizer.json. Raises ValueError if the library fails."""
    try:
        with wrap_library_errors():
            library = tokenizers.Tokenizer.from_str(tokenizer)
            library.encode_special_tokens = True
            return [library.encode(text, add_special_tokens=False).ids for text in SAMPLES]
    except TokenizerLibraryError as error:
        raise ValueError(f"its tokenizer cannot be used: {error}") from error


SUFFIX = ".Modelfile"  # after the name of the model, so that a folder can hold several
CHATML_TURN = "<|im_start|>"
CHATML = """{{ range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


def modelfile_path(gguf: Path) -> Path:
    """The path of the Modelfile of a GGUF file."""
    return gguf.with_suffix(SUFFIX)


def check_name(gguf: Path) -> None:
    """Raise UsageError if a Modelfile cannot contain the name of the GGUF file."""
    if "\n" in gguf.name or not is_unicode(gguf.name):
        raise UsageError("The name of a GGUF file must be UTF-8 without a line break.")


def from_line(gguf: Path) -> str:
    """The FROM instruction of the Modelfile of a GGUF file."""
    return f"FROM ./{gguf.name}"


def make_modelfile(gguf: Path, model: ForeignModel) -> str:
    """The text of a Modelfile: context length, EOS tokens, and TEMPLATE for ChatML or if there is no chat template.

    EOS tokens with a quote, a backslash or a line break are left out.
    """
    lines = [from_line(gguf), f"PARAMETER num_ctx {model.config.context}"]
    chat = model.chat_template
    if chat is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif CHATML_TURN in chat and "<|im_end|>" in chat:
        lines.append(f'TEMPLATE """{CHATML}"""')
    else:
        lines.insert(0, "# Without TEMPLATE, ollama uses the chat template in the GGUF file if it supports that one.")
    lines += [f'PARAMETER stop "{end}"' for end in model.special.stops if not set('"\\\n') & set(end)]
    return "\n".join(lines) + "\n"
