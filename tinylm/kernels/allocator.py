"""The memory allocator of the C library, which may keep memory that torch has freed."""

import ctypes

M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE_BLOCK = 1 << 20  # bytes


def return_large_blocks() -> bool:
    """Let malloc return freed blocks of LARGE_BLOCK and more to the system at once. Returns False without glibc.

    By default, glibc raises this threshold to the size of the largest block that was mapped and freed (at most 32 MiB).
    Smaller blocks are allocated on the heap, where freed blocks leave gaps. Musl, macOS and Windows have no such
    setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError on Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK))
