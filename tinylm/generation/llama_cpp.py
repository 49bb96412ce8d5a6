"""llama.cpp as the engine of a decoder: llama.cpp computes the logits, and tinylm samples from them (decision 025).

Only GGUF files that tinylm wrote and verified are opened. Needs llama-cpp-python, an optional extra.
"""

import contextlib
import ctypes
import functools
import importlib
import math
import os
import platform
import time
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinylm.errors import TinyLMError
from tinylm.generation.generator import Ids
from tinylm.generation.sampler import Logits

MAX_MICRO_BATCH = 256  # tokens that llama.cpp processes at a time; 512 take 4 to 10 % longer per token
TRIAL_STEPS = 8  # least steps of a trial of a number of threads
TRIAL_SECONDS = 0.03  # least time of the trial: several time slices of Linux
SLOWER = 1.25  # ratio to the fastest number of threads from which on a trial ends early
FIRST_WAIT, LONGEST_WAIT = 8, 6_400  # steps before a trial: the first number doubles after each trial without a change
FLOAT32, FLOAT16 = 0, 1  # ggml_type


@functools.cache
def import_llama_cpp() -> Any:
    """The module llama_cpp with its log switched off, or `None` if it is not installed or cannot be loaded."""
    try:
        library: Any = importlib.import_module("llama_cpp")
    except (ImportError, OSError, RuntimeError):  # the latter two if the build does not fit the machine
        return None
    library.tinylm_log = library.llama_log_callback(lambda level, text, data: None)  # kept alive by the reference
    library.llama_log_set(library.tinylm_log, ctypes.c_void_p(0))
    return library


class LlamaCppCache:
    """A context of llama.cpp with the KV cache of `rows` sequences.

    Keys and values are fp32 if all weights are (`exact`), otherwise fp16.
    context: llama.cpp's context, which is freed with this object. model: a reference that keeps the model loaded.
    padding: (rows,), number of left-padding tokens per row, which are skipped.
    step: a batch of one token per row; `set_step` sets its tokens and positions.

    Raises TinyLMError if llama.cpp cannot allocate the context.
    """

    def __init__(
        self, library: Any, model: Any, rows: int, length: int, starts: Ids | None, threads: int, exact: bool
    ) -> None:
        options = library.llama_context_default_params()
        options.n_ctx = options.n_batch = rows * length
        options.n_ubatch = min(MAX_MICRO_BATCH, rows * length)
        options.n_seq_max = rows
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = FLOAT32 if exact else FLOAT16
        if exact or rows == 1:  # with flash attention, one row's logits depend on the number of threads (decision 025)
            options.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.no_perf = True
        self.context = library.llama_init_from_model(model, options)
        if not self.context:
            raise TinyLMError(f'llama.cpp has no memory for {rows} sequences of {length} tokens; use `engine="torch"`.')
        self._free = weakref.finalize(self, library.llama_free, self.context)
        self._library = library
        self.model: LlamaCppDecoder | None = None
        self.threads = threads
        self.padding: Ids = np.zeros(rows, dtype=np.int64) if starts is None else starts
        self.offset = 0
        self.step, self._tokens, self._positions = _batch(library, np.arange(rows), np.ones(rows))
        weakref.finalize(self, library.llama_batch_free, self.step)

    def set_step(self, ids: Ids) -> None:
        """Set the next token of each row in `step`. ids: (rows,)."""
        self._tokens[:] = ids
        self._positions[:] = self.offset - self.padding

    @property
    def rows(self) -> int:
        """The number of sequences."""
        return len(self.padding)

    def copy_first_row(self) -> None:
        """Copy the keys and values of the first row to the other rows, which must be empty."""
        memory = self._library.llama_get_memory(self.context)
        for row in range(1, self.rows):
            self._library.llama_memory_seq_cp(memory, 0, row, -1, -1)

    def rewind(self, tokens: int) -> None:
        """As `Cache.rewind`."""
        self.offset -= tokens
        memory = self._library.llama_get_memory(self.context)
        for row, padding in enumerate(self.padding.tolist()):
            self._library.llama_memory_seq_rm(memory, row, self.offset - padding, -1)


class LlamaCppDecoder:
    """A model in a GGUF file, run by llama.cpp on the CPU. Implements `NextTokenModel`.

    context: context length in tokens. threads: maximum number of threads.

    Raises TinyLMError, and deletes the file, if llama.cpp cannot open it.
    """

    def __init__(self, file: Path, context: int, threads: int) -> None:
        self._library = import_llama_cpp()
        options = self._library.llama_model_default_params()
        if platform.machine().lower() in ("x86_64", "amd64"):
            # With them, llama.cpp repacks q8_0 weights on processors with AMX, and llama-cpp-python 0.3.36 crashes when
            # it processes several tokens with repacked weights (decision 025).
            options.use_extra_bufts = False
        self._model = self._library.llama_model_load_from_file(os.fsencode(file), options)
        self.file = file
        if not self._model:
            with contextlib.suppress(OSError):
                file.unlink()
            raise TinyLMError(f'llama.cpp cannot open {file}, which is deleted; use `engine="torch"`.')
        self._free = weakref.finalize(self, self._library.llama_model_free, self._model)
        vocabulary = self._library.llama_model_get_vocab(self._model)
        self._vocab_size = int(self._library.llama_vocab_n_tokens(vocabulary))
        parameters = self._library.llama_model_n_params(self._model)
        self._is_exact = self._library.llama_model_size(self._model) >= parameters * np.dtype(np.float32).itemsize
        self._context, self.threads = context, threads
        self._step_threads = fastest_threads(threads)
        self._next_threads = next(self._step_threads)

    @property
    def context(self) -> int:
        """Context length in tokens."""
        return self._context

    def make_cache(self, batch: int, length: int, starts: Ids | None = None) -> list[LlamaCppCache]:
        """See `NextTokenModel.make_cache`. Returns one cache for all layers. Raises TinyLMError if memory is short."""
        cache = LlamaCppCache(self._library, self._model, batch, length, starts, self.threads, self._is_exact)
        cache.model = self  # llama.cpp's model must be freed after its contexts
        return [cache]

    def last_logits(self, ids: Ids, cache: Sequence[LlamaCppCache] | None, count: int) -> Logits:
        """See `NextTokenModel.last_logits`: (B, T) -> (B, count, V). Raises TinyLMError if llama.cpp fails."""
        memory = (cache or self.make_cache(*ids.shape))[0]
        rows, length = ids.shape
        if length == 1 and rows == memory.rows and memory.offset >= memory.padding.max():
            memory.set_step(ids[:, 0])
            failed = self._step(memory)
        else:
            failed = self._decode_rows(memory, ids, count)
        if failed:
            raise TinyLMError('llama.cpp could not compute the next token; use `engine="torch"`.')
        if rows < memory.rows:
            memory.copy_first_row()
        memory.offset += length
        address = ctypes.addressof(self._library.llama_get_logits(memory.context).contents)
        logits = (ctypes.c_float * (rows * count * self._vocab_size)).from_address(address)
        copied = np.frombuffer(logits, dtype=np.float32).copy()  # llama.cpp overwrites the logits at the next step
        return copied.reshape(rows, count, self._vocab_size)

    def _decode_rows(self, memory: LlamaCppCache, ids: Ids, count: int) -> int:
        """Process all ids except padding; compute logits for the last `count` ids per row. Returns 0 on success."""
        rows, length = ids.shape
        positions = memory.offset + np.arange(length) - memory.padding[:rows, None]  # (B, T)
        kept = positions >= 0
        scored = np.broadcast_to(np.arange(length) >= length - count, ids.shape)
        sequences = np.broadcast_to(np.arange(rows)[:, None], ids.shape)
        batch, batch_tokens, batch_positions = _batch(self._library, sequences[kept], scored[kept])
        try:
            batch_tokens[:], batch_positions[:] = ids[kept], positions[kept]
            return self._decode(memory, batch, self.threads)
        finally:
            self._library.llama_batch_free(batch)

    def _step(self, memory: LlamaCppCache) -> int:
        started = time.perf_counter()
        status = self._decode(memory, memory.step, self._next_threads)
        self._next_threads = self._step_threads.send(time.perf_counter() - started)
        return status

    def _decode(self, memory: LlamaCppCache, batch: Any, threads: int) -> int:
        if memory.threads != threads:
            self._library.llama_set_n_threads(memory.context, threads, threads)
            memory.threads = threads
        return int(self._library.llama_decode(memory.context, batch))


def _batch(library: Any, sequences: Ids, scored: NDArray[Any]) -> tuple[Any, NDArray[np.int32], NDArray[np.int32]]:
    """A batch of llama.cpp, and views of its tokens and positions, each (N,), for the caller to set.

    sequences: (N,), the sequence of each token. scored: (N,), whether logits are computed after each token.
    """
    count = len(sequences)
    batch = library.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    np.ctypeslib.as_array(batch.n_seq_id, (count,))[:] = 1
    np.ctypeslib.as_array(batch.logits, (count,))[:] = scored
    for index, sequence in enumerate(sequences.tolist()):
        batch.seq_id[index][0] = sequence
    return batch, *(np.ctypeslib.as_array(part, (count,)) for part in (batch.token, batch.pos))


def fastest_threads(maximum: int) -> Generator[int, float, None]:
    """Yield the number of threads for the next step, and receive the seconds that the step took.

    Trials of other numbers are repeated, since the load of the machine may change. With the options of LlamaCppCache,
    llama.cpp computes the same logits with any number of threads, so the text does not depend on the timings.
    """
    counts = [2**power for power in range(maximum.bit_length()) if 2**power < maximum] + [maximum]
    best, wait = maximum, FIRST_WAIT
    while True:
        waited = 0.0
        for _ in range(wait):
            waited += yield best
        steps = max(TRIAL_STEPS, math.ceil(TRIAL_SECONDS * wait / waited))
        fastest, before = (yield from _mean_seconds(best, steps, math.inf)), best
        for count in counts:
            if count != before and (seconds := (yield from _mean_seconds(count, steps, fastest))) < fastest:
                best, fastest = count, seconds
        wait = FIRST_WAIT if best != before else min(2 * wait, LONGEST_WAIT)


def _mean_seconds(threads: int, steps: int, limit: float) -> Generator[int, float, float]:
    """The mean seconds of a number of steps.

    Returns infinity as soon as the mean of all steps cannot be below `limit`, or if the steps so far took more than
    TRIAL_STEPS times `limit` and their mean is more than SLOWER times `limit`.
    """
    total = 0.0
    for step in range(1, steps + 1):
        total += yield threads
        if total > limit * min(steps, max(TRIAL_STEPS, SLOWER * step)):
            return math.inf
    return total / steps
