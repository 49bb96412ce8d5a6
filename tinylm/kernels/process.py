"""Settings of the process for system libraries: OpenMP, the memory allocator and the caches of torch's compilers.

OpenMP spin: how long idle threads of torch poll for work before they sleep. The environment variable `GOMP_SPINCOUNT`
sets the number of polls; libgomp reads it when torch is imported.

Allocator: whether the memory of freed tensors stays with the process (decision 036), and lies in huge pages (decision
054). Only glibc has these settings (mallopt(3)).

Cache folders of torch's compilers: they contain code and pickles, so only this user may write (decision 020).
"""

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tinylm.system.files import private_folder

SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")  # values that the user has set are kept
SPIN_COUNT = 10_000  # polls, a fraction of a millisecond (decision 015)


def set_spin_count() -> None:
    """Set `GOMP_SPINCOUNT` for this process and its children, unless the user has set how threads wait.

    Called before torch is imported: OpenMP reads the variable when it is loaded.
    """
    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Context manager for the import of another library with OpenMP, whose threads poll `count` times.

    Values that the user has set are kept.
    """
    before = os.environ.get("GOMP_SPINCOUNT")
    if "OMP_WAIT_POLICY" in os.environ or before not in (None, str(SPIN_COUNT)):
        yield
        return
    os.environ["GOMP_SPINCOUNT"] = str(count)
    try:
        yield
    finally:
        del os.environ["GOMP_SPINCOUNT"]
        if before is not None:
            os.environ["GOMP_SPINCOUNT"] = before


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # parameters of mallopt
MAPPED_BLOCKS = 65_536  # glibc's default for M_MMAP_MAX
LARGE_BLOCK = 1 << 20  # bytes
HUGE_BLOCK = 1 << 30  # bytes
NEVER = -1  # converted to size_t, the largest number of bytes
HEAP_BLOCK, HEAP_BLOCKS = 1 << 29, 8  # bytes of a block, and blocks, of the heap that is advised to use huge pages
HUGE_PAGE = 1 << 21  # bytes; larger ones, as with pages of 64 KB, would waste memory
HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def keep_freed_blocks() -> bool:
    """Let malloc keep freed blocks of up to HUGE_BLOCK for later allocations, in huge pages if Linux has them. Returns
    False without glibc.

    By default, it maps and unmaps larger tensors one by one, and gives the end of the heap back. Each step of training
    then gets new pages, which the system has to find and clear.
    """
    if not set_thresholds(map_from=HUGE_BLOCK, trim_from=NEVER):
        return False
    if _has_huge_pages() and not _is_address_space_limited():
        _advise_huge_pages()
    return True


def _has_huge_pages() -> bool:
    try:
        return int(HUGE_PAGE_SIZE.read_text(encoding="ascii")) <= HUGE_PAGE
    except (OSError, ValueError):  # not Linux, or without them
        return False


def _is_address_space_limited() -> bool:
    """Whether memory counts for a limit of the process or of the system before it is used."""
    import resource

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    try:
        return OVERCOMMIT.read_text(encoding="ascii").strip() == "2" or any(x != resource.RLIM_INFINITY for x in limits)
    except OSError:
        return True


def _advise_huge_pages() -> None:
    """Extend the heap by HEAP_BLOCKS blocks, which take no memory until they are used, and advise the kernel to use
    huge pages there.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    blocks = []
    for _ in range(HEAP_BLOCKS):
        address = library.malloc(ctypes.c_size_t(HEAP_BLOCK))
        if address is None:
            break
        blocks.append(address)
        begin = -(-address // HUGE_PAGE) * HUGE_PAGE
        size = (address + HEAP_BLOCK - begin) // HUGE_PAGE * HUGE_PAGE
        library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    for address in blocks:
        library.free(ctypes.c_void_p(address))


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

    Older versions of glibc accept `map_from` up to 32 MiB only. For more, no block is mapped there, of any size.
    """
    is_accepted = _mallopt(M_MMAP_THRESHOLD, map_from)
    return _mallopt(M_MMAP_MAX, MAPPED_BLOCKS if is_accepted else 0) and _mallopt(M_TRIM_THRESHOLD, trim_from)


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
    # A value that torch itself has set, to its default, is not one of the user.
    default = getattr(sys.modules.get("torch._inductor.runtime.cache_dir_utils"), "default_cache_dir", None)
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if default is not None and chosen is not None and Path(chosen) == Path(default()).absolute():
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
