"""Settings of the process for system libraries: OpenMP, the memory allocator and the caches of torch's compilers.

OpenMP spin: how long idle threads of torch poll for work before they sleep (decision 015). The environment variable
`GOMP_SPINCOUNT` sets the number of polls; libgomp reads it when torch is imported.

Allocator: whether the memory of freed tensors stays with the process (decision 036). Only glibc has these settings
(mallopt(3)).

Cache folders of torch's compilers: they contain code and pickles, so only this user may write (decision 020).
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tinylm.system.cache_directory import private_folder
from tinylm.system.machine_profile import Measurement, identify_processor

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # values that the user has set are kept
NO_SPIN = 0  # if another process is busy, spinning makes a training step many times slower
SPIN_COUNT = 10_000  # iterations, a fraction of a millisecond
SLOW_WAKE_UP = 7e-6  # seconds; above it, spinning gains more on an idle machine than it loses on a busy one
SERIES, PAUSE = 5, 0.005  # number of medians, some of which other processes disturb, and seconds between them


def set_spin_count() -> None:
    """Set `GOMP_SPINCOUNT` for this process and its children, unless the user has set how threads wait.

    Called before torch is imported: OpenMP reads the variable when it is loaded.
    """
    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(choose_spin_count())


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Context manager for the import of another library with OpenMP, whose threads poll `count` times.

    Values that the user has set are kept.
    """
    before = os.environ.get("GOMP_SPINCOUNT")
    if "OMP_WAIT_POLICY" in os.environ or before not in (None, str(NO_SPIN), str(SPIN_COUNT)):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = str(count)
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]
        if before is not None:
            os.environ["GOMP_SPINCOUNT"] = before


def choose_spin_count() -> int:
    """The value for `GOMP_SPINCOUNT`: threads spin if waking one takes long, as on some virtual machines.

    The wake-up latency is read from the machine profile, or measured in about 30 ms and recorded there.
    """
    if not can_measure_wake_up():
        return NO_SPIN
    try:
        latency = wake_up_entry().get(measure_wake_up)["seconds"]
    except (OSError, RuntimeError):  # a sandbox may forbid setting the affinity or starting a thread
        return NO_SPIN
    return SPIN_COUNT if latency > SLOW_WAKE_UP else NO_SPIN


def can_measure_wake_up() -> bool:
    """Whether this is Linux and the process may use several cores. Other systems have other thread libraries."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


def wake_up_entry() -> Measurement:
    """The machine profile's entry for the wake-up latency."""
    return Measurement("wake-up", identify_processor(), {"seconds": (1e-9, 1.0)})


def measure_wake_up() -> dict[str, float]:
    """The wake-up latency between the first and the last core, in seconds: the minimum of SERIES medians.

    Raises OSError or RuntimeError if the affinity cannot be set or no thread can be started.
    """
    cores = sorted(os.sched_getaffinity(0))
    found = []
    for _ in range(SERIES):
        found.append(_wake_up_seconds(cores[0], cores[-1]))
        time.sleep(PAUSE)
    return {"seconds": min(found)}


def _wake_up_seconds(core: int, other: int, rounds: int = 21) -> float:
    """The median time to wake a sleeping thread on another core, in seconds: half of a round trip through two pipes."""
    affinity = os.sched_getaffinity(0)
    (ping_reader, ping_writer), (pong_reader, pong_writer) = os.pipe(), os.pipe()

    def answer() -> None:
        while os.read(ping_reader, 1):
            os.write(pong_writer, b"!")

    def one_way() -> float:
        begun = time.perf_counter()
        os.write(ping_writer, b"?")
        os.read(pong_reader, 1)
        return (time.perf_counter() - begun) / 2

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        os.sched_setaffinity(thread.native_id or 0, {other})
        os.sched_setaffinity(0, {core})
        return sorted(one_way() for _ in range(rounds))[rounds // 2]
    finally:
        os.close(ping_writer)  # ends `answer`
        thread.join()
        for end in (ping_reader, pong_reader, pong_writer):
            os.close(end)
        os.sched_setaffinity(0, affinity)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # parameters of mallopt
LARGE_BLOCK = 1 << 20  # bytes
HUGE_BLOCK = 1 << 30  # bytes
NEVER = -1  # converted to size_t, the largest number of bytes


def keep_freed_blocks() -> bool:
    """Let malloc keep freed blocks of up to HUGE_BLOCK for later allocations. Returns False without glibc.

    By default, it maps and unmaps larger tensors one by one, and gives the end of the heap back. Each step of training
    then gets new pages, which the system has to find and clear.
    """
    return set_thresholds(map_from=HUGE_BLOCK, trim_from=NEVER)


def return_large_blocks() -> bool:
    """Let malloc return freed blocks of LARGE_BLOCK and more to the system at once. Returns False without glibc.

    By default, glibc raises this threshold to the size of the largest block that was mapped and freed (at most 32 MiB).
    Smaller blocks are allocated on the heap, where freed blocks leave gaps.
    """
    return set_thresholds(map_from=LARGE_BLOCK, trim_from=2 * LARGE_BLOCK)


def share_heaps() -> bool:
    """Let the threads of a server share two heaps. Returns False without glibc.

    With one heap per thread, 30,000 requests from 32 clients leave 473 MB in gaps, and 169 MB with two.
    """
    return _mallopt(M_ARENA_MAX, 2)


def set_thresholds(map_from: int, trim_from: int) -> bool:
    """Set, in bytes, the least size of a block that is mapped by itself, and of the free end of the heap that is given
    back to the system. Returns False without glibc.
    """
    return _mallopt(M_MMAP_THRESHOLD, map_from) and _mallopt(M_TRIM_THRESHOLD, trim_from)


def _mallopt(parameter: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(parameter, value))
    except (AttributeError, OSError, TypeError):  # musl and macOS; TypeError on Windows
        return False


FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # default: /tmp/torchinductor_<user>, which torch unpickles from
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "QUACK_CACHE_DIR": "quack",  # CuTe kernels for GPUs; default: a folder in /tmp
}


def use_private_folders() -> None:
    """Set environment variables for the folders of torch's compilers; call it before torch is imported if possible.

    Variables that the user has set are kept.

    Raises TinyLMError if the cache folder cannot be created, or if other users can write to it.
    """
    folder = private_folder("torch")
    # Unset TORCHINDUCTOR_CACHE_DIR if torch has set it to its default, so that only a value of the user is kept
    default = getattr(sys.modules.get("torch._inductor.runtime.cache_dir_utils"), "default_cache_dir", None)
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if default is not None and given is not None and Path(given) == Path(default()).absolute():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    for variable, name in FOLDERS.items():
        os.environ.setdefault(variable, str(folder / name))


def prepare_compiler() -> None:
    """Call `use_private_folders`, and set the folder of precompiled headers, or disable them. Imports torch's compiler.

    Raises TinyLMError if the cache folder cannot be created, or if other users can write to it.
    """
    use_private_folders()
    from torch._inductor import codecache, config

    # torch puts precompiled headers into its default folder even if TORCHINDUCTOR_CACHE_DIR is set.
    if hasattr(codecache, "_HEADER_DIR") and hasattr(codecache, "_HEADER_LOCK_DIR"):
        codecache._HEADER_DIR = str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(Path(codecache._HEADER_DIR) / "locks")
    else:
        config.cpp_cache_precompile_headers = False
