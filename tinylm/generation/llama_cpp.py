"""llama.cpp as the engine of a decoder on a CPU: it computes, samples and batches (decision 025). Imports no torch.

The package xllamacpp runs llama.cpp's server inside this process. The server always listens: here on a Unix socket in a
private folder, which nobody uses, and on no TCP port. Only GGUF files that tinylm wrote and verified are opened.
"""

import contextlib
import functools
import importlib
import itertools
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from tinylm.config.validation import require
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.gguf_tokenizer import NUMBER_END
from tinylm.generation.engine import Candidate, Engine, Token, sample_seed, window
from tinylm.generation.generation_config import DEFAULT_TEMPERATURE, GenerationConfig, SpeedConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.kernels.process import spinning
from tinylm.system.machine_profile import usable_cores
from tinylm.text.tokenizer import Tokenizer

# The order of the sampler's steps, which is that of `Sampler`: llama.cpp would divide by the temperature last.
SAMPLERS = ("penalties", "temperature", "top_k", "top_p", "min_p")
SPIN_COUNT = 1000  # of OpenMP, for each of a step's 100 barriers: decision 025
PRIME = 2**31 - 1
STRIDE = 0x1E3779B1  # between the streams of adjacent seeds: llama.cpp gives samples of a prompt adjacent streams
RANDOM_STREAM = 2**32 - 1  # llama.cpp replaces it by a random one
MAX_ROWS = 256  # that llama.cpp generates at the same time
MICRO_BATCH = 256  # tokens that are computed at a time; 512 take 4 to 10 % longer per token
FORCING_BIAS = 1e4  # of a token that is generated whatever its logit
SLOT_UNIT = 256  # llama.cpp rounds the size of a cache up to a multiple of it
SMALL_FILE = 8 << 20  # bytes; a second thread speeds up single tokens of larger models only
SOCKET = "llama.cpp.sock"  # in a folder of its own
USUAL_SLOTS = 512  # tokens of a cache, until a text needs more
_KEPT_AFTER_FORK: list[Any] = []  # servers of the process that this one was forked from


@functools.cache
def import_llama_cpp() -> Any:
    """The module xllamacpp, or `None` if it is not installed, cannot be loaded, or there are no Unix sockets."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    try:
        with spinning(SPIN_COUNT):
            return importlib.import_module("xllamacpp")
    except (ImportError, OSError):  # the latter if the build does not fit the machine
        return None


def reason_against(speed: SpeedConfig) -> str | None:
    """Why these settings or this machine exclude llama.cpp, as a clause for error messages; `None` if they do not."""
    if speed.engine == "torch":
        return "`engine` or `json_schema` chooses torch"
    if not speed.cache:
        return "it needs the cache"
    if import_llama_cpp() is None:
        return "the package xllamacpp is not installed, or cannot be loaded on this machine"
    return None


class LlamaCpp(Engine):
    """A model in llama.cpp. The server ends when the object is garbage.

    file: a GGUF file that tinylm wrote, whose tokens are the numbers of their ids (`write_numbers`). context: context
    length of the model. embedding_rows: number of rows of the embedding; those above the tokenizer's ids are never
    sampled. is_exact: whether all weights have 32 bits; keys and values then have them, too. samples, slots: caches
    reserved at the start, and tokens in each; both grow on demand, which restarts the server.

    Raises UsageError outside the main thread, since llama.cpp replaces signal handlers that only that can restore, and
    in a process forked from the one that created the object, since threads are not forked. Such a process has to end
    by `os._exit`, as those of `multiprocessing` do: llama.cpp's own cleanup would wait for the threads.
    Raises TinyLMError, and deletes the file, if llama.cpp cannot open it.
    """

    def __init__(
        self,
        file: Path,
        context: int,
        tokenizer: Tokenizer,
        embedding_rows: int,
        is_exact: bool,
        *,
        samples: int = 1,
        slots: int = USUAL_SLOTS,
    ) -> None:
        self.file = file
        self._context, self._tokenizer = context, tokenizer
        self.is_exact = is_exact
        self.excluded = list(range(tokenizer.vocab_size, embedding_rows))  # ids that are never sampled
        self._process = os.getpid()
        self._samples = self._slots = 0
        self._server: list[Any] = []  # one or none: a list, so that the finalizer can empty it
        self._socket: Path
        self._close: weakref.finalize[..., Any] | None = None
        self._reserve(samples, min(context, slots))

    def generate(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int
    ) -> Generator[Token]:
        """Raises TinyLMError if llama.cpp fails.

        All prompts have the same ids, which are processed once. Past the context, the rows continue one after another,
        since the random streams of rows with different ids would depend on the time at which each request arrives.
        """
        require(config.json_schema is None, '`json_schema` needs `engine="torch"`.')
        self._require_own_process()
        texts = [list(prompt.start) for prompt in prompts]
        first = window(texts[0], self._context, self._tokenizer.start_id)
        self._reserve(min(len(texts), MAX_ROWS), min(self._context, len(first) + config.max_tokens))
        seeds = [_stream(config, first_stream) + row for row in range(len(texts))]
        settings = {
            **vars(config.sampling(DEFAULT_TEMPERATURE)),
            "samplers": SAMPLERS,
            "repeat_last_n": self._context,
            "logprobs": config.logprobs,
            "logit_bias": [[token, False] for token in self.excluded],
            "cache_prompt": False,  # the cache of an earlier prompt would change the rounding
        }
        open_rows = set(range(len(texts)))

        def generated_from(first_row: int, request: dict[str, Any]) -> Iterator[Token]:
            """The tokens of a request, each appended to its text, which an end token closes."""
            for token in self._tokens({**settings, **request}):
                row = first_row + token.row
                if token.id is None:
                    open_rows.discard(row)
                else:
                    texts[row].append(token.id)
                yield token._replace(row=row)

        # Within the context, MAX_ROWS rows at once
        count = min(config.max_tokens, self._context - len(first))
        for start in range(0, len(texts), MAX_ROWS):
            rows = min(MAX_ROWS, len(texts) - start)
            request = {"prompt": first, "n": rows, "max_tokens": count, "seed": seeds[start]}
            yield from generated_from(start, request)

        # Past the context, in windows, row by row
        generated = count
        while open_rows and generated < config.max_tokens:
            seeds = [sample_seed(seed, 1) % PRIME for seed in seeds]
            ids = window(texts[min(open_rows)], self._context, self._tokenizer.start_id)
            count = min(config.max_tokens - generated, self._context - len(ids))
            for row in sorted(open_rows):
                ids = window(texts[row], self._context, self._tokenizer.start_id)
                yield from generated_from(row, {"prompt": ids, "max_tokens": count, "seed": seeds[row]})
            generated += count

    def close(self) -> None:
        if self._close is not None:
            self._close()
        self._samples = self._slots = 0

    def close_socket(self) -> None:
        """Delete the socket, which nobody uses: for a process that a signal ends without cleanup."""
        shutil.rmtree(self._socket.parent, ignore_errors=True)

    def sample_seed(self, config: GenerationConfig, first_stream: int, row: int) -> int:
        stream = _stream(config, first_stream) + row
        return stream * pow(STRIDE, -1, PRIME) % PRIME if stream < PRIME else stream

    def complete(self, request: dict[str, Any], receive: Callable[[Token], bool]) -> None:
        """Call `receive` in this thread with each token of a request to llama.cpp until it returns true.

        The row of a token is the index in the request. Several threads may have requests at the same time. Raises
        UsageError for a request that llama.cpp refuses, and TinyLMError if it fails.
        """
        self._require_own_process()
        errors: list[Exception] = []  # xllamacpp ignores those that are raised in `read`

        def read(event: dict[str, Any]) -> bool:
            try:
                return any(map(receive, _read_event(_checked(event, "choices")[0])))
            except Exception as error:
                errors.append(error)
                return True

        self._server[0].handle_completions({**request, "stream": True}, read)
        if errors:
            raise errors[0]

    def score(
        self, ids: Sequence[int], candidates: int, end_id: int, is_over: Callable[[], bool] = lambda: False
    ) -> list[Token]:
        """The ids after the first, each with its log-probability after those before it, and the likeliest candidates;
        fewer once `is_over` returns true.

        llama.cpp reports log-probabilities of the tokens that it generates. Here it generates the ids, which a grammar
        forces. No grammar admits an end token, which a bias forces.
        """
        scored: list[Token] = []
        while (start := len(scored) + 1) < len(ids) and not is_over():
            ends = itertools.chain((i for i in range(start, len(ids)) if ids[i] == end_id), [len(ids)])
            count = max(1, next(ends) - start)
            request: dict[str, Any] = {"prompt": list(ids[:start]), "max_tokens": count, "temperature": 0}
            if ids[start] == end_id:
                request["logit_bias"] = [[end_id, FORCING_BIAS]]
            else:
                request["grammar"] = f'root ::= "{"".join(f"{i}{NUMBER_END}" for i in ids[start : start + count])}"'
            found: list[Token] = []

            def receive(token: Token, found: list[Token] = found) -> bool:
                found.append(token)
                return is_over()

            self.complete({**request, "logprobs": max(1, candidates), "cache_prompt": False}, receive)
            found = [token for token in found if token.id is not None]
            if is_over():
                break
            if [token.id for token in found] != list(ids[start : start + count]):
                raise TinyLMError("llama.cpp did not generate the tokens that were to be scored.")
            scored += found
        return scored

    def _tokens(self, request: dict[str, Any]) -> Iterator[Token]:
        """Yield the tokens of all rows as llama.cpp generates them.

        The request runs in a thread of its own, so that signals reach the main thread while it waits for a token.
        """
        tokens: queue.SimpleQueue[Token | Exception | None] = queue.SimpleQueue()
        is_over = threading.Event()

        def receive(token: Token) -> bool:
            tokens.put(token)
            return is_over.is_set()

        def run() -> None:
            try:
                self.complete(request, receive)
            except Exception as error:  # raised again below, in the thread that waits for a token
                tokens.put(error)
            finally:
                tokens.put(None)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            while (token := tokens.get()) is not None:
                if isinstance(token, Exception):
                    raise TinyLMError(f'llama.cpp failed: {token}; use `engine="torch"`.') from token
                yield token
        finally:
            is_over.set()
            thread.join()

    def _require_own_process(self) -> None:
        require(
            os.getpid() == self._process,
            "This process was forked after the model had begun to generate, and has none of llama.cpp's threads; load "
            'the model in this process, or start processes by "spawn".',
        )

    def _reserve(self, samples: int, slots: int) -> None:
        """Start the server anew unless it has caches for this many samples, with this many tokens each."""
        if samples <= self._samples and slots <= self._slots:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("llama.cpp has to be opened in the main thread.")
        samples, slots = max(samples, self._samples), max(slots, self._slots)
        if self._close is None or not self._close.alive or not self._socket.parent.exists():
            self.close()
            self._socket = _make_folder() / SOCKET  # kept, since there may be no room for another one later
            self._close = weakref.finalize(self, _end, self._server, self._socket.parent, self._process)
        self._server.clear()
        self._samples = self._slots = 0
        try:
            self._socket.unlink(missing_ok=True)
            self._server.append(self._start(samples, slots))
        except RuntimeError as error:
            self.close()
            with contextlib.suppress(OSError):
                self.file.unlink()
            raise TinyLMError(f'llama.cpp cannot open {self.file}, which is deleted; use `engine="torch"`.') from error
        self._samples, self._slots = samples, slots
        # A server whose loop has not begun yet would never end.
        request = {"prompt": [0], "max_tokens": 1, "logprobs": 1}
        if not all(token.id is None or token.logprob is not None for token in self._tokens(request)):
            raise TinyLMError("the model's logits are not finite numbers")

    def _start(self, samples: int, slots: int) -> Any:
        library = import_llama_cpp()
        parameters = library.CommonParams()
        parameters.model.path = str(self.file)
        parameters.hostnames = [str(self._socket)]
        parameters.n_parallel = samples
        parameters.n_ctx = samples * -(-slots // SLOT_UNIT) * SLOT_UNIT
        parameters.n_ubatch = MICRO_BATCH
        parameters.cache_ram_mib = parameters.n_ctx_checkpoints = 0  # of earlier requests, up to 8 GiB
        cores = free_cores(usable_cores(), os.cpu_count() or 1)
        parameters.cpuparams.n_threads = 1 if self.file.stat().st_size < SMALL_FILE else cores
        parameters.cpuparams_batch.n_threads = cores  # of several tokens at a time
        parameters.n_gpu_layers = 0
        parameters.fit_params = parameters.warmup = parameters.ui = parameters.endpoint_slots = False
        parameters.verbosity = -1  # silent
        kinds, attention = library.ggml_type, library.llama_flash_attn_type
        parameters.cache_type_k = parameters.cache_type_v = (
            kinds.GGML_TYPE_F32 if self.is_exact else kinds.GGML_TYPE_F16
        )
        # Flash attention rounds keys and values to 16 bits, and with one row depends on the number of threads.
        parameters.flash_attn_type = (
            attention.LLAMA_FLASH_ATTN_TYPE_DISABLED
            if self.is_exact or samples == 1
            else attention.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        with kept_signal_handlers():
            return library.Server(parameters)


def _checked(answer: dict[str, Any], key: str) -> Any:
    """The value under a key of llama.cpp's answer. Raises UsageError if it refuses, and TinyLMError if it fails."""
    if key in answer:
        return answer[key]
    problem = answer.get("error", answer)
    kind = UsageError if problem.get("code") == 400 else TinyLMError
    raise kind(str(problem.get("message", "llama.cpp failed.")))


def _read_event(choice: dict[str, Any]) -> Iterator[Token]:
    row, ids = choice["index"], map(int, choice["text"].split(NUMBER_END)[:-1])
    if not choice["logprobs"]:
        for token in ids:
            yield Token(row, token)
    else:
        for token, score in zip(ids, choice["logprobs"]["content"], strict=True):
            candidates = [Candidate(other["id"], other["logprob"]) for other in score["top_logprobs"]]
            yield Token(row, token, score["logprob"], candidates)
    if choice["finish_reason"] == "stop":
        yield Token(row, None)


def _stream(config: GenerationConfig, first_stream: int) -> int:
    """The random stream of llama.cpp for the first sample. `LlamaCpp.sample_seed` is the inverse."""
    seed = sample_seed(config.seed, first_stream)
    is_stream = PRIME <= seed <= RANDOM_STREAM - config.num_samples
    return seed if is_stream else seed * STRIDE % PRIME


def _make_folder() -> Path:
    """A folder for a socket, which only this user can open. Raises TinyLMError if no socket can be made in it.

    llama.cpp itself does not tell a socket that it cannot make from a file that it cannot open.
    """
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="tinylm-"))
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(folder / SOCKET))
    except OSError as error:  # also for a path of more than about 100 bytes
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise TinyLMError(
            f"llama.cpp cannot make its socket in a temporary folder: {error.strerror or error}; set TMPDIR to another "
            'folder, or use `engine="torch"`.'
        ) from error
    return folder


def _end(servers: list[Any], folder: Path, process: int) -> None:
    """End the server, which `servers` has the only reference to, and delete the folder of its socket. In a process that
    was forked from its own, it is kept, since it would wait forever for threads that are not there.
    """
    if os.getpid() != process:
        _KEPT_AFTER_FORK.append(servers)
        return
    servers.clear()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Context manager that restores the signal handlers that Python knows."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGPIPE")]
    handlers = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def free_cores(usable: int, cores: int, load: Path = Path("/proc/loadavg")) -> int:
    """Number of cores that this process may use and that are idle on Linux; at least 1.

    usable, cores: of this process, and of the machine. load: names the running threads; all cores are idle without it.

    llama.cpp's threads wait for each other by spinning: if one of two has no core, a token takes up to 100 times as
    long. The number changes the speed only, since llama.cpp computes the same logits with each.
    """
    others = []  # running threads of other processes
    try:
        for _ in range(3):  # the least, since some run only for an instant
            others.append(int(load.read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(0.002)
    except (OSError, ValueError, IndexError):
        others = [0]
    return max(1, min(usable, cores - max(0, min(others))))
