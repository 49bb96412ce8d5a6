"""A foreign model at a path: a Hugging Face folder or a GGUF file."""

from pathlib import Path

from tinylm.formats.gguf_reader import read_gguf
from tinylm.formats.huggingface import is_model_folder, read_folder
from tinylm.formats.imported import ForeignModel

GGUF_SUFFIX = ".gguf"


def is_foreign(path: Path) -> bool:
    """Whether there is a GGUF file at `path`, or a folder with the config.json of a Hugging Face model."""
    return path.is_file() if path.suffix == GGUF_SUFFIX else is_model_folder(path)


def read_foreign(path: Path) -> ForeignModel:
    """The model at a path for which `is_foreign` holds. Raises TinyLMError as the readers of its format."""
    return read_gguf(path) if path.suffix == GGUF_SUFFIX else read_folder(path)
