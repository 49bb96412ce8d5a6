"""Encode streams of text into token files, or in memory, and open token files.

A token folder contains train.bin and val.bin, which are arrays of ids, and tokens.json with their hashes. In the cache,
the folder is named after a hash of the text and the tokenizer.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinylm.errors import TinyLMError
from tinylm.files import check_folder, open_regular, read_json, remove_tree
from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import Stream, rechunk
from tinylm.text.tokenizer import Tokenizer

FORMAT_VERSION = 2  # of a token folder; part of its key
MAX_CHUNK = 1 << 24  # characters; a longer chunk is encoded without waiting for a safe split point
MAX_RECORD_BYTES = 1 << 16  # of tokens.json
CHECK_CHUNK = 1 << 24  # ids compared with the vocabulary size at a time
UNFINISHED_SUFFIX = ".tokens"  # of a folder that is being written
STALE_SECONDS = 86_400.0  # an unfinished folder without a write for this long is deleted


@dataclass(frozen=True)
class TokenFolder:
    """The token files of a text: `train` and `val` are read-only arrays of ids, (N,) of `smallest_dtype`."""

    path: Path
    train: np.ndarray
    val: np.ndarray

    @classmethod
    def open(cls, path: Path, key: str, vocab_size: int, *, mapped: bool = True) -> "TokenFolder":
        """Open both parts; arguments and errors as for `open_part`."""
        train, val = (open_part(path, part, key, vocab_size, mapped=mapped) for part in ("train", "val"))
        return cls(path, train, val)


def open_part(
    path: Path, part: str, key: str, vocab_size: int, *, mapped: bool = True, trust_mtime: bool = False
) -> np.ndarray:
    """Open one part, "train" or "val", of the token folder at `path`: (N,), read-only.

    The folder is untrusted, so the dtype of the ids, their number, their SHA-256 and their range (below `vocab_size`)
    are checked. For an Encoding, `vocab_size` is the number of its codes. With `trust_mtime`, the hash is not
    computed if size and modification time are as recorded. `mapped` memory-maps the file instead of reading it.

    Raises TinyLMError if the folder is incomplete or damaged, or has another `key`.
    """
    try:
        check_folder(path)
        record = read_json(path / "tokens.json", MAX_RECORD_BYTES)
        if record["key"] != key:
            raise ValueError("it is the encoding of another text")
        return _open_ids(path / f"{part}.bin", record[part], vocab_size, mapped, trust_mtime)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TinyLMError(f"The encoded text in {path} is damaged ({reason}); delete that folder.") from error


def _open_ids(path: Path, record: dict[str, Any], vocab_size: int, mapped: bool, trust_mtime: bool) -> np.ndarray:
    dtype = np.dtype(smallest_dtype(vocab_size))
    if record["dtype"] != dtype.name:  # never pass an untrusted dtype to numpy: "O" reads pointers from the file
        raise ValueError(f"the ids of {path.name} must be {dtype.name}")
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if type(record["tokens"]) is not int or status.st_size != record["tokens"] * dtype.itemsize:
            raise ValueError(f"the size of {path.name} differs from tokens.json")
        unchanged = trust_mtime and status.st_mtime_ns == record["changed"]
        if not unchanged and hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
            raise ValueError(f"the SHA-256 of {path.name} differs from tokens.json")
        file.seek(0)
        if status.st_size and mapped:
            ids: np.ndarray = np.memmap(file, dtype=dtype, mode="r")
        else:  # an empty file cannot be mapped
            ids = np.frombuffer(file.read(), dtype=dtype)
    if np.iinfo(dtype).max >= vocab_size:
        for start in range(0, len(ids), CHECK_CHUNK):
            if ids[start : start + CHECK_CHUNK].max() >= vocab_size:
                raise ValueError(f"{path.name} has an id that is not in the vocabulary")
    return ids


def token_key(
    fingerprint: str, val_fingerprint: str | None, train_characters: int, tokenizer: Tokenizer, encoder: str
) -> str:
    """The key of a token folder in the cache: a hash of the text, its split, the tokenizer and the encoder.

    `encoder` is a package and its version, since versions could give different ids.
    """
    identity = json.dumps([FORMAT_VERSION, fingerprint, val_fingerprint, train_characters, tokenizer.sha256, encoder])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


class Encoding(NamedTuple):
    """How the documents of a corpus are encoded, as codes: a code is a token id plus flags.

    encode: yields the codes, (N,) of uint32, and the number of characters of each part of the documents, in order.
    codes_per_id: number of codes per token id; 1 without flags.
    """

    encode: Callable[[Iterator[Any], Tokenizer], Iterator[tuple[np.ndarray, int]]]
    codes_per_id: int


def encode_to_folder(
    folder: Path,
    key: str,
    train: Callable[[], Iterator[Any]],
    val: Callable[[], Iterator[Any]],
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    encoding: Encoding | None = None,
    mapped: bool = True,
) -> TokenFolder:
    """Encode both parts into the token folder `folder`, which is created atomically, or open it if it is valid.

    `train` and `val` return the documents of the parts for `encoding`, by default streams of text; they are not called
    if a valid folder exists. `progress` receives the number of characters encoded. Raises TinyLMError if the folder
    cannot be written, and UsageError for characters without an id.
    """
    encoding = encoding or TEXT_ENCODING
    codes = encoding.codes_per_id * tokenizer.vocab_size
    if os.path.lexists(folder):
        with contextlib.suppress(TinyLMError):
            return TokenFolder.open(folder, key, codes, mapped=mapped)
        remove_tree(folder)
    unfinished = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(folder.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=".", suffix=UNFINISHED_SUFFIX, dir=folder.parent))
        record = {
            part: _write_tokens(unfinished / f"{part}.bin", encoding.encode(documents(), tokenizer), codes, progress)
            for part, documents in (("train", train), ("val", val))
        }
        (unfinished / "tokens.json").write_text(json.dumps({"key": key, **record}))
        try:
            unfinished.replace(folder)
        except OSError:
            if not folder.exists():  # if it does, another process has encoded the same text
                raise
    except OSError as error:
        raise TinyLMError(
            f"Cannot write the encoded text to {folder.parent}: {error.strerror}. Free some space there, or set "
            "TINYLM_CACHE to another folder."
        ) from error
    finally:
        if unfinished is not None:
            remove_tree(unfinished)
    return TokenFolder.open(folder, key, codes, mapped=mapped)


def remove_stale(folder: Path) -> None:
    """Delete the unfinished token folders that killed processes left in `folder`."""
    for path in folder.glob(f".*{UNFINISHED_SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may be deleting it
            changed = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
            if time.time() - changed > STALE_SECONDS:
                remove_tree(path)


def _write_tokens(
    path: Path, parts: Iterator[tuple[np.ndarray, int]], codes: int, progress: Progress
) -> dict[str, Any]:
    """Write the ids of all parts, which are below `codes`. Returns the file's record in tokens.json."""
    dtype = smallest_dtype(codes)
    digest = hashlib.sha256()
    count = 0
    with path.open("wb") as file:
        for ids, characters in parts:
            data = ids.astype(dtype).tobytes()
            digest.update(data)
            file.write(data)
            count += len(ids)
            progress(characters)
        file.flush()
        os.fsync(file.fileno())
        changed = os.fstat(file.fileno()).st_mtime_ns
    return {"dtype": np.dtype(dtype).name, "tokens": count, "sha256": digest.hexdigest(), "changed": changed}


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer dtype for the ids of a vocabulary."""
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _encoded_chunks(stream: Stream, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ids, (N,) of uint32, and the number of characters of each chunk, in order.

    A thread pool encodes up to two chunks per CPU ahead of the caller.
    """
    workers = os.cpu_count() or 1
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    between = np.array([tokenizer.end_of_text_id, *begin], dtype=np.uint32)
    yield np.array(begin, dtype=np.uint32), 0

    def encode(chunk: str | None) -> tuple[np.ndarray, int]:
        return (between, 0) if chunk is None else (tokenizer.encode(chunk), len(chunk))

    with ThreadPoolExecutor(workers) as pool:
        pending: deque[Future[tuple[np.ndarray, int]]] = deque()
        for chunk in rechunk(stream, tokenizer.safe_split_point, MAX_CHUNK):
            pending.append(pool.submit(encode, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


TEXT_ENCODING = Encoding(_encoded_chunks, 1)


def encode_stream(stream: Stream, tokenizer: Tokenizer, progress: Progress = no_progress) -> np.ndarray:
    """Encode a stream in memory: (N,) of `smallest_dtype`, with the ids that begin and separate documents.

    `progress` receives the number of characters encoded. Raises UsageError for characters without an id.
    """
    return encode_in_memory(stream, tokenizer, TEXT_ENCODING, progress)


def encode_in_memory(
    documents: Iterator[Any], tokenizer: Tokenizer, encoding: Encoding, progress: Progress = no_progress
) -> np.ndarray:
    """As `encode_stream`, for documents of any kind and the codes of `encoding`."""
    dtype = smallest_dtype(encoding.codes_per_id * tokenizer.vocab_size)
    parts = [np.zeros(0, dtype=dtype)]
    for ids, characters in encoding.encode(documents, tokenizer):
        parts.append(ids.astype(dtype))
        progress(characters)
    return np.concatenate(parts)
