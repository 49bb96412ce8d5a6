"""A foreign model at a path: a Hugging Face folder or a GGUF file."""

import os
from pathlib import Path

from tinylm.formats.gguf_reader import read_gguf
from tinylm.formats.hub import is_reference
from tinylm.formats.huggingface import is_model_folder, read_folder
from tinylm.formats.imported import ForeignModel

GGUF_SUFFIX = ".gguf"


def is_foreign(path: Path) -> bool:
    """Whether there is a GGUF file at `path`, or a Hugging Face model folder (see `is_model_folder`)."""
    return _is_gguf(path) or is_model_folder(path)


def _is_gguf(path: Path) -> bool:
    """Whether the path ends in .gguf, exists and is not a folder. `open_gguf` checks that it is a regular file."""
    return path.suffix == GGUF_SUFFIX and os.path.lexists(path) and not path.is_dir()


def read_foreign(path: Path) -> ForeignModel:
    """The model at a path for which `is_foreign` is true. Raises TinyLMError as `read_gguf` and `read_folder` do."""
    return read_gguf(path) if _is_gguf(path) else read_folder(path)


def foreign_name(source: Path) -> str:
    """The last part of a path or of a hub reference, without `@...` and without .gguf; `imported` if that is empty."""
    if is_reference(str(source)):
        source = Path(str(source).partition("@")[0])  # a revision may contain slashes
    return source.name.partition("@")[0].removesuffix(GGUF_SUFFIX) or "imported"
