"""Models that were converted for llama.cpp: their GGUF files in the cache, and the records that find them again.

The key of a record identifies the model's files by names and `file_state`, so that the files are not read again and
torch is not imported.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import tokenizers

from tinylm import __version__
from tinylm.config.run import RunConfig, run_of
from tinylm.config.validation import from_json
from tinylm.errors import TinyLMError
from tinylm.generation.generation_config import SpeedConfig
from tinylm.generation.llama_cpp import LlamaCpp, reason_against
from tinylm.generation.text_generator import TextGenerator
from tinylm.reporter import Reporter
from tinylm.system.files import (
    check_regular,
    file_state,
    is_private,
    is_settled,
    private_folder,
    read_json,
    resolve_links,
    write_text,
)
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.tokenizer_libraries import TokenizerLibraryError, wrap_library_errors

GGUF_FOLDER = "gguf"  # in the cache: converted files and records
LAYOUT = 3  # version of the converted files; increment it when the output of `write_gguf` changes
SUFFIXES = (".json", ".jinja", ".safetensors")  # of the files that are read to open a model folder
CHECKSUMS = ".sums"  # suffix of the file with the checksums of a converted file
BLOCK = 1 << 20  # bytes that have a checksum
MAX_BLOCKS = 256  # that are compared when a file is opened: a fifth of a second
GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # on Linux: NVIDIA, AMD and WSL


@dataclass(frozen=True)
class Conversion:
    """The record of a converted model.

    gguf: name of the GGUF file in GGUF_FOLDER. tokenizer: the tokenizer as JSON. embedding_rows, is_exact: see
    `LlamaCpp`. note: the note of `tinylm.load` about device and number format.
    """

    gguf: str
    config: RunConfig
    tokenizer: str
    embedding_rows: int
    is_exact: bool
    note: str

    def write(self, key: str) -> None:
        """Store the record in the cache. Failures are ignored, since the record only saves time."""
        with contextlib.suppress(OSError, TinyLMError):
            write_text(_record_file(key), json.dumps(asdict(self)))

    @property
    def file(self) -> Path:
        """The GGUF file."""
        return private_folder(GGUF_FOLDER) / Path(self.gguf).name

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer, which was validated before it was stored. Raises TinyLMError if the library fails."""
        try:
            with wrap_library_errors():
                library = tokenizers.Tokenizer.from_str(self.tokenizer)
        except TokenizerLibraryError as error:
            raise TinyLMError(f"Cannot read the tokenizer of {self.gguf} in the cache: {error}.") from error
        return Tokenizer(library, self.config.tokenizer.special)

    def open(self, tokenizer: Tokenizer, **sizes: int) -> LlamaCpp:
        """The model in llama.cpp. sizes: `samples` and `slots`. Raises the errors of `LlamaCpp`."""
        context = self.config.model.context
        return LlamaCpp(self.file, context, tokenizer, self.embedding_rows, self.is_exact, **sizes)

    @classmethod
    def read(cls, key: str) -> Self | None:
        """The record with this key; `None` if it does not exist or is not valid."""
        try:
            file = _record_file(key)
            values = read_json(file) if is_private(file) else None
            return None if values is None else from_json(cls, values)
        except (OSError, ValueError, OverflowError, TypeError, TinyLMError):
            return None


def conversion_key(path: Path, device: str, dtype: str, quantize: str) -> str | None:
    """The key of the model at `path`, as returned by `find_run`, with these settings.

    `None` if a file cannot be read, is a symbolic link in a folder or has just changed (`is_settled`), or if the device
    may be a GPU.
    """
    may_have_gpu = sys.platform != "linux" or any(map(os.path.exists, GPU_DEVICE_FILES))
    if device not in ("auto", "cpu") or (device == "auto" and may_have_gpu):
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
    identity = (__version__, LAYOUT, str(path.absolute()), files, device, dtype, quantize)
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _record_file(key: str) -> Path:
    return private_folder(GGUF_FOLDER) / f"{key}.json"


def take_cached(file: Path, block: int = BLOCK, max_blocks: int = MAX_BLOCKS) -> bool:
    """Whether the cache has this converted file as it was written; it is then marked as used now, since the least
    recently used files are deleted.

    block, max_blocks: bytes that have a checksum, and number of blocks that are compared
    """
    if not is_private(file) or not _is_intact(file, block, max_blocks):
        return False
    with contextlib.suppress(OSError):  # of a read-only cache
        os.utime(file)
    return True


def record_checksums(file: Path, block: int = BLOCK) -> None:
    """Store the checksums of the blocks of a converted file beside it. Raises OSError."""
    write_text(file.with_suffix(CHECKSUMS), json.dumps(list(_checksums(file, itertools.count(), block))))


def _is_intact(file: Path, block: int, max_blocks: int) -> bool:
    """Whether the file has its checksums: of all blocks of a small file, of the first, the last and some others, drawn
    anew each time, of a large one.
    """
    try:
        recorded = read_json(file.with_suffix(CHECKSUMS))
        count = -(-file.stat().st_size // block)
        if not isinstance(recorded, list) or len(recorded) != count:
            return False
        drawn: Iterable[int] = range(count)
        if count > max_blocks:
            drawn = {0, *random.Random().sample(range(count), max_blocks), count - 1}
        return all(recorded[n] == found for n, found in zip(drawn, _checksums(file, drawn, block), strict=True))
    except (OSError, ValueError):
        return False


def _checksums(file: Path, blocks: Iterable[int], block: int) -> Iterator[int]:
    """The CRC-32 of each of these blocks of so many bytes, up to the first one behind the end of the file."""
    with file.open("rb") as opened:
        for number in blocks:
            opened.seek(number * block)
            if not (content := opened.read(block)):
                return
            yield zlib.crc32(content)


def open_converted(key: str, speed: SpeedConfig, reporter: Reporter) -> TextGenerator | None:
    """The model with this key from its converted file. `None` if there is no usable record or file, or `reason_against`
    llama.cpp.
    """
    record = None if reason_against(speed) else Conversion.read(key)
    if record is None or not take_cached(record.file):
        return None
    try:
        tokenizer = record.open_tokenizer()
        engine = record.open(tokenizer)
    except (OSError, TinyLMError):
        return None
    reporter.note(record.note)
    return TextGenerator(config=record.config, tokenizer=tokenizer, engine=engine, reporter=reporter)
