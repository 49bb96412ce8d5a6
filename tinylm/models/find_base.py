"""Models found again by the digest of their weights, which a run recorded: bases of adapters, and teachers."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

from tinylm.config.run import LAST, RunConfig, run_of
from tinylm.errors import TinyLMError
from tinylm.models.open import is_foreign
from tinylm.run_directory.layout import CHECKPOINTS, MODEL_FILE
from tinylm.run_directory.loading import read_config
from tinylm.run_directory.weights import read_header
from tinylm.system.files import (
    cache_root,
    is_link,
    is_private_entry,
    private_folder,
    read_bytes,
    replacing,
    resolve_links,
)

BASES = "bases"  # in the cache
KEPT_PATHS, MAX_PATHS_BYTES = 4, 1 << 15  # for each digest
MAX_SEARCHED_RUNS = 1000  # per folder, when a base model or adapters are searched for


def find_base_model(path: Path, recorded: str, digest: str) -> Path | None:
    """The model with this digest that the run at `path` recorded, such as the base of an adapter, or `None`. The first
    that exists:

    1. a run beside the adapter or directly in checkpoints/ whose weights have the recorded digest, or which recovered
       those weights by undoing all merges (`recovered_digest`), or its `last/`; in each folder, one with the recorded
       name first
    2. a Hugging Face folder or GGUF file with the recorded name, not a link, in one of these folders
    3. the model of 1 or 2 at a path that `remember_base` has kept for the digest, the last one first

    The digest of a foreign model is compared by `load_base_model`, which reads all weights.
    """
    base = PureWindowsPath(recorded)  # splits at slashes and backslashes
    base_name = base.parent.name if base.name == LAST else base.name
    for run, config in _runs_nearby(path, first=base_name):
        if _is_base(run, config, digest):
            return run
        if not is_link(run / LAST) and _is_base(run / LAST, config, digest):
            return run / LAST
    for folder in _folders_nearby(path):
        named = folder / base_name
        with contextlib.suppress(OSError):  # a name that is too long
            if base_name not in ("", "..") and not is_link(named) and is_foreign(named):
                return named
    for kept in _remembered(digest):
        with contextlib.suppress(TinyLMError, OSError, ValueError):
            if is_foreign(kept) or _is_base(kept, read_config(kept), digest):
                return kept
    return None


def _remembered(digest: str) -> list[Path]:
    """The paths that `remember_base` has kept for a digest, the last one first."""
    with contextlib.suppress(TinyLMError, OSError, ValueError):
        file = cache_root() / BASES / digest
        if is_private_entry(file, BASES):
            return [Path(os.fsdecode(path)) for path in read_bytes(file, MAX_PATHS_BYTES).split(b"\0")]
    return []


def remember_base(digest: str, base: Path) -> None:
    """Keep the path of a base model that an adapter was trained on in the cache, for `find_base_model`, beside those of
    the same weights at other places.

    A stranger can write any path into an adapter, but nothing into the user's cache. Failures are ignored, since the
    base can be named.
    """
    with contextlib.suppress(TinyLMError, OSError), replacing(private_folder(BASES) / digest) as unfinished:
        paths = list(dict.fromkeys([resolve_links(base), *_remembered(digest)]))[:KEPT_PATHS]
        unfinished.write_bytes(b"\0".join(map(os.fsencode, paths)))


def _is_base(run: Path, config: RunConfig, digest: str) -> bool:
    with contextlib.suppress(TinyLMError, OSError):  # damaged weights
        digests = (config.recovered_digest, read_header(run / MODEL_FILE).digest)
        return config.adapter is None and digest in digests
    return False


def find_adapters(path: Path) -> list[Path]:
    """The adapters beside the run at `path` or directly in checkpoints/ that were trained on its best weights.

    Empty if its weights file cannot be read.
    """
    adapters: list[Path] = []
    with contextlib.suppress(TinyLMError, OSError):
        digest = read_header(path / MODEL_FILE).digest
        for run, config in _runs_nearby(path):
            if config.adapter is not None and config.adapter.base_digest == digest:
                adapters.append(run)
    return adapters


def _folders_nearby(path: Path) -> list[Path]:
    return list(dict.fromkeys((run_of(path.absolute()).parent, CHECKPOINTS.absolute())))


def _runs_nearby(path: Path, first: str | None = None) -> Iterator[tuple[Path, RunConfig]]:
    """Yield the runs in the folder of `path` and in checkpoints/, sorted by path, with their configurations.

    In each folder, a run named `first` comes first, and at most MAX_SEARCHED_RUNS are read. Damaged runs are skipped.
    """
    for folder in _folders_nearby(path):
        runs = sorted(file.parent for file in folder.glob("[!.]*/config.json"))
        runs.sort(key=lambda run: run.name != first)
        for run in runs[:MAX_SEARCHED_RUNS]:
            try:
                config = read_config(run)
            except (TinyLMError, OSError):
                continue
            yield run, config
