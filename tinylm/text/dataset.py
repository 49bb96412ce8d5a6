"""From text to token ids on disk, and from there to training batches.

Token files are memory-mapped and kept in a cache, under a name made from the text's and the tokenizer's hashes.
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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.files import check_folder, open_regular, read_json, remove_tree
from tinylm.text.corpus import Stream, rechunk
from tinylm.text.tokenizer import Tokenizer

LAYOUT = 2  # of a token folder; part of its key
LONGEST_PIECE = 1 << 24  # characters without a place to split
RECORD_BYTES = 1 << 16
CHECKED_AT_ONCE = 1 << 24  # ids compared with the vocabulary at a time
STALE_SECONDS = 86_400.0  # without a write, after which a folder that was not completed belongs to a dead process


@dataclass(frozen=True)
class TokenFolder:
    """Encoded text on disk: `train` and `val` are read-only arrays of ids, (N,) of the smallest unsigned type."""

    path: Path
    train: np.ndarray
    val: np.ndarray

    @classmethod
    def open(cls, path: Path, key: str, vocab_size: int, *, mapped: bool = True) -> "TokenFolder":
        """Both parts, as `open_part` opens each."""
        train, val = (open_part(path, part, key, vocab_size, mapped=mapped) for part in ("train", "val"))
        return cls(path, train, val)


def open_part(
    path: Path, part: str, key: str, vocab_size: int, *, mapped: bool = True, trust_times: bool = False
) -> np.ndarray:
    """The ids of one part, `train` or `val`, of the token folder at `path`: (N,), read-only.

    Checks the type of the ids, their number, their SHA-256 and that each is below `vocab_size`, since a folder may come
    from anywhere. With `trust_times`, the hash is not computed where size and time of change are the recorded ones.
    `mapped` maps the file into memory instead of reading it.

    Raises TinyLMError when the folder is incomplete, damaged, or holds another text than the one `key` stands for.
    """
    try:
        check_folder(path)
        record = read_json(path / "tokens.json", RECORD_BYTES)
        if record["key"] != key:
            raise ValueError("it is the encoding of another text")
        return _open_ids(path / f"{part}.bin", record[part], vocab_size, mapped, trust_times)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TinyLMError(f"The encoded text in {path} is damaged ({reason}); delete that folder.") from error


def _open_ids(path: Path, record: dict[str, Any], vocab_size: int, mapped: bool, trust_times: bool) -> np.ndarray:
    dtype = np.dtype(smallest_dtype(vocab_size))
    if record["dtype"] != dtype.name:  # no other type is ever given to numpy, which has one for pointers
        raise ValueError(f"the ids of {path.name} must be {dtype.name}")
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        if type(record["tokens"]) is not int or status.st_size != record["tokens"] * dtype.itemsize:
            raise ValueError(f"the size of {path.name} differs from the record")
        unchanged = trust_times and status.st_mtime_ns == record["changed"]
        if not unchanged and hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
            raise ValueError(f"the content of {path.name} differs from the record")
        file.seek(0)
        if status.st_size and mapped:
            ids: np.ndarray = np.memmap(file, dtype=dtype, mode="r")
        else:  # an empty file cannot be mapped
            ids = np.frombuffer(file.read(), dtype=dtype)
    if np.iinfo(dtype).max >= vocab_size:
        for start in range(0, len(ids), CHECKED_AT_ONCE):
            if ids[start : start + CHECKED_AT_ONCE].max() >= vocab_size:
                raise ValueError(f"{path.name} has an id that is not in the vocabulary")
    return ids


def token_key(
    fingerprint: str, val_fingerprint: str | None, train_characters: int, tokenizer: Tokenizer, encoder: str
) -> str:
    """The name of an encoding in the cache: equal for equal text, cut, tokenizer and encoder, whose versions could
    differ in their ids.
    """
    identity = json.dumps([LAYOUT, fingerprint, val_fingerprint, train_characters, tokenizer.sha256, encoder])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def encode_corpus(
    folder: Path,
    key: str,
    train: Callable[[], Stream],
    val: Callable[[], Stream],
    tokenizer: Tokenizer,
    progress: Callable[[int], None],
    *,
    mapped: bool = True,
) -> TokenFolder:
    """Write the token files of both parts into `folder`, which appears when it is complete; reuse it if it is there.

    `progress` receives the number of characters that each step encoded.
    """
    if os.path.lexists(folder):
        with contextlib.suppress(TinyLMError):
            return TokenFolder.open(folder, key, tokenizer.vocab_size, mapped=mapped)
        remove_tree(folder)
    unfinished = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(folder.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=".", suffix=UNFINISHED, dir=folder.parent))
        record = {
            part: _write_tokens(unfinished / f"{part}.bin", stream(), tokenizer, progress)
            for part, stream in (("train", train), ("val", val))
        }
        (unfinished / "tokens.json").write_text(json.dumps({"key": key, **record}))
        try:
            unfinished.replace(folder)
        except OSError:
            if not folder.exists():  # if it does, another run has encoded the same text in the meantime
                raise
    except OSError as error:
        raise TinyLMError(
            f"Cannot write the encoded text to {folder.parent}: {error.strerror}. Free some space there, or set "
            "TINYLM_CACHE to another folder."
        ) from error
    finally:
        if unfinished is not None:
            remove_tree(unfinished)
    return TokenFolder.open(folder, key, tokenizer.vocab_size, mapped=mapped)


UNFINISHED = ".tokens"  # ends the name of a folder that is being written


def remove_stale(folder: Path) -> None:
    """Delete the folders that killed processes left unfinished; one that is being written changes all the time."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError):  # another process may be deleting it
            changed = max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
            if time.time() - changed > STALE_SECONDS:
                remove_tree(path)


def _write_tokens(path: Path, stream: Stream, tokenizer: Tokenizer, progress: Callable[[int], None]) -> dict[str, Any]:
    dtype = smallest_dtype(tokenizer.vocab_size)
    digest = hashlib.sha256()
    count = 0
    with path.open("wb") as file:
        for ids, characters in _encode(stream, tokenizer):
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
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _encode(stream: Stream, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Ids and number of characters, piece by piece, in order; pieces are encoded a few ahead, by as many threads as the
    tokenizer can use.
    """
    workers = os.cpu_count() or 1
    end_of_text = np.array([tokenizer.end_of_text], dtype=np.uint32)

    def encode(piece: str | None) -> tuple[np.ndarray, int]:
        return (end_of_text, 0) if piece is None else (tokenizer.encode(piece), len(piece))

    with ThreadPoolExecutor(workers) as pool:
        ahead: deque[Future[tuple[np.ndarray, int]]] = deque()
        for piece in rechunk(stream, tokenizer.split_point, LONGEST_PIECE):
            ahead.append(pool.submit(encode, piece))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def encode_stream(
    stream: Stream, tokenizer: Tokenizer, progress: Callable[[int], None] = lambda size: None
) -> np.ndarray:
    """All ids of a stream in memory, documents joined by the end of text. `progress` is told the characters encoded."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    parts = [np.zeros(0, dtype=dtype)]
    for ids, characters in _encode(stream, tokenizer):
        parts.append(ids.astype(dtype))
        progress(characters)
    return np.concatenate(parts)


def sample_for_tokenizer(stream: Stream, characters: int, most: int, piece: int = 1 << 16) -> Iterator[str]:
    """Pieces for a BPE trainer to learn from: all of the stream, or parts spread over it, of `most` characters in all.

    Pieces end at line ends where there are any, since the trainer's memory grows with the distinct words it sees.
    """
    every = max(1, -(-characters // most))
    pieces = rechunk(stream, lambda text: text.rfind("\n", 0, piece) + 1 if len(text) >= piece else 0, 4 * piece)
    return (text for index, text in enumerate(p for p in pieces if p is not None) if index % every == 0)


@dataclass(frozen=True)
class Batch:
    """ids and targets: (B, T); `mask` (B, T) is True where a target is scored, `None` where all are.

    Of pairs, `source` (B, S) is what the targets are made from; after each row's `source_lengths` (B,) is padding.
    """

    ids: Tensor
    targets: Tensor
    mask: Tensor | None = None
    source: Tensor | None = None
    source_lengths: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def scored(self) -> int:
        """How many targets count."""
        return self.targets.numel() if self.mask is None else int(self.mask.sum())

    @property
    def tokens(self) -> int:
        """How many there are on both sides, without padding."""
        if self.source_lengths is None:
            return self.ids.numel()
        return self.scored + int(self.source_lengths.sum())

    def split(self, rows: int) -> Iterator["Batch"]:
        """Micro-batches of at most `rows` sequences."""
        for start in range(0, len(self), rows):
            part = slice(start, start + rows)
            yield self._each(lambda tensor, part=part: tensor[part])  # type: ignore[misc]

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with every tensor changed."""
        tensors = [getattr(self, field.name) for field in fields(self)]
        return Batch(*(None if tensor is None else change(tensor) for tensor in tensors))  # type: ignore[arg-type]


class Windows:
    """Training sequences: each epoch cuts the text at a new offset and visits every window once, in a new order.

    What batch number n holds depends on the seed and n alone, so a resumed run reads on where it stopped.
    """

    def __init__(self, tokens: np.ndarray, context: int, batch_size: int, seed: int) -> None:
        if len(tokens) <= context:
            raise TinyLMError(
                f"{len(tokens)} tokens hold no window of {context} and the token after it; give more text."
            )
        self._tokens = tokens
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        self._predictable = len(tokens) - 1
        # One window fewer than would fit leaves room for the offset.
        self.per_epoch = max(1, self._predictable // context - 1)
        self._epoch = -1
        self._offset = 0
        self._order = np.zeros(0, dtype=np.int64)

    def batch(self, number: int) -> Batch:
        first = number * self._batch_size
        starts = np.array([self._start(index) for index in range(first, first + self._batch_size)])
        return windows_at(self._tokens, starts, self._context)

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            slack = self._predictable - self.per_epoch * self._context
            self._epoch = epoch
            self._offset = int(rng.integers(0, min(slack, self._context), endpoint=True))
            self._order = rng.permutation(self.per_epoch)
        return self._offset + int(self._order[place]) * self._context


def evaluation_batches(
    tokens: np.ndarray, context: int, batch_size: int, stride: int | None = None, most: int | None = None
) -> Iterator[Batch]:
    """Windows that score every token but the first exactly once.

    Each window starts `stride` after the one before (default: the context, so that they do not overlap) and scores
    what no earlier one did. With `most`, evenly spread windows of about so many scored tokens, always the same ones.
    """
    stride = stride or context
    predictable = len(tokens) - 1
    starts = np.arange(0, max(predictable - (context - stride), 1), stride)
    if most is not None and most < predictable:
        starts = starts[np.linspace(0, len(starts) - 1, max(1, most // stride)).astype(int)]
    whole = starts[starts + context <= predictable]
    for first in range(0, len(whole), batch_size):
        rows = whole[first : first + batch_size]
        yield _score_the_new(windows_at(tokens, rows, context), rows, context - stride)
    for start in starts[len(whole) :]:
        row = np.array([start])
        yield _score_the_new(windows_at(tokens, row, predictable - start), row, context - stride)


def _score_the_new(batch: Batch, starts: np.ndarray, overlap: int) -> Batch:
    """Leave out the targets that the window before has scored; the first window has none before it."""
    if not overlap:
        return batch
    mask = torch.ones(batch.targets.shape, dtype=torch.bool)
    mask[torch.from_numpy(starts > 0), :overlap] = False
    return Batch(batch.ids, batch.targets, mask)


def windows_at(tokens: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    """Sequences of `context` tokens from each start, and as targets the token after each."""
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    ids = torch.from_numpy(rows)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
