"""Hugging Face model folders: config.json, safetensors weights and tokenizer.json, read, written and replaced."""

import collections
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from tinylm.config.model import ModelConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.families import convert, find_family
from tinylm.formats.family import ExportedTensors, Family, ForeignModel
from tinylm.formats.family_choice import choose_family, resolve
from tinylm.formats.gguf_tokenizer import find_pre
from tinylm.formats.safetensors_files import DTYPE_NAMES, WEIGHTS, inside, open_weights, stored_dtypes, write_file
from tinylm.formats.special_tokens import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    MAX_CONFIG_BYTES,
    TOKENIZER_CONFIG,
    read_chat_template,
    read_object,
    read_special_tokens,
    token_id_fields,
    tokenizer_config,
    tokenizer_for_export,
)
from tinylm.system.files import flush_folder, is_link, read_json, read_text, remove_tree, write_text
from tinylm.system.process_signals import temporary
from tinylm.text.tokenizer_file import TokenizerSpec, token_ids, validate_tokenizer


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
        _replace(out, new, old)
    except OSError as error:
        kept = f"; the earlier export is in {old}" if old.exists() else ""
        raise TinyLMError(f"Cannot write {out}: {error.strerror or error}. Nothing was exported{kept}.") from error
    finally:
        if out.exists() or not old.exists():
            remove_tree(stage)
    with suppress(OSError):  # the export is in place; without the flush, a power failure may undo the rename
        flush_folder(out.parent)


def _replace(out: Path, new: Path, old: Path) -> None:
    """Move `out`, if it exists, to `old`, and `new` to `out`.

    On any exception, including KeyboardInterrupt, `out` is restored.
    """
    try:
        if out.exists():
            out.rename(old)
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise


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
    try:
        values = read_object(folder, CONFIG)
        find_family(values)  # before the weights are opened
        stored = open_weights(folder)
        family, config, tensors = convert(values, stored)
        tokenizer = _read_tokenizer(folder, config)
        special = read_special_tokens(folder, values, tokenizer)
        template = read_chat_template(folder)
    except OSError as error:
        name = Path(str(error.filename)).name if error.filename else "a file"
        raise TinyLMError(f"Cannot import {folder}: {name} cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise TinyLMError(f"Cannot import {folder}: {error}.") from error
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

    Raises TinyLMError for weights that are missing or damaged.
    """
    try:
        parameters = sum(math.prod(tensor.shape) for tensor in open_weights(path).values())
        saved = (path / CONFIG).lstat().st_mtime
    except (OSError, ValueError) as error:
        raise TinyLMError(f"{path} is damaged ({error}).") from error
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
    fields = _config_fields(family, model, token_ids(spec)) | {"dtype": _dtype_name(tensors, dtype)}
    write_file(folder / WEIGHTS, tensors, dtype)
    write_text(folder / TOKENIZER, tokenizer_for_export(spec, model.special))
    _write_json(folder / TOKENIZER_CONFIG, tokenizer_config(model.special, model.config.context))
    if model.chat_template is not None:
        write_text(folder / CHAT_TEMPLATE, model.chat_template)
    _write_json(folder / GENERATION_CONFIG, _generation_fields(fields))
    _write_json(folder / CONFIG, fields)  # last: a folder without it is not a model
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


def _config_fields(family: Family, model: ForeignModel, ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.write_config(resolve(model.config)),
        **token_id_fields(model.special, ids),
        "use_cache": True,
    }


def _dtype_name(tensors: ExportedTensors, dtype: torch.dtype | None) -> str:
    """The dtype in which transformers loads the weights: `dtype`, or else that of most tensors."""
    most = collections.Counter(tensors.dtype(name) for name in tensors).most_common(1)[0][0]
    return DTYPE_NAMES[dtype or most]


def _generation_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of generation_config.json. The default padding token is the first EOS token.

    Without a padding token, transformers warns at each generation.
    """
    ends = config["eos_token_id"]
    first = ends[0] if isinstance(ends, list) else ends
    pad = first if config["pad_token_id"] is None else config["pad_token_id"]
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": ends, "pad_token_id": pad}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, ensure_ascii=False, indent=2) + "\n")
