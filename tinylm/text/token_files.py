"""Token files: the encoded text of a run, in a folder that can be checked, and whose writing can be continued.

A token folder contains train.bin and val.bin, which are arrays of ids, and tokens.json, an index with the hashes of the
files. A long part has several files (shards): train.bin, train-00001.bin and so on. In the cache, the name of the
folder is its key (`token_key`).
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from tinylm import __version__
from tinylm.errors import DamagedError, TinyLMError
from tinylm.system.files import (
    FolderHandle,
    check_folder,
    file_state,
    is_private_entry,
    is_system_failure,
    open_regular,
    read_json,
    remove_tree,
    write_text,
)
from tinylm.system.process_signals import temporary
from tinylm.text.files import Progress
from tinylm.text.parallel_encoding import TEXT_ENCODING, Encoding, encode_batches, smallest_dtype
from tinylm.text.tokenizer import Tokenizer

MAX_OPEN_SHARDS = 128  # each keeps a file open, and some systems allow 256 per process


class ShardedTokens:
    """The ids of all shards as one read-only array, (N,), indexed by an integer or a slice with step 1.

    sizes: ids per shard. dtype: of the ids. open_shard: opens the shard with a given index: (sizes[index],). It is
    called when the shard is first read, and again if MAX_OPEN_SHARDS other shards were read since.
    """

    ndim = 1

    def __init__(self, sizes: Sequence[int], dtype: np.dtype[Any], open_shard: Callable[[int], np.ndarray]) -> None:
        self.dtype = dtype
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - sizes
        self._shard = functools.lru_cache(maxsize=MAX_OPEN_SHARDS)(open_shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: int | slice) -> Any:
        """An id, or the ids of a slice, (M,).

        Raises IndexError, ValueError for a slice with another step than 1, and the errors of `open_shard`.
        """
        if not isinstance(key, slice):
            index = range(len(self))[key]
            shard = int(np.searchsorted(self._ends, index, side="right"))
            return self._shard(shard)[index - int(self._starts[shard])]
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError("ids of several shards are read with step 1")
        if start >= stop:
            return np.zeros(0, dtype=self.dtype)
        first, last = np.searchsorted(self._ends, [start, stop - 1], side="right")
        parts = [
            self._shard(shard)[max(start - self._starts[shard], 0) : stop - self._starts[shard]]
            for shard in map(int, range(first, last + 1))
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All ids in memory, (N,); called by `np.asarray`."""
        return np.asarray(self[:], dtype=dtype)


Tokens = np.ndarray | ShardedTokens


FORMAT_VERSION = 2  # of a token folder; part of its key
SHARD_TOKENS = 1 << 26  # ids after which the next shard begins
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


def open_part(path: Path, part: str, key: str, vocab_size: int, *, mapped: bool = True) -> Tokens:
    """Open one part, "train" or "val", of the token folder at `path`: (N,) of `smallest_dtype`, read-only if `mapped`.

    The folder is untrusted, so the dtype of the ids, their number, their SHA-256 and their range (below `vocab_size`)
    are checked. If there are several shards, hash and range of a shard are checked when it is first read, unless it is
    in the user's cache and has not changed since it was written. For an Encoding with flags, `vocab_size` is the number
    of codes. With `mapped`, the files are memory-mapped; otherwise they are read into memory.

    Raises DamagedError if the folder is incomplete or damaged, or has another `key`, and TinyLMError if the system
    cannot read it; with several shards, also later, when a shard is read.
    """
    with _report_damage(path):
        check_folder(path)
        index = read_json(path / "tokens.json", MAX_INDEX_BYTES)
        if index["key"] != key:
            raise ValueError("it is the encoding of another text")
        records = index[part]
        if isinstance(records, dict):
            with open_regular(path / f"{part}.bin") as file:
                return _open_ids(file, f"{part}.bin", records, vocab_size, mapped)
        if type(records) is not list or not records:
            raise ValueError("tokens.json lists no shards")
        folder = FolderHandle(path)  # stays valid when a complete run directory is renamed
        for number, record in enumerate(records):
            with folder.open(shard_name(part, number)) as file:
                _require_size(file, shard_name(part, number), record, vocab_size)
            if not record["tokens"]:
                raise ValueError(f"{shard_name(part, number)} is empty")
        # By shard: its status (`file_state`) when it was last checked or, in the user's cache, written.
        checked = {}
        if is_private_entry(path, "tokens"):
            checked = {number: record.get("status") for number, record in enumerate(records)}

    def open_shard(number: int) -> np.ndarray:
        name, record = shard_name(part, number), records[number]
        with _report_damage(path), folder.open(name) as file:
            status = file_state(os.fstat(file.fileno()))
            if checked.get(number) == status:
                return np.memmap(file, dtype=_require_size(file, name, record, vocab_size), mode="r")
            ids = _open_ids(file, name, record, vocab_size, True)
            checked[number] = status
            return ids

    sizes = [record["tokens"] for record in records]
    tokens = ShardedTokens(sizes, np.dtype(smallest_dtype(vocab_size)), open_shard)
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


def _open_ids(file: BufferedReader, name: str, record: dict[str, Any], vocab_size: int, mapped: bool) -> np.ndarray:
    """Check the ids of a file, and map or read them: (N,). Errors as for `_require_size`, also for damaged ids."""
    dtype = _require_size(file, name, record, vocab_size)
    if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
        raise ValueError(f"the SHA-256 of {name} differs from tokens.json")
    file.seek(0)
    # An empty file cannot be mapped.
    is_mapped = record["tokens"] and mapped
    ids = np.memmap(file, dtype=dtype, mode="r") if is_mapped else np.frombuffer(file.read(), dtype=dtype)
    if np.iinfo(dtype).max >= vocab_size:
        for start in range(0, len(ids), CHECK_CHUNK):
            if ids[start : start + CHECK_CHUNK].max() >= vocab_size:
                raise ValueError(f"{name} has an id that is not in the vocabulary")
    return ids


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


def encode_to_folder(
    folder: Path,
    key: str,
    documents: Callable[[str], Iterator[Any]],
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    encoding: Encoding = TEXT_ENCODING,
    mapped: bool = True,
    resumable: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> TokenFolder:
    """Encode both parts into the token folder `folder`, which is created atomically, or open it if it is valid.

    documents: returns those of the part "train" or "val". It is not called if a valid folder exists; a damaged one is
    deleted. `progress` receives the number of characters encoded. With `resumable`, complete shards are kept if the
    encoding is interrupted, and the next call for the same folder continues after them.

    Raises TinyLMError if the folder cannot be written, or exists and cannot be read, UsageError for characters without
    an id, and the errors of `documents`.
    """
    # Open the folder if it exists
    codes = encoding.codes(tokenizer.vocab_size)
    dtype = smallest_dtype(codes)
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
            # Keep the complete shards of an earlier process
            index = unfinished / "tokens.json"
            head = {"key": key, "version": __version__}
            shards = _complete_shards(unfinished, head, codes)

            # Write the others
            for part, records in shards.items():
                batches = encoding.batches(documents(part), tokenizer)
                for batch in itertools.islice(batches, sum(record["batches"] for record in records)):
                    progress(batch.characters)
                with contextlib.closing(encode_batches(batches, encoding.encode, tokenizer, dtype)) as encoded:
                    first = next(encoded, None)
                    while first is not None or not records:  # one empty shard for a part without ids
                        rest = encoded if first is None else itertools.chain([first], encoded)
                        path = unfinished / shard_name(part, len(records))
                        records.append(_write_shard(path, rest, dtype, progress, shard_tokens))
                        if resumable:
                            write_text(index, json.dumps({**head, **shards}))
                        first = next(encoded, None)

            # Write the index, in which a part with one shard is the record of that shard, and rename the folder
            parts = {part: records[0] if len(records) == 1 else records for part, records in shards.items()}
            write_text(index, json.dumps({**head, **parts}))
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


def _complete_shards(folder: Path, head: dict[str, str], codes: int) -> dict[str, list[dict[str, Any]]]:
    """The records of the complete shards in an unfinished folder, by part; none unless its index has this `head` and
    all files have the recorded sizes. Raises TinyLMError if the system cannot read them.
    """
    with contextlib.suppress(DamagedError), _report_damage(folder):
        found = read_json(folder / "tokens.json", MAX_INDEX_BYTES)
        if all(found[name] == value for name, value in head.items()):
            shards = {part: list(found[part]) for part in ("train", "val")}
            for part, records in shards.items():
                for number, record in enumerate(records):
                    with open_regular(folder / shard_name(part, number)) as file:
                        _require_size(file, file.name, record, codes)
                    if type(record["batches"]) is not int:
                        raise TypeError
            return shards
    return {"train": [], "val": []}


def remove_stale(folder: Path) -> None:
    """Delete the unfinished token folders in `folder` without a write for STALE_SECONDS."""
    for path in folder.glob(f".*{UNFINISHED_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may be deleting it
            changed = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
            if time.time() - changed > STALE_SECONDS:
                remove_tree(path)


def _write_shard(
    path: Path,
    encoded: Iterator[tuple[np.ndarray, int]],
    dtype: type[np.generic],
    progress: Progress,
    shard_tokens: int,
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
                if count >= shard_tokens:
                    break
            file.flush()
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sizes = {"dtype": np.dtype(dtype).name, "tokens": count, "batches": batches}
    return {**sizes, "sha256": digest.hexdigest(), "status": file_state(status)}
