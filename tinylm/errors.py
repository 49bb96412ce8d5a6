"""The errors of tinylm. A message says what is wrong, where, and what to do next. If the next step is a command,
`tinylm.commands.next_steps` adds it.

Messages name a setting in backticks, by its name in Python; the command layer replaces it by the flag.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

SETTING = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`]*))?`")  # `kv_heads`, or with a value: `position="learned"`


class TinyLMError(Exception):
    """Base of all errors. Raised as such for a failure of disk or memory, and for a damaged or mismatched run."""

    exit_code = 1


class UsageError(TinyLMError):
    """A setting, a text, a prompt, a path or a device that cannot be used.

    settings: the names of the settings that it is about, those in the message included
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.settings = {name for name, _ in SETTING.findall(message)}


@contextlib.contextmanager
def concerning(*settings: str) -> Iterator[None]:
    """Name the settings whose values are used within this context in each UsageError that leaves it."""
    try:
        yield
    except UsageError as error:
        error.settings.update(settings)
        raise


class DamagedError(TinyLMError):
    """Encoded text that is incomplete, damaged or of another corpus. The message names the folder to delete."""


class NoRunError(UsageError):
    """There is no run at a path."""


class NoModelError(UsageError):
    """No model has been trained yet."""


class RunExistsError(UsageError):
    """There is already a run at `path`, where a new run would be written."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} already holds a run; `force` replaces it, and another `out` keeps both.")
        self.path = path


class AdapterNotModelError(UsageError):
    """The run at `path` is an adapter, of the given kind, where a model is needed."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(f"{path} is an adapter, not a model; give its base as `model` and this as `adapter`.")
        self.path = path
        self.kind = kind


class NotMergeableError(UsageError):
    """The adapter at `path` is not a LoRA, so it cannot be merged into its base model."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__(f"{path} is a {kind} adapter, which changes no weight matrix and cannot be merged.")


class UnknownCharactersError(UsageError):
    """A text has characters that are not in the vocabulary.

    model: a model whose vocabulary can be extended, or `None`. text: the paths of the text.
    """

    def __init__(self, message: str, model: Path | None, text: tuple[str, ...]) -> None:
        super().__init__(message)
        self.model = model
        self.text = text


class BadFilesError(UsageError):
    """Files that cannot be read: damaged, in another encoding, or not in their format. `is_skippable`: whether the
    corpus has others.
    """

    def __init__(self, message: str, is_skippable: bool = False) -> None:
        super().__init__(message)
        self.is_skippable = is_skippable


class SaveError(TinyLMError):
    """The run at `path` cannot be written. `resumable`: whether it has a last save to resume from."""

    def __init__(self, message: str, path: Path, resumable: bool) -> None:
        super().__init__(message)
        self.path = path
        self.resumable = resumable


class NotResumableError(TinyLMError):
    """The run at `path`, of a model or of an adapter, has no complete last save to resume from."""

    def __init__(self, message: str, path: Path, is_adapter: bool) -> None:
        super().__init__(message)
        self.path = path
        self.is_adapter = is_adapter


class NotTrainedError(UsageError):
    """The run at `path` was merged or imported, so there is no training to resume."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was not trained but merged or imported, so it cannot be resumed.")
        self.path = path


class OtherRunKindError(UsageError):
    """The run at `path` is of another kind (model, LoRA, bottleneck adapter) than the request to resume it."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is a run of another kind.")
        self.path = path


class DivergedError(TinyLMError):
    """Training diverged: a loss, a gradient or a weight is not a finite number."""

    exit_code = 3


class OutputError(TinyLMError):
    """Standard output cannot be written, for example on a full disk."""


class ClosedOutputError(OutputError):
    """The reader of standard output has closed it, as `head` does. The process then ends without a message."""

    exit_code = 0


class InterruptedRunError(TinyLMError):
    """A signal stopped a training run. The exit code is 128 + `signal_number`, as in a shell."""

    BEFORE_FIRST_STEP = "Stopped before the first step; nothing was written."

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class PeerError(TinyLMError):
    """Another process of a run failed, with the given exit code, and therefore this one ends."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class JoinError(TinyLMError):
    """The processes of a run cannot be connected."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 120 characters; without a message, its type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


_MEMORY_MESSAGES = (  # in errors of torch, and of its import
    *("out of memory", "can't allocate memory", "cublas_status_alloc_failed"),
    *("cannot allocate memory", "failed to map segment from shared object"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the system is out of memory. Errors of torch are recognised by their messages, since only
    some devices have an exception of their own.
    """
    text = str(error).lower()
    is_memory = any(message in text for message in _MEMORY_MESSAGES) and "operation not permitted" not in text
    return isinstance(error, MemoryError) or is_memory


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Context manager that raises MemoryError for each error for which `is_out_of_memory` is true."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise
