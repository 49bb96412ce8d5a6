"""Command lines that messages suggest: how to resume a run, and the next step after an error."""

import shlex
from pathlib import Path

from tinylm.errors import (
    AdapterNotModelError,
    NoModelError,
    NoRunError,
    NotMergeableError,
    NotResumableError,
    NotTrainedError,
    OtherRunKindError,
    RunExistsError,
    SaveError,
    TinyLMError,
    UnknownCharactersError,
)
from tinylm.files import read_json


def shell_quote(path: Path) -> str:
    """The path as one word of a shell command."""
    return shlex.quote(str(path))


def resume_command(path: Path) -> str:
    """The command line that resumes the run at `path`."""
    try:
        adapter = read_json(path / "config.json")["adapter"]
        command = {"lora": "finetune-lora", "bottleneck": "finetune-adapter"}[adapter["kind"]]
    except (OSError, ValueError, KeyError, TypeError):  # a model, or a run that cannot be read
        command = "train"
    return f"tinylm {command} --resume {shell_quote(path)}"


def next_step(error: TinyLMError) -> str:
    """A sentence with the command to run after this error, or "" for an error without such a command."""
    match error:
        case NoRunError():
            return "List the runs with: tinylm runs."
        case NoModelError():
            return "Train one with: tinylm train corpus.txt."
        case RunExistsError():
            return f"To continue it: {resume_command(error.path)}."
        case AdapterNotModelError(kind="lora"):
            return f"To merge both: tinylm merge-lora {shell_quote(error.path)} --out merged."
        case NotResumableError(is_adapter=False):
            return (
                f"To start a new run from its weights: tinylm train --init-from {shell_quote(error.path)} corpus.txt."
            )
        case NotMergeableError():
            return "Use it with --adapter, in tinylm sample and tinylm eval."
        case NotTrainedError():
            return (
                f"To start a new run from its weights: tinylm train --init-from {shell_quote(error.path)} corpus.txt."
            )
        case OtherRunKindError():
            return f"To continue it: {resume_command(error.path)}."
        case UnknownCharactersError(model=Path() as model):
            return f"To add them to a copy of the model: tinylm train --init-from {shell_quote(model)} --extend-vocab."
        case SaveError(resumable=True):
            return f"Remove the cause, then continue: {resume_command(error.path)}."
    return ""
