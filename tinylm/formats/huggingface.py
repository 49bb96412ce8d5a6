"""Hugging Face model folders: config.json, safetensors weights and tokenizer.json, read, written and replaced.

Special tokens and the chat template are in files of their own; functions that read them raise OSError, and ValueError
with a reason that completes the sentence "Cannot import FOLDER: ".
"""

import collections
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tinylm.config.model import ModelConfig
from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError, concerning
from tinylm.formats.families import choose_family, convert, find_family, resolve
from tinylm.formats.family import ExportedTensors, ForeignModel
from tinylm.formats.foreign_config import refused
from tinylm.formats.gguf_tokenizer import find_pre
from tinylm.formats.safetensors_files import (
    DTYPE_NAMES,
    MAX_CONFIG_BYTES,
    WEIGHTS,
    inside,
    open_weights,
    read_object,
    reading,
    stored_dtypes,
    write_file,
)
from tinylm.system.files import (
    flush_folder,
    is_link,
    read_json,
    read_text,
    remove_tree,
    replace_folder,
    write_text,
)
from tinylm.system.process_signals import temporary
from tinylm.text.tokenizer_file import TokenizerSpec, short_repr, token_ids, validate_tokenizer
from tinylm.transformer.build import count_parameters

TOKENIZER_CONFIG, TOKEN_MAP, GENERATION_CONFIG = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
CHAT_TEMPLATE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1 << 20  # of a file; characters of a template within tokenizer_config.json
MAX_END_TOKENS = 64


def read_special_tokens(folder: Path, config: Mapping[str, Any], tokenizer: TokenizerSpec) -> SpecialTokens:
    """The special tokens that tokenizer_config.json and special_tokens_map.json name. config: content of config.json.

    If the two files name no EOS token, its id is read from generation_config.json or `config`. If they name no BOS and
    no padding token either, the ids of those are also read there. The EOS tokens of generation_config.json or, if it
    has none, of `config` end generation as well. Raises ValueError if no file has an EOS token.
    """
    settings, names = read_object(folder, TOKENIZER_CONFIG), read_object(folder, TOKEN_MAP)
    generation = read_object(folder, GENERATION_CONFIG)
    ids = token_ids(tokenizer)
    tokens = {i: token for token, i in ids.items()}
    named = {kind: _named(kind, (settings, names), ids) for kind in ("bos", "eos", "pad")}
    if named["eos"] is None:
        for kind in ("eos",) if any(named.values()) else tuple(named):
            found = _tokens(generation, config, f"{kind}_token_id", tokens)
            named[kind] = found[0] if found else None
    end_of_text, bos = named["eos"], named["bos"]
    if end_of_text is None:
        raise ValueError("it names no end-of-text token (eos_token in tokenizer_config.json)")
    ends = [end_of_text, *_tokens(generation, config, "eos_token_id", tokens)]
    add_bos = settings.get("add_bos_token")
    if bos is not None and add_bos is not None and not isinstance(add_bos, bool):
        raise ValueError(f"add_bos_token of {TOKENIZER_CONFIG} is {short_repr(add_bos)}; it must be true or false")
    if bos is None or add_bos is None:
        add_bos = bos is not None and begins_with(tokenizer, bos)
    with refused("its special tokens cannot be used"):
        return SpecialTokens(
            end_of_text=end_of_text, bos=bos, eos=tuple(dict.fromkeys(ends)), pad=named["pad"], add_bos=add_bos
        )


def _named(kind: str, sources: Iterable[Mapping[str, Any]], ids: Mapping[str, int]) -> str | None:
    """The token from the field `{kind}_token` of the first source that has one, as a string or as an object with
    `content`; `None` if there is none.
    """
    for source in sources:
        value = source.get(f"{kind}_token")
        token = value.get("content") if isinstance(value, dict) else value
        if token is not None and not isinstance(token, str):
            raise ValueError(f"its {kind}_token is {short_repr(value)}, which is not a token")
        if token and token not in ids:
            raise ValueError(f"its {kind}_token {short_repr(token)} is not in its tokenizer.json")
        if token:
            return token
    return None


def _tokens(
    generation: Mapping[str, Any], config: Mapping[str, Any], name: str, tokens: Mapping[int, str]
) -> list[str]:
    """The tokens for the ids in the field `name` of generation_config.json or, if it is absent there, of config.json.

    Ids without a token are left out: transformers' default ids may exceed a small vocabulary.
    """
    value = config.get(name) if generation.get(name) is None else generation[name]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_END_TOKENS or not all(type(i) is int for i in ids):
        raise ValueError(
            f"its {name} is {short_repr(value)}; it must be a token id or a list of up to {MAX_END_TOKENS}"
        )
    return [tokens[i] for i in ids if i in tokens]


def begins_with(tokenizer: TokenizerSpec, token: str) -> bool:
    """Whether the post-processor of a tokenizer.json has a template that adds the token before each text."""
    templates = [step for step in _post_processors(tokenizer) if step["type"] == "TemplateProcessing"]
    first = (item for step in templates for item in step.get("single", [])[:1])
    return any(item.get("SpecialToken", {}).get("id") == token for item in first)


def _post_processors(tokenizer: TokenizerSpec) -> list[dict[str, Any]]:
    step = tokenizer["post_processor"]
    if step is None:
        return []
    return step["processors"] if step["type"] == "Sequence" else [step]


def read_chat_template(folder: Path) -> str | None:
    """The chat template: chat_template.jinja, else `chat_template` of tokenizer_config.json, else `None`.

    Of a list of templates in tokenizer_config.json, the one named default.
    """
    if os.path.lexists(folder / CHAT_TEMPLATE):
        return read_text(inside(folder, CHAT_TEMPLATE), MAX_TEMPLATE_BYTES)
    value = read_object(folder, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(value, list):
        named = (item for item in value if isinstance(item, dict) and item.get("name") == "default")
        value = next(named, {}).get("template")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"chat_template of {TOKENIZER_CONFIG} is {short_repr(value)}; it must be a string")
    if value is not None and len(value) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"its chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return value


def tokenizer_for_export(tokenizer: TokenizerSpec, special: SpecialTokens) -> str:
    """The text of a tokenizer.json whose post-processor adds the BOS token if and only if `special.add_bos` is set."""
    if special.bos is None or begins_with(tokenizer, special.bos) == special.add_bos:
        return json.dumps(tokenizer, ensure_ascii=False)
    steps = [step for step in _post_processors(tokenizer) if step["type"] != "TemplateProcessing"]
    if special.add_bos:
        steps.append(_bos_template(special.bos, token_ids(tokenizer)[special.bos]))
    processor = {"type": "Sequence", "processors": steps} if steps else None
    return json.dumps({**tokenizer, "post_processor": processor}, ensure_ascii=False)


def _bos_template(bos: str, bos_id: int) -> dict[str, Any]:
    first, second = ({"SpecialToken": {"id": bos, "type_id": i}} for i in (0, 1))
    text, other = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second, other],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


@concerning("out")
def check_folder_free(out: Path, files: Collection[str], force: bool) -> None:
    """Raise UsageError unless an export may be written to the folder `out`.

    `out` may be missing, an empty folder, or, with `force`, a folder that contains only `files` (of an export).
    """
    if not os.path.lexists(out):
        return
    if is_link(out) or not out.is_dir():
        raise UsageError(f"{out} is not a folder; choose another `out`.")
    try:
        names = {entry.name for entry in out.iterdir()}
    except OSError as error:
        raise UsageError(f"{out} cannot be read: {error.strerror}; choose another `out`.") from error
    if others := sorted(names.difference(files)):
        listed = ", ".join(others[:3])
        raise UsageError(f"{out} contains files that do not belong to an export ({listed}); choose another `out`.")
    if names and not force:
        raise UsageError(f"{out} contains an earlier export; choose another `out`, or replace it with `force`.")


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """Context manager that yields a new empty folder, which replaces `out` at the end. On an error, `out` is restored.

    Raises UsageError if the parent of `out` cannot be written, and TinyLMError if writing fails later. If `out` cannot
    be restored, the message says where the earlier export is.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".export", dir=out.parent))
    except OSError as error:
        raise UsageError(f"Cannot write to {out.parent}: {error.strerror}; choose another `out`.") from error
    new, old = stage / "new", stage / "old"
    try:
        with temporary(stage):  # `old` is not yet in it
            new.mkdir()
            yield new
            flush_folder(new)
        replace_folder(out, new, old)
    except OSError as error:
        kept = f"; the earlier export is in {old}" if old.exists() else ""
        raise TinyLMError(f"Cannot write {out}: {error.strerror or error}. Nothing was exported{kept}.") from error
    finally:
        if out.exists() or not old.exists():
            remove_tree(stage)
    with suppress(OSError):  # the export is in place; without the flush, a power failure may undo the rename
        flush_folder(out.parent)


CONFIG, TOKENIZER = "config.json", "tokenizer.json"
FOLDER_FILES = (CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG)  # of an export


def is_model_folder(path: Path) -> bool:
    """Whether a path is a Hugging Face model folder: its config.json has the key `model_type`.

    The config.json of a run has the key `format` instead. If config.json is damaged or has neither key, a folder with a
    tokenizer_config.json, which runs do not have, counts as a model folder.
    """
    if not os.path.lexists(path / CONFIG):
        return False
    try:
        values = read_json(inside(path, CONFIG), MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        values = None
    if isinstance(values, dict) and ("model_type" in values or "format" in values):
        return "model_type" in values
    return os.path.lexists(path / TOKENIZER_CONFIG)


def read_folder(folder: Path) -> ForeignModel:
    """Open the model of a Hugging Face folder. Its weights are mapped; they are read when they are used.

    Raises UsageError for a folder without a config.json, and TinyLMError for a folder that is damaged, or whose family,
    tokenizer or any other setting is not supported.
    """
    if not os.path.lexists(folder / CONFIG):
        raise UsageError(f"{folder} is not a model folder of Hugging Face: it has no {CONFIG}.")
    with reading(folder, "import"):
        values = read_object(folder, CONFIG)
        find_family(values)  # before the weights are opened
        stored = open_weights(folder)
        family, config, tensors = convert(values, stored)
        tokenizer = _read_tokenizer(folder, config)
        special = read_special_tokens(folder, values, tokenizer)
        template = read_chat_template(folder)
    text = json.dumps(tokenizer, ensure_ascii=False)
    return ForeignModel(family, config, tensors, text, special, template, stored_dtypes(stored))


def _read_tokenizer(folder: Path, config: ModelConfig) -> TokenizerSpec:
    """The validated tokenizer.json. Raises ValueError if it is missing, invalid, or has an id beyond the embedding."""
    if not os.path.lexists(folder / TOKENIZER):
        raise ValueError(
            f"it has no {TOKENIZER}; write one by transformers: "
            'AutoTokenizer.from_pretrained("FOLDER").save_pretrained("FOLDER")'
        )
    try:
        spec = validate_tokenizer(read_text(inside(folder, TOKENIZER)))
    except ValueError as error:
        raise ValueError(f"{TOKENIZER} cannot be used: {error}") from error
    largest = max(token_ids(spec).values(), default=-1)
    if largest >= config.vocab_size:
        raise ValueError(f"{TOKENIZER} has the id {largest}, and its model has {config.vocab_size} ids")
    return spec


def summarise_folder(path: Path) -> dict[str, Any]:
    """The entry of a model folder in a list of runs, with the main keys that `summarise` returns for a run.

    Of a model that tinylm cannot use, the elements of the stored tensors are counted. Raises TinyLMError for weights
    that are missing or damaged.
    """
    with reading(path, "use"):
        values, stored = read_object(path, CONFIG), open_weights(path)
        saved = (path / CONFIG).lstat().st_mtime
        try:
            parameters = count_parameters(find_family(values).config(values))["total"]
        except (ValueError, UsageError):
            parameters = sum(math.prod(tensor.shape) for tensor in stored.values())
    unknown = dict.fromkeys(("step", "best_step", "val_loss", "val_bits_per_byte"))
    return {"kind": "hugging face", "parameters": parameters, **unknown, "saved": saved, "seconds": None}


def write_folder(folder: Path, model: ForeignModel, dtype: torch.dtype | None = None) -> str:
    """Write a model into an existing folder in Hugging Face's format, and return the name of its family.

    The family is `model.family` if that can represent the configuration, else the first of FAMILIES that can.
    dtype: of the weights; `None`: each tensor's own.

    Raises UsageError, before anything is written, for a model that no family can represent, and OSError.
    """
    family = choose_family(model.config, model.family)
    spec = validate_tokenizer(model.tokenizer)
    tensors = ExportedTensors(family, model.config, model.tensors)
    if model.config.labels and model.special.pad is None:  # transformers finds the last token of a text by the padding
        model = replace(model, special=replace(model.special, pad=model.special.end_of_text))
    special, ids = model.special, token_ids(spec)

    # The weights
    layout = {name: (dtype or tensors.dtype(name), tensors.shape(name)) for name in tensors}
    most = collections.Counter(kind for kind, _ in layout.values()).most_common(1)[0][0]
    write_file(folder / WEIGHTS, layout, tensors.__getitem__)

    # The tokenizer
    write_text(folder / TOKENIZER, tokenizer_for_export(spec, special))
    if model.chat_template is not None:
        write_text(folder / CHAT_TEMPLATE, model.chat_template)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special.bos,
        "eos_token": special.end_of_text,
        "pad_token": special.pad,
        "add_bos_token": special.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.context,
    }

    # The configurations of the model, and of generation with it
    ends = [ids[token] for token in special.stops]
    token_id_fields: dict[str, Any] = {
        "bos_token_id": None if special.bos is None else ids[special.bos],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": None if special.pad is None else ids[special.pad],
    }
    fields = family.fields(resolve(model.config)) | token_id_fields
    fields |= {"use_cache": True, "dtype": DTYPE_NAMES[most]}  # in which transformers loads the weights
    generation = dict(token_id_fields)
    if special.pad is None:  # else transformers warns at each generation
        generation["pad_token_id"] = ends[0]
    files = {TOKENIZER_CONFIG: settings, GENERATION_CONFIG: generation, CONFIG: fields}
    for name, values in files.items():  # config.json last: a folder without it is not a model
        write_text(folder / name, json.dumps(values, ensure_ascii=False, indent=2) + "\n")
    return family.name


def rebuilds_tokenizer(family: str, tokenizer: str) -> bool:
    """Whether AutoTokenizer of transformers 5 may encode texts differently from `tokenizer`, a tokenizer.json.

    For the model type qwen2, AutoTokenizer builds Qwen's own tokenizer from the vocabulary and the merges, whatever the
    `tokenizer_class` is.
    """
    if family != "qwen2":
        return False
    try:
        return find_pre(validate_tokenizer(tokenizer)) != "qwen2"
    except ValueError:  # find_pre has no name for it
        return True
