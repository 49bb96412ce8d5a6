"""A foreign model at a path: a Hugging Face folder or a GGUF file."""

import os
from pathlib import Path

from tinylm.formats.family import ForeignModel
from tinylm.formats.gguf_header import MAGIC
from tinylm.formats.gguf_reader import read_gguf
from tinylm.formats.hub import is_reference
from tinylm.formats.huggingface import is_model_folder, read_folder
from tinylm.system.files import open_regular, resolve_links

GGUF_SUFFIX = ".gguf"


def is_foreign(path: Path) -> bool:
    """Whether there is a GGUF file at `path`, or a Hugging Face model folder (see `is_model_folder`)."""
    return is_gguf(path) or is_model_folder(path)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, or its name ends in .gguf. A link is followed."""
    try:
        with open_regular(resolve_links(path)) as file:
            return file.read(len(MAGIC)) == MAGIC or _has_suffix(path)
    except OSError:  # `open_gguf` says why a .gguf cannot be opened
        return _has_suffix(path) and os.path.lexists(path) and not path.is_dir()


def _has_suffix(path: Path) -> bool:
    return path.suffix.lower() == GGUF_SUFFIX


def read_foreign(path: Path) -> ForeignModel:
    """The model at a path for which `is_foreign` is true. Raises TinyLMError as `read_gguf` and `read_folder` do."""
    return read_gguf(path) if is_gguf(path) else read_folder(path)


def foreign_name(source: Path) -> str:
    """The last part of a path or of a hub reference, without `@...` and .gguf; `imported` if that is empty."""
    if is_reference(str(source)):
        source = Path(str(source).partition("@")[0])  # a revision may contain slashes
    name = Path(source.name.partition("@")[0])
    return (name.stem if _has_suffix(name) else name.name) or "imported"
