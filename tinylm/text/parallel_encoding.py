"""Encode documents as token ids or codes, in batches and in order, on up to 16 cores.

Threads encode the first batches, and processes the others: gigatoken holds the interpreter lock, so only processes use
several cores, but they take about a second to start, which is too long for short texts (decision 029).
"""

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from tinylm.errors import TinyLMError
from tinylm.system.machine_profile import usable_cores
from tinylm.text.corpus import Stream, rechunk
from tinylm.text.files import Progress, no_progress
from tinylm.text.tokenizer import Tokenizer

MAX_CHUNK = 1 << 24  # characters; a longer chunk is encoded without waiting for a safe split point
BATCH_CHARACTERS = 1 << 19  # a batch ends with the chunk that reaches this number
PROCESSES_FROM = 1 << 25  # characters after which processes are started
MAX_WORKERS = 16  # one reading process cannot supply more
LOOKAHEAD = 2  # batches per worker that are read ahead


class TextBatch(NamedTuple):
    """Chunks or documents that are encoded together, and their number of characters."""

    content: Any
    characters: int


Encode = Callable[[Any, Tokenizer], np.ndarray]  # the codes of the content of a batch, (N,)


class Encoding(NamedTuple):
    """How the documents of a corpus are encoded, as codes: a code is a token id plus flags.

    batches: divides the documents into batches, deterministically. encode: returns the codes of a batch, (N,).
    codes_per_id: number of codes per token id; 1 without flags. least_values: number of values of a code if it may
    stand for something else than a token id. has_special: whether the texts have special tokens, which gigatoken does
    not encode.
    """

    batches: Callable[[Iterator[Any], Tokenizer], Iterator[TextBatch]]
    encode: Encode
    codes_per_id: int
    least_values: int = 0
    has_special: bool = False

    def codes(self, vocab_size: int) -> int:
        """The number of codes with a vocabulary of this size."""
        return self.codes_per_id * max(vocab_size, self.least_values)


def smallest_dtype(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer dtype for the ids of a vocabulary."""
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32


BEGIN = ""  # at the beginning of the first batch of a text; BOS follows if the tokenizer has one


def text_batches(stream: Stream, tokenizer: Tokenizer, size: int = BATCH_CHARACTERS) -> Iterator[TextBatch]:
    """Yield batches whose content is a list of chunks of text, with `None` between documents, and BEGIN at first."""
    chunks = rechunk(stream, tokenizer.safe_split_point, MAX_CHUNK)
    return _batches(itertools.chain([BEGIN], chunks), lambda chunk: len(chunk or ""), size)


def record_batches(examples: Iterator[Any], tokenizer: Tokenizer) -> Iterator[TextBatch]:
    """Yield batches whose content is a list of examples, with a `text` each."""
    return _batches(examples, lambda example: len(example.text), BATCH_CHARACTERS)


def _batches(content: Iterator[Any], length: Callable[[Any], int], size: int) -> Iterator[TextBatch]:
    batch: list[Any] = []
    characters = 0
    for each in content:
        batch.append(each)
        characters += length(each)
        if characters >= size:
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


TEXT_ENCODING = Encoding(text_batches, _encode_text, 1)


def encode_in_memory(
    documents: Iterator[Any], tokenizer: Tokenizer, encoding: Encoding = TEXT_ENCODING, progress: Progress = no_progress
) -> np.ndarray:
    """Encode documents, by default a stream of text, in memory: (N,) of `smallest_dtype`.

    The ids of a stream include BOS and end-of-text ids. `progress` receives the number of characters encoded. Raises
    UsageError for characters without an id.
    """
    dtype = smallest_dtype(encoding.codes(tokenizer.vocab_size))
    parts = [np.zeros(0, dtype=dtype)]
    for ids, characters in encode_batches(encoding.batches(documents, tokenizer), encoding.encode, tokenizer, dtype):
        parts.append(ids)
        progress(characters)
    return np.concatenate(parts)


def encode_batches(
    batches: Iterator[TextBatch],
    encode: Encode,
    tokenizer: Tokenizer,
    dtype: type[np.generic],
    workers: int | None = None,
    processes_from: int = PROCESSES_FROM,
) -> Generator[tuple[np.ndarray, int], None, None]:
    """Yield the codes, (N,) of `dtype`, and the number of characters of each batch, in order.

    encode: a module-level function, since processes import it. workers: by default, one per core. Raises the errors of
    `batches` and `encode`, and TinyLMError if a process is killed or cannot be started.
    """
    workers = workers or min(usable_cores(), MAX_WORKERS)
    can_start = workers > 1 and not multiprocessing.current_process().daemon  # daemons cannot have children

    def first_batches() -> Iterator[TextBatch]:
        characters = 0
        while characters < processes_from and (batch := next(batches, None)) is not None:
            yield batch
            characters += batch.characters

    threads = ThreadPoolExecutor(workers)

    def submit(batch: TextBatch) -> Future[np.ndarray]:
        return threads.submit(_encode, encode, batch.content, tokenizer, dtype)

    try:
        yield from _in_order(first_batches() if can_start else batches, submit, workers)
    finally:  # after a signal, a batch that a thread encodes is not waited for
        threads.shutdown(wait=False, cancel_futures=True)
    for batch in batches:  # processes start only if something is left
        yield from _encode_by_processes(itertools.chain([batch], batches), encode, tokenizer, dtype, workers)


def _in_order(
    batches: Iterator[TextBatch], submit: Callable[[TextBatch], Future[np.ndarray]], workers: int
) -> Iterator[tuple[np.ndarray, int]]:
    """Submit each batch, LOOKAHEAD * `workers` batches ahead, and yield the codes and the number of characters."""
    pending: deque[tuple[Future[np.ndarray], int]] = deque()
    for batch in batches:
        pending.append((submit(batch), batch.characters))
        if len(pending) > LOOKAHEAD * workers:
            future, characters = pending.popleft()
            yield future.result(), characters
    while pending:
        future, characters = pending.popleft()
        yield future.result(), characters


def _encode(encode: Encode, content: Any, tokenizer: Tokenizer, dtype: type[np.generic]) -> np.ndarray:
    return encode(content, tokenizer).astype(dtype)


# Processes


def _encode_by_processes(
    batches: Iterator[TextBatch], encode: Encode, tokenizer: Tokenizer, dtype: type[np.generic], workers: int
) -> Iterator[tuple[np.ndarray, int]]:
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(tokenizer,)
    )

    def submit(batch: TextBatch) -> Future[np.ndarray]:
        try:
            with _isolated_start():
                return pool.submit(_encode_in_worker, encode, batch.content, dtype)
        except OSError as error:
            raise TinyLMError(f"Cannot start a process that encodes the text: {error.strerror}.") from error

    wait = False  # after a signal, the workers end with this process
    try:
        yield from _in_order(batches, submit, workers)
        wait = True
    except Exception as error:
        wait = True
        if not isinstance(error, BrokenProcessPool):
            raise
        raise TinyLMError(
            "A process that encodes the text was killed, probably because memory ran out. Close other programs, or "
            "allow fewer cores (taskset), and run the command again."
        ) from error
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


@contextlib.contextmanager
def _isolated_start() -> Iterator[None]:
    """Context manager in which processes start without the caller's main module, and with SIGINT and SIGHUP blocked.

    A new process imports the file of `__main__`, which may be a user's script that trains a model when it is imported.
    Ctrl-C reaches all processes of a terminal; the parent ends its workers.
    """
    main = sys.modules["__main__"]
    signals = [number for name in ("SIGINT", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signals) if hasattr(signal, "pthread_sigmask") else None
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


_worker_tokenizer: list[Tokenizer] = []  # in a worker: its tokenizer, which is too large to be sent with each batch


def _start_worker(tokenizer: Tokenizer) -> None:
    _worker_tokenizer.append(tokenizer)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:  # even by SIGKILL, after which no work arrives
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _encode_in_worker(encode: Encode, content: Any, dtype: type[np.generic]) -> np.ndarray:
    return _encode(encode, content, _worker_tokenizer[0], dtype)
