"""The memory allocator of the C library, which may keep memory that torch has freed."""

import ctypes

M_MMAP_THRESHOLD = -3  # of mallopt(3)
LARGE_BLOCK = 1 << 20  # bytes


def return_large_blocks() -> bool:
    """Let malloc return freed blocks of LARGE_BLOCK and more to the system at once. Returns False if it cannot.

    glibc raises the size from which it does so to that of the largest freed block, up to 32 MB, and smaller blocks then
    leave gaps in its heap that later ones do not fill. Musl, macOS and Windows have no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError on Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK))
