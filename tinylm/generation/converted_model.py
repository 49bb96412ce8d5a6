"""Text generation with models already converted for llama.cpp, without importing torch (decision 025).

A record in the cache names the GGUF file of a model. The key of the record identifies the model's files by names and
`file_state`, so that the files are not read again.
"""

import contextlib
import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import tokenizers

from tinylm import __version__
from tinylm.config.run import DataConfig, RunConfig, run_of
from tinylm.config.serialization import from_json
from tinylm.config.validation import require
from tinylm.errors import TinyLMError
from tinylm.generation.continuation import Continuation
from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
from tinylm.generation.llama_cpp import LlamaCpp, import_llama_cpp
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.text_generator import TextGenerator
from tinylm.reporter import Reporter
from tinylm.system.cache_directory import is_private, private_folder
from tinylm.system.files import check_regular, file_state, is_settled, read_json, replacing, resolve_links
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.tokenizer_errors import TokenizerLibraryError, wrap_library_errors

GGUF_FOLDER = "gguf"  # in the cache: converted files and records
LAYOUT = 3  # version of the converted files; increment it when the output of `write_gguf` changes
SUFFIXES = (".json", ".jinja", ".safetensors")  # of the files that are read to open a model folder
GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # device files on Linux: NVIDIA, AMD and WSL


@dataclass(frozen=True)
class Conversion:
    """The record of a converted model.

    gguf: name of the GGUF file in GGUF_FOLDER. tokenizer: the tokenizer as JSON. rows, is_exact: see `LlamaCpp`.
    note: see `ConvertedModel`.
    """

    gguf: str
    config: RunConfig
    tokenizer: str
    rows: int
    is_exact: bool
    note: str

    def write(self, key: str) -> None:
        """Store the record in the cache. Failures are ignored, since the record only saves time."""
        with contextlib.suppress(OSError, TinyLMError), replacing(_record_file(key)) as unfinished:
            unfinished.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, key: str) -> Self | None:
        """The record with this key; `None` if it does not exist or is not valid."""
        try:
            file = _record_file(key)
            values = read_json(file) if is_private(file) else None
            return None if values is None else from_json(cls, values)
        except (OSError, ValueError, OverflowError, TypeError, TinyLMError):
            return None


def conversion_key(path: Path, device: str, dtype: str, quantize: str, serves: bool = False) -> str | None:
    """The key of the model at `path`, as returned by `find_run`, with these settings. serves: see `convert`.

    `None` if a file cannot be read, is a symbolic link in a folder or has just changed (`is_settled`), or if the device
    may be a GPU.
    """
    if device not in ("auto", "cpu") or (device == "auto" and _may_have_gpu()):
        return None
    path = resolve_links(path)  # the user named it
    try:
        folders = dict.fromkeys((path, run_of(path))) if path.is_dir() else ()
        paths = sorted(entry for folder in folders for entry in folder.iterdir() if entry.suffix in SUFFIXES) or [path]
        states = [check_regular(file) for file in paths]
    except OSError:
        return None
    if not all(map(is_settled, states)):
        return None
    files = [(file.name, *file_state(state)) for file, state in zip(paths, states, strict=True)]
    identity = (__version__, LAYOUT, str(path.absolute()), files, device, dtype, quantize, serves)
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _may_have_gpu() -> bool:
    """Whether torch may find a GPU: always on systems other than Linux; on Linux, if a GPU device file exists."""
    return sys.platform != "linux" or any(map(os.path.exists, GPU_DEVICE_FILES))


def _record_file(key: str) -> Path:
    return private_folder(GGUF_FOLDER) / f"{key}.json"


def mark_used(file: Path) -> None:
    """Set the modification time of a cached file to now, since the least recently used files are deleted.

    Failures are ignored, such as those of a read-only cache.
    """
    with contextlib.suppress(OSError):
        os.utime(file)


@dataclass(eq=False)
class ConvertedModel(TextGenerator):
    """A decoder from a converted file, run by llama.cpp. note: the note of `load` about device and number format."""

    config: RunConfig
    tokenizer: Tokenizer
    engine: LlamaCpp
    reporter: Reporter
    note: str
    data: DataConfig | None = field(init=False)

    def __post_init__(self) -> None:
        self.data = self.config.data

    def close(self) -> None:
        """See `TextGenerator.close`."""
        self.engine.close()

    def continue_encoded(self, encoded: EncodedPrompt, config: GenerationConfig, first_stream: int = 0) -> Continuation:
        """See `TextGenerator.continue_encoded`. The engine was chosen by `open_converted`."""
        require(config.json_schema is None, '`json_schema` needs `engine="torch"`.')
        return Continuation(self.engine, self.tokenizer, [encoded], config, first_stream)


def open_converted(key: str, speed: SpeedConfig, reporter: Reporter) -> ConvertedModel | None:
    """The model with this key from its converted file.

    `None` if there is no usable record or file, xllamacpp is not installed, or the settings need torch.
    """
    if speed.engine == "torch" or not speed.cache or import_llama_cpp() is None:
        return None
    record = Conversion.read(key)
    if record is None:
        return None
    file = private_folder(GGUF_FOLDER) / Path(record.gguf).name
    if not is_private(file):
        return None
    try:
        with wrap_library_errors():  # the tokenizer was validated before it was stored
            library = tokenizers.Tokenizer.from_str(record.tokenizer)
        tokenizer = Tokenizer(library, record.config.tokenizer.special)
        engine = LlamaCpp(file, record.config.model.context, tokenizer.vocab_size, record.rows, record.is_exact)
        mark_used(file)
    except (OSError, TinyLMError, TokenizerLibraryError):
        return None
    return ConvertedModel(record.config, tokenizer, engine, reporter, record.note)
