"""Encode streams of text into token files, or in memory, and open token files.

A token folder contains train.bin and val.bin, which are arrays of ids, and tokens.json, an index with the hashes of the
files. A long part has several files (shards): train.bin, train-00001.bin and so on. In the cache, the name of the
folder is its key (`token_key`).
"""

import contextlib
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinylm import __version__
from tinylm.errors import DamagedError, TinyLMError
from tinylm.system.cache_directory import is_private_entry
from tinylm.system.files import (
    FolderHandle,
    check_folder,
    file_state,
    is_system_failure,
    open_regular,
    read_json,
    remove_tree,
    write_text,
)
from tinylm.system.process_signals import temporary
from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import Stream, rechunk
from tinylm.text.parallel_encoding import Encode, TextBatch, encode_batches
from tinylm.text.sharded_tokens import ShardedTokens, Tokens
from tinylm.text.tokenizer import Tokenizer

FORMAT_VERSION = 2  # of a token folder; part of its key
SHARD_TOKENS = 1 << 26  # ids after which the next shard begins
MAX_CHUNK = 1 << 24  # characters; a longer chunk is encoded without waiting for a safe split point
BATCH_CHARACTERS = 1 << 19  # a batch ends with the chunk that reaches this number
MAX_INDEX_BYTES = 1 << 23  # of tokens.json: about 30,000 shards
CHECK_CHUNK = 1 << 24  # ids compared with the vocabulary size at a time
UNFINISHED_SUFFIX = ".tokens"  # of a folder that is being written
STALE_SECONDS = 7 * 86_400.0  # an unfinished folder without a write for this long is deleted


@dataclass(frozen=True)
class TokenFolder:
    """Token files of a text. train, val: arrays of ids or codes (`Encoding`), (N,) of `smallest_dtype`."""

    path: Path
    train: Tokens
    val: Tokens

    @classmethod
    def open(cls, path: Path, key: str, vocab_size: int, *, mapped: bool = True) -> "TokenFolder":
        """Open both parts; arguments and errors as for `open_part`."""
        train, val = (open_part(path, part, key, vocab_size, mapped=mapped) for part in ("train", "val"))
        return cls(path, train, val)


def open_part(
    path: Path, part: str, key: str, vocab_size: int, *, mapped: bool = True, trust_mtime: bool = False
) -> Tokens:
    """Open one part, "train" or "val", of the token folder at `path`: (N,) of `smallest_dtype`, read-only if `mapped`.

    The folder is untrusted, so the dtype of the ids, their number, their SHA-256 and their range (below `vocab_size`)
    are checked. If there are several shards, hash and range of a shard are checked when it is first read, unless it is
    in the user's cache and has not changed since it was written. For an Encoding with flags, `vocab_size` is the number
    of codes. With `trust_mtime`, the hash is not computed if size and modification time are as recorded. With `mapped`,
    the files are memory-mapped; otherwise they are read into memory.

    Raises DamagedError if the folder is incomplete or damaged, or has another `key`, and TinyLMError if the system
    cannot read it; with several shards, also later, when a shard is read.
    """
    with _report_damage(path):
        check_folder(path)
        index = read_json(path / "tokens.json", MAX_INDEX_BYTES)
        if index["key"] != key:
            raise ValueError("it is the encoding of another text")
        if isinstance(index[part], dict):
            with open_regular(path / f"{part}.bin") as file:
                return _open_ids(file, f"{part}.bin", index[part], vocab_size, mapped, trust_mtime)
        shards = _Shards(path, part, index[part], vocab_size, trust_mtime)
        tokens = ShardedTokens(shards.sizes, np.dtype(smallest_dtype(vocab_size)), shards.open)
        return tokens if mapped else np.asarray(tokens)


@contextlib.contextmanager
def _report_damage(path: Path) -> Iterator[None]:
    """Context manager that turns errors in the content of the token folder at `path` into a DamagedError, and failures
    of the system (`is_system_failure`) into a TinyLMError.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        if is_system_failure(error):
            name = Path(getattr(error, "filename", None) or path).name
            raise TinyLMError(
                f"Cannot read the encoded text in {path} ({name}: {reason}); it is kept. Run the command again, or "
                "delete that folder to encode the text again."
            ) from error
        raise DamagedError(f"The encoded text in {path} is damaged ({reason}); delete that folder.") from error


def shard_name(part: str, index: int) -> str:
    """The file name of shard number `index` of a part."""
    return f"{part}-{index:05}.bin" if index else f"{part}.bin"


class _Shards:
    """The shards of a part with several files.

    Raises OSError, ValueError, KeyError or TypeError unless all have the sizes in `records`, the list in tokens.json.
    sizes: ids per shard.
    """

    def __init__(
        self, path: Path, part: str, records: list[dict[str, Any]], vocab_size: int, trust_mtime: bool
    ) -> None:
        if type(records) is not list or not records:
            raise ValueError("tokens.json lists no shards")
        self._path = path
        self._folder = FolderHandle(path)  # stays valid when a complete run directory is renamed
        self._part = part
        self._records = records
        self._vocab_size = vocab_size
        self._trust_mtime = trust_mtime
        self.sizes = [self._check_size(index) for index in range(len(records))]
        # By shard: its status (`file_state`) when it was last checked or, in the user's cache, written.
        trusted = is_private_entry(path, "tokens")
        self._checked = {index: record.get("status") for index, record in enumerate(records) if trusted}

    def _check_size(self, index: int) -> int:
        name, record = shard_name(self._part, index), self._records[index]
        with self._folder.open(name) as file:
            _require_size(file, name, record, self._vocab_size)
        if not record["tokens"]:
            raise ValueError(f"{name} is empty")
        return int(record["tokens"])

    def open(self, index: int) -> np.ndarray:
        """Map a shard: (sizes[index],). Checks it unless its status is that of the last check, or of writing.

        Raises DamagedError and TinyLMError as `open_part` does.
        """
        name = shard_name(self._part, index)
        with _report_damage(self._path), self._folder.open(name) as file:
            status = file_state(os.fstat(file.fileno()))
            if self._checked.get(index) == status:
                return _map(file, _require_size(file, name, self._records[index], self._vocab_size))
            ids = _open_ids(file, name, self._records[index], self._vocab_size, True, self._trust_mtime)
            self._checked[index] = status
            return ids


def _require_size(file: BufferedReader, name: str, record: dict[str, Any], vocab_size: int) -> np.dtype[Any]:
    """The dtype of the ids in a file.

    Raises ValueError unless dtype and number of the ids are as recorded, KeyError and TypeError for an invalid record.
    """
    dtype = np.dtype(smallest_dtype(vocab_size))
    if record["dtype"] != dtype.name:  # never pass an untrusted dtype to numpy: "O" reads pointers from the file
        raise ValueError(f"the ids of {name} must be {dtype.name}")
    if type(record["tokens"]) is not int or os.fstat(file.fileno()).st_size != record["tokens"] * dtype.itemsize:
        raise ValueError(f"the size of {name} differs from tokens.json")
    return dtype


def _open_ids(
    file: BufferedReader, name: str, record: dict[str, Any], vocab_size: int, mapped: bool, trust_mtime: bool
) -> np.ndarray:
    """Check the ids of a file, and map or read them: (N,). Errors as for `_require_size`, also for damaged ids."""
    dtype = _require_size(file, name, record, vocab_size)
    unchanged = trust_mtime and os.fstat(file.fileno()).st_mtime_ns == record["changed"]
    if not unchanged and hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
        raise ValueError(f"the SHA-256 of {name} differs from tokens.json")
    file.seek(0)
    # An empty file cannot be mapped.
    ids = _map(file, dtype) if record["tokens"] and mapped else np.frombuffer(file.read(), dtype=dtype)
    if np.iinfo(dtype).max >= vocab_size:
        for start in range(0, len(ids), CHECK_CHUNK):
            if ids[start : start + CHECK_CHUNK].max() >= vocab_size:
                raise ValueError(f"{name} has an id that is not in the vocabulary")
    return ids


def _map(file: BufferedReader, dtype: np.dtype[Any]) -> np.ndarray:
    return np.memmap(file, dtype=dtype, mode="r")


def token_key(
    fingerprint: str,
    val_fingerprint: str | None,
    train_characters: int,
    tokenizer: Tokenizer,
    encoder: str,
    val_records: int = 0,
) -> str:
    """The key of a token folder in the cache: a hash of the text, its split, the tokenizer and the encoder.

    `encoder` contains the version of the package that encodes, if any, since another version could give other ids.
    """
    identity = [FORMAT_VERSION, fingerprint, val_fingerprint, train_characters, tokenizer.sha256, encoder]
    identity += [val_records] if val_records else []
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


class Encoding(NamedTuple):
    """How the documents of a corpus are encoded, as codes: a code is a token id plus flags.

    batches: divides the documents into batches, deterministically. encode: returns the codes of a batch, (N,).
    codes_per_id: number of codes per token id; 1 without flags. least_values: number of values of
        a code if it may stand for something else than a token id. has_special: whether the texts have special tokens,
        which gigatoken does not encode.
    """

    batches: Callable[[Iterator[Any], Tokenizer], Iterator[TextBatch]]
    encode: Encode
    codes_per_id: int
    least_values: int = 0
    has_special: bool = False

    def codes(self, vocab_size: int) -> int:
        """The number of codes with a vocabulary of this size."""
        return self.codes_per_id * max(vocab_size, self.least_values)


class SplitDocuments(NamedTuple):
    """The documents of a split text: functions that return those of each part, and how they are encoded.

    encoding: `None` for TEXT_ENCODING; then the functions return streams of text.
    """

    train: Callable[[], Iterator[Any]]
    val: Callable[[], Iterator[Any]]
    encoding: Encoding | None = None


def encode_to_folder(
    folder: Path,
    key: str,
    documents: SplitDocuments,
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    mapped: bool = True,
    resumable: bool = False,
) -> TokenFolder:
    """Encode both parts into the token folder `folder`, which is created atomically, or open it if it is valid.

    The functions of `documents` are not called if a valid folder exists; a damaged one is deleted. `progress` receives
    the number of characters encoded. With `resumable`, complete shards are kept if the encoding is interrupted, and the
    next call for the same folder continues after them.

    Raises TinyLMError if the folder cannot be written, or exists and cannot be read, UsageError for characters without
    an id, and the errors of the functions of `documents`.
    """
    encoding = documents.encoding or TEXT_ENCODING
    codes = encoding.codes(tokenizer.vocab_size)
    if os.path.lexists(folder):
        try:
            return TokenFolder.open(folder, key, codes, mapped=mapped)
        except DamagedError:
            remove_tree(folder)
            if os.path.lexists(folder):
                raise
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(folder.parent)
        with _unfinished_folder(folder, resumable) as unfinished:
            index = _UnfinishedIndex(unfinished, key, codes, resumable)
            for part, stream in (("train", documents.train), ("val", documents.val)):
                _write_part(index, part, stream(), encoding, tokenizer, progress)
            index.finish()
            try:
                unfinished.replace(folder)
            except OSError:
                if not folder.exists():  # if it does, another process has encoded the same text
                    raise
                remove_tree(unfinished)
    except OSError as error:
        again = " and run the command again, which continues the encoding" if resumable else ""
        raise TinyLMError(
            f"Cannot write the encoded text to {folder.parent}: {error.strerror}. Free some space there{again}, or set "
            "TINYLM_CACHE to another folder."
        ) from error
    # Hashes the files again, so that damage by the disk shows now.
    return TokenFolder.open(folder, key, codes, mapped=mapped)


@contextlib.contextmanager
def _unfinished_folder(folder: Path, resumable: bool) -> Iterator[Path]:
    """Context manager that yields a folder to write to, which the caller renames to `folder`.

    Only one process at a time uses the resumable folder, which is kept after an error. Any other process, and a process
    that is not resumable, uses a temporary folder, which is deleted.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0)
    if resumable:
        with contextlib.suppress(OSError, NotImplementedError, Timeout):
            lock.acquire()
    if lock.is_locked:
        unfinished = folder.with_name(f".{folder.name}{UNFINISHED_SUFFIX}")
        try:
            unfinished.mkdir(mode=0o700, exist_ok=True)
            yield unfinished
        finally:
            with contextlib.suppress(OSError):  # Windows cannot delete an open file
                Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
        return
    unfinished = Path(tempfile.mkdtemp(prefix=".", suffix=UNFINISHED_SUFFIX, dir=folder.parent))
    try:
        with temporary(unfinished):
            yield unfinished
    finally:
        remove_tree(unfinished)


class _UnfinishedIndex:
    """The index of a token folder that is being written: the records of its complete shards, by part."""

    def __init__(self, folder: Path, key: str, codes: int, resumable: bool) -> None:
        """Keep the records of an earlier process if `key` and version are the same and the file sizes match.

        Raises TinyLMError if the system cannot read them.
        """
        self.folder = folder
        self._resumable = resumable
        self.codes = codes
        self._head = {"key": key, "version": __version__}
        self.shards: dict[str, list[dict[str, Any]]] = {"train": [], "val": []}
        with contextlib.suppress(DamagedError), _report_damage(folder):
            found = read_json(folder / "tokens.json", MAX_INDEX_BYTES)
            if all(found[name] == value for name, value in self._head.items()):
                shards = {part: list(found[part]) for part in self.shards}
                for part, records in shards.items():
                    for number, record in enumerate(records):
                        with open_regular(folder / shard_name(part, number)) as file:
                            _require_size(file, file.name, record, codes)
                        if type(record["batches"]) is not int:
                            raise TypeError
                self.shards = shards

    def add(self, part: str, record: dict[str, Any]) -> None:
        """Add the record of a complete shard, and save the index if the encoding is resumable."""
        self.shards[part].append(record)
        if self._resumable:
            write_text(self.folder / "tokens.json", json.dumps({**self._head, **self.shards}))

    def finish(self) -> None:
        """Write the final index, in which a part with one shard is the record of that shard."""
        parts = {part: records[0] if len(records) == 1 else records for part, records in self.shards.items()}
        write_text(self.folder / "tokens.json", json.dumps({**self._head, **parts}))


def remove_stale(folder: Path) -> None:
    """Delete the unfinished token folders in `folder` without a write for STALE_SECONDS."""
    for path in folder.glob(f".*{UNFINISHED_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may be deleting it
            changed = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
            if time.time() - changed > STALE_SECONDS:
                remove_tree(path)


def _write_part(
    index: _UnfinishedIndex,
    part: str,
    documents: Iterator[Any],
    encoding: Encoding,
    tokenizer: Tokenizer,
    progress: Progress,
) -> None:
    """Write the shards of a part that are not complete yet; one empty shard for a part without ids."""
    shards = index.shards[part]
    batches = encoding.batches(documents, tokenizer)
    for batch in itertools.islice(batches, sum(record["batches"] for record in shards)):
        progress(batch.characters)
    dtype = smallest_dtype(index.codes)
    # A generator has `close`, although it is annotated as an Iterator.
    with contextlib.closing(encode_batches(batches, encoding.encode, tokenizer, dtype)) as encoded:  # type: ignore[type-var]
        for first in encoded:  # another shard, only if something is left
            path = index.folder / shard_name(part, len(shards))
            index.add(part, _write_shard(path, itertools.chain([first], encoded), dtype, progress))
    if not shards:
        index.add(part, _write_shard(index.folder / shard_name(part, 0), iter([]), dtype, progress))


def _write_shard(
    path: Path, encoded: Iterator[tuple[np.ndarray, int]], dtype: type[np.generic], progress: Progress
) -> dict[str, Any]:
    """Write one shard of the ids of `encoded`: pairs of a batch's ids, (N,), and its number of characters.

    Returns the record of the shard in tokens.json. Deletes the file after an error.
    """
    digest = hashlib.sha256()
    count = batches = 0
    try:
        with path.open("wb") as file:
            for ids, characters in encoded:
                data = ids.tobytes()
                digest.update(data)
                file.write(data)
                count += len(ids)
                batches += 1
                progress(characters)
                if count >= SHARD_TOKENS:
                    break
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sizes = {"dtype": np.dtype(dtype).name, "tokens": count, "batches": batches}
    return {**sizes, "sha256": digest.hexdigest(), "changed": status.st_mtime_ns, "status": file_state(status)}


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer dtype for the ids of a vocabulary."""
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32


BEGIN = ""  # at the beginning of the first batch of a text; BOS follows if the tokenizer has one


def _text_batches(stream: Stream, tokenizer: Tokenizer) -> Iterator[TextBatch]:
    """Yield batches whose content is a list of chunks of text, with `None` between documents, and BEGIN at first."""
    chunks: list[str | None] = [BEGIN]
    characters = 0
    for chunk in rechunk(stream, tokenizer.safe_split_point, MAX_CHUNK):
        chunks.append(chunk)
        characters += len(chunk or "")
        if characters >= BATCH_CHARACTERS:
            yield TextBatch(chunks, characters)
            chunks, characters = [], 0
    if chunks:
        yield TextBatch(chunks, characters)


def record_batches(examples: Iterator[Any], tokenizer: Tokenizer) -> Iterator[TextBatch]:
    """Yield batches whose content is a list of examples, with a `text` each."""
    batch: list[Any] = []
    characters = 0
    for example in examples:
        batch.append(example)
        characters += len(example.text)
        if characters >= BATCH_CHARACTERS:
            yield TextBatch(batch, characters)
            batch, characters = [], 0
    if batch:
        yield TextBatch(batch, characters)


def _encode_text(chunks: list[str | None], tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a batch, (N,) of uint32, including BOS and end-of-text ids."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    first = np.array(begin, dtype=np.uint32)
    between = np.array([tokenizer.end_of_text_id, *begin], dtype=np.uint32)
    return np.concatenate(
        [tokenizer.encode(chunk) if chunk else between if chunk is None else first for chunk in chunks]
    )


TEXT_ENCODING = Encoding(_text_batches, _encode_text, 1)


def encode_stream(stream: Stream, tokenizer: Tokenizer, progress: Progress = no_progress) -> np.ndarray:
    """Encode a stream in memory: (N,) of `smallest_dtype`, including BOS and end-of-text ids.

    `progress` receives the number of characters encoded. Raises UsageError for characters without an id.
    """
    return encode_in_memory(stream, tokenizer, TEXT_ENCODING, progress)


def encode_in_memory(
    documents: Iterator[Any], tokenizer: Tokenizer, encoding: Encoding, progress: Progress
) -> np.ndarray:
    """As `encode_stream`, for documents of any kind: the codes of `encoding`."""
    dtype = smallest_dtype(encoding.codes(tokenizer.vocab_size))
    parts = [np.zeros(0, dtype=dtype)]
    for ids, characters in encode_batches(encoding.batches(documents, tokenizer), encoding.encode, tokenizer, dtype):
        parts.append(ids)
        progress(characters)
    return np.concatenate(parts)
