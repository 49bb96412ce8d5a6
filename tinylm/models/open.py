"""Opening a model for any use: a run directory, a Hugging Face folder or hub id, or a GGUF file."""

import os
from pathlib import Path

from tinylm.config.run import RunConfig, TokenizerConfig
from tinylm.errors import AdapterNotModelError, TinyLMError
from tinylm.formats.family import ForeignModel
from tinylm.formats.gguf_file import MAGIC
from tinylm.formats.gguf_model import read_gguf
from tinylm.formats.hub import download, is_reference
from tinylm.formats.huggingface import is_model_folder, read_folder
from tinylm.formats.peft import is_adapter_folder
from tinylm.reporter import Reporter
from tinylm.run_directory.layout import CHECKPOINTS, find_run
from tinylm.run_directory.loading import LoadedModel, load_model, restore_model
from tinylm.run_directory.weights import Weights
from tinylm.system.files import open_regular, resolve_links
from tinylm.text.tokenizer import Tokenizer

GGUF_SUFFIX = ".gguf"


def find_model(name: Path, reporter: Reporter) -> Path:
    """The path of a model: of a run (see `find_run`), a Hugging Face folder or a GGUF file.

    `hf:OWNER/NAME[@REVISION]` is downloaded into Hugging Face's own cache, unless it is there. Raises UsageError if
    there is no model with this name or huggingface_hub is not installed, and TinyLMError for a download that fails.
    """
    if is_reference(str(name)):
        reporter.note(f"Using {name} from the cache of the Hugging Face hub, or downloading it.")
        return download(str(name))
    return find_run(name, reporter)


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


def imported_run(name: Path) -> Path:
    """The run directory under checkpoints/ that is named like a model of another tool."""
    return CHECKPOINTS / foreign_name(name)


def open_model(path: Path, device: str = "cpu") -> LoadedModel:
    """The model at a path that `find_model` returned, in evaluation mode.

    Foreign weights keep their dtype, and on a CPU are mapped into memory where the file has them in the same layout;
    quantized GGUF weights are dequantized.

    Raises UsageError for a path without a model, AdapterNotModelError for an adapter, and TinyLMError for damaged files
    and for a model that tinylm cannot represent.
    """
    if is_adapter_folder(path):
        raise AdapterNotModelError(path, "peft")
    if not is_foreign(path):
        return load_model(path, device)
    foreign = read_foreign(path)
    config, tokenizer = run_config(foreign, path)
    tensors = dict(foreign.tensors)
    network = restore_model(config, tensors, path).to(device).eval()
    return LoadedModel(network, config, tokenizer, Weights(tensors, config))


def run_config(foreign: ForeignModel, path: Path) -> tuple[RunConfig, Tokenizer]:
    """The configuration and the tokenizer of a run with this model. path: source of the model, for error messages.

    Raises TinyLMError for a tokenizer that cannot be used, or that has more ids than the model.
    """
    tokenizer = Tokenizer.parse(foreign.tokenizer, foreign.special, path)
    if tokenizer.vocab_size > foreign.config.vocab_size:
        raise TinyLMError(
            f"Cannot use {path}: its tokenizer has {tokenizer.vocab_size} ids, and its embedding has "
            f"{foreign.config.vocab_size} rows."
        )
    config = RunConfig.new(
        model=foreign.config,
        tokenizer=TokenizerConfig(
            kind=tokenizer.kind, sha256=tokenizer.sha256, special=foreign.special, chat_template=foreign.chat_template
        ),
        family=foreign.family,
    )
    return config, tokenizer
