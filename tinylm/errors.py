"""Every error a user can cause: what is wrong, where, and what to do next."""


class TinyLMError(Exception):
    """Something failed on the way: disk, memory, a damaged or mismatched run folder."""

    exit_code = 1


class UsageError(TinyLMError):
    """An option, a text, a prompt, a path or a device that cannot be used."""

    exit_code = 2


class DivergedError(TinyLMError):
    """Training met a loss that is not a finite number."""

    exit_code = 3


class OutputError(TinyLMError):
    """Standard output cannot be written to, as on a full disk."""


class ClosedOutputError(OutputError):
    """The reader of standard output has gone, as `head` does. Nothing is wrong, and there is nobody to tell."""

    exit_code = 0


class InterruptedRunError(TinyLMError):
    """A signal stopped the work after it was saved; `signal_number` is the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


_MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")  # how torch says it


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the system had no memory left: CUDA has an exception of its own, the others only say so."""
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _MEMORY_SIGNS)
