"""The names of the files of a run and beside it, and the search for runs by path or name. Does not import torch."""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from tinylm.config.run import LAST, RunConfig, run_of
from tinylm.config.training import GENERATIONS
from tinylm.errors import NoModelError, NoRunError, UsageError
from tinylm.reporter import Reporter
from tinylm.system.files import resolve_links

CHECKPOINTS = Path("checkpoints")  # where runs are written by default
MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"  # in last/
FIRST_FILE = "first.safetensors"  # the weights that training started from, if its objective compares with them
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_FILES = ("adapter_config.json", PEFT_WEIGHTS)  # of a LoRA adapter, for PEFT only
FOREIGN_FILE = "tokenizer_config.json"  # of Hugging Face folders; runs have none
# The best weights of each generation of a run
GENERATION_FILES = tuple(f"generation-{number}.safetensors" for number in range(1, int(GENERATIONS.high) + 1))
WEIGHTS_FILES = (MODEL_FILE, ADAPTER_FILE, FIRST_FILE, *GENERATION_FILES)
FORMER_FILES = tuple(f"teacher-{number}.safetensors" for number in range(1, int(GENERATIONS.high)))  # on 2026-11-30
RECORDS = ("config.json", "tokenizer.json", "metrics.jsonl", "samples.jsonl")
RUN_FILES = (*RECORDS, *WEIGHTS_FILES, *PEFT_FILES, *FORMER_FILES)
RUN_FOLDERS = (LAST, "last.new", "last.old", "tokens")


def weights_file(config: RunConfig) -> str:
    """Name of the weights file of a model or an adapter."""
    return MODEL_FILE if config.adapter is None else ADAPTER_FILE


def staging_directory(path: Path) -> Path:
    """The directory in which a new run for `path` is prepared until its first save."""
    return path.with_name(f".{path.name}.tinylm-new")


def replaced_directory(path: Path) -> Path:
    """The path to which the run at `path` is moved while another one replaces it."""
    return path.with_name(f".{path.name}.tinylm-old")


def lock_file(path: Path) -> Path:
    """The file that is locked while a process writes the run at `path`."""
    return path.with_name(f".{path.name}.tinylm-lock")


def replaces(out: Path, source: Path) -> bool:
    """Whether a run at `out` would replace the model that `source` names, which may be the `last/` of a run."""
    return run_of(resolve_links(out)) == run_of(resolve_links(source))


MAX_DEPTH = 4  # levels of folders that are searched for runs


def run_directories(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Run directories at most `depth` levels below `folder`, sorted by path.

    Hidden folders, folders inside of a run, and the content of linked folders are skipped.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.name[0] != ".")
    except OSError:  # an unreadable folder is skipped
        return
    for path in (path for path in paths if path.is_dir()):  # is_dir is False for a circular link
        if os.path.lexists(path / "config.json"):
            yield path
        elif depth > 1 and not path.is_symlink():
            yield from run_directories(path, depth - 1)


def run_names(file: str) -> list[str]:
    """Names, as paths relative to checkpoints/, of the runs that contain a file named `file`."""
    return [
        path.relative_to(CHECKPOINTS).as_posix() for path in run_directories(CHECKPOINTS) if (path / file).is_file()
    ]


def find_run(name: Path, reporter: Reporter) -> Path:
    """The run directory at the path `name`, or the run with that name under checkpoints/.

    If there are both, the run at the path is used, with a note. The result is not always a run: it may be a file or
    another folder at the path. If nothing is found: UsageError if similar runs exist or `name` looks like a path; else
    NoRunError.
    """
    by_name = CHECKPOINTS / name
    is_name = not name.is_absolute() and ".." not in name.parts and name.name and path_exists(by_name)
    if is_name and resolve_links(by_name) != resolve_links(name):
        if os.path.lexists(name / "config.json"):
            reporter.note(f"Using the path {name}; the run of that name under {CHECKPOINTS}/ is {by_name}.")
            return name
        return by_name  # at the path there is often the text that the run was trained on
    if path_exists(name):
        return name
    names = [path.relative_to(CHECKPOINTS).as_posix() for path in run_directories(CHECKPOINTS)]
    similar = difflib.get_close_matches(name.as_posix().removeprefix(f"{CHECKPOINTS}/"), names, 3, 0.6)
    is_path = name.suffix == ".gguf" or (len(name.parts) > 1 and name.parts[0] != str(CHECKPOINTS))
    missing = f"There is no file or folder at {name}" if is_path else f"There is no run at {name}"
    if similar:
        raise UsageError(f"{missing}; perhaps you mean {' or '.join(similar)}.")
    if is_path:
        raise UsageError(f"{missing}; check the path.")
    raise NoRunError(f"{missing}.")


def path_exists(path: Path) -> bool:
    """Whether there is a file or folder at `path`, or leftovers of an interrupted replacement beside it."""
    try:
        hidden = (staging_directory(path), replaced_directory(path)) if path.name else ()
        return os.path.lexists(path) or any(directory.exists() for directory in hidden)
    except OSError:
        return False


def newest_model(reporter: Reporter, setting: str = "model") -> Path:
    """The run under checkpoints/ whose model was written last, with a note. Raises NoModelError if there is none.

    setting: that names another model
    """
    weights = [
        path / MODEL_FILE
        for path in run_directories(CHECKPOINTS)
        if (path / MODEL_FILE).is_file() and not (path / FOREIGN_FILE).exists()
    ]
    if not weights:
        raise NoModelError(f"There is no trained model under {CHECKPOINTS}/; train one, or name one with `{setting}`.")
    path = max(weights, key=lambda file: file.stat().st_mtime).parent
    reporter.note(f"Using {path}, the newest model.")
    return path
