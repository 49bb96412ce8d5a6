"""The lock of a run directory, and saves: whole or not there at all, whenever the process ends."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
import safetensors.torch

from tests.run_directory.saved_runs import (
    CONFIG,
    TOKENIZER,
    best_save,
    last_save,
    save,
    saved_run,
    state_of,
    weights_of,
)
from tests.shell import snapshot
from tinylm.errors import RunExistsError, TinyLMError, UsageError
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.lock_and_commit import check_free, lock_run
from tinylm.run_directory.metrics_log import read_metrics


@pytest.mark.skipif(os.name != "posix", reason="on Windows the lock is released first")
def test_a_locked_run_is_a_usage_error_until_the_lock_is_released_and_its_file_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_run(tmp_path / "run"):
            assert [entry.name for entry in tmp_path.iterdir()] == [".run.tinylm-lock"]
            words = r"Another process is writing .*run; wait until it ends"
            with pytest.raises(UsageError, match=words), lock_run(tmp_path / "run"):
                pass
        assert list(tmp_path.iterdir()) == []


def test_on_windows_the_lock_is_released_before_its_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows cannot delete an open file."""
    order: list[str] = []
    release, unlink = filelock.FileLock.release, Path.unlink
    monkeypatch.setattr(filelock.FileLock, "release", lambda self: (order.append("release"), release(self))[1])
    monkeypatch.setattr(Path, "unlink", lambda self, **options: (order.append("delete"), unlink(self, **options))[1])
    with lock_run(tmp_path / "run", windows=True):
        pass
    assert order[:2] == ["release", "delete"]


def test_a_path_without_a_name_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("", "..", "."):
        with pytest.raises(UsageError, match="cannot be the name of a run directory"), lock_run(Path(name)):
            pass


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.ENOENT])
def test_a_lock_file_that_cannot_be_created_is_not_reported_as_another_process(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc is an example of ENOENT, which filelock reports as contention."""

    def fail(path: str, *arguments: Any, **options: Any) -> int:
        raise OSError(code, os.strerror(code), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fail)
        reason = "" if code == errno.ENOENT else rf": {os.strerror(code)}; choose another `out`"
        words = rf"^Cannot write .*run: cannot create .*\.run\.tinylm-lock{reason}"
        with pytest.raises(TinyLMError, match=words) as caught, lock_run(tmp_path / "run"):
            pass
    assert not isinstance(caught.value, UsageError)


@pytest.mark.skipif(os.name != "posix", reason="links need privileges elsewhere")
def test_a_link_in_the_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / ".run.tinylm-lock").symlink_to(tmp_path / "target")
    with pytest.raises(TinyLMError, match="Cannot write"), lock_run(tmp_path / "run"):
        pass
    assert not (tmp_path / "target").exists()


WRITES = ((os, "fsync"), (safetensors.torch, "save_file"), (Path, "write_text"), (Path, "mkdir"))
MOVES = ((Path, "rename"), (Path, "replace"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree"))


@pytest.fixture(autouse=True)
def without_flushing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls is tested; the disk takes most of the time for `fsync`."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(BaseException):
    """Simulates a kill: no error handler catches it, and nothing more is written."""


class FailingDisk:
    """Counts changes of the disk. From change `fails_at` on, writes fail (a full disk) or nothing is done (killed)."""

    def __init__(self, patch: pytest.MonkeyPatch, killed: bool, fails_at: int | None) -> None:
        self.calls = 0
        for owner, name in WRITES + (MOVES if killed else ()):
            original = getattr(owner, name)

            def call(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                self.calls += 1
                if fails_at is None or self.calls < fails_at:
                    return original(*args, **kwargs)
                if self.calls == fails_at:  # a file is partly written
                    if name == "write_text":
                        original(args[0], args[1][: len(args[1]) // 2], **kwargs)
                    if name == "save_file":
                        original(*args, **kwargs)
                        os.truncate(args[1], 40)
                raise Killed if killed else OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(owner, name, call)


def interrupted(work: Callable[[], None], killed: bool, fails_at: int | None) -> int | None:
    """Run `work` on a failing disk; return the number of changes if it completed, otherwise `None`."""
    with pytest.MonkeyPatch.context() as patch:
        disk = FailingDisk(patch, killed, fails_at)
        try:
            work()
        except Killed:
            assert killed
            return None
        except TinyLMError as error:
            assert not killed
            assert "No space left on device" in str(error)
            assert error.exit_code == 1
            return None
        return disk.calls


killed_or_full = pytest.mark.parametrize("killed", [True, False], ids=["killed", "full"])


@killed_or_full
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_save_leaves_the_previous_save_or_is_complete(ranks: int, killed: bool, tmp_path: Path) -> None:
    """The next save succeeds, whatever the failed one has left. ranks: those that write their rows"""
    template = tmp_path / "template"
    saved_run(template, 0, 1)

    def save_again(path: Path) -> Callable[[], None]:
        return lambda: save(RunDirectory(path), 2, ranks)

    shutil.copytree(template, tmp_path / "whole")
    changes = interrupted(save_again(tmp_path / "whole"), killed, None)
    assert changes is not None and changes > 8
    seen = set()
    for fails_at in range(1, changes + 1):
        path = tmp_path / f"run{fails_at}"
        shutil.copytree(template, path)
        assert interrupted(save_again(path), killed, fails_at) is None
        assert killed or ranks > 1 or not (path / "last.new").exists()
        seen.add((best_save(path), last_save(path)))
        check_free(path, force=True)
        save(RunDirectory(path), 3)
        assert (best_save(path), last_save(path)) == (3, 3)
    assert seen == {(1, 1), (2, 1), (2, 2)}


def save_without_last(run: RunDirectory, number: int) -> None:
    """As imports and merges do; such runs cannot be resumed."""
    run.save_for_inference(weights_of(number), CONFIG, number, state_of(number)["val_loss"])
    run.commit()


@pytest.mark.parametrize(
    ("killed", "replaces", "write"),
    [
        (True, True, save),
        (False, True, save),
        pytest.param(True, False, save, marks=pytest.mark.slow),
        (True, True, save_without_last),
        (False, True, save_without_last),
    ],
)
def test_a_new_run_appears_complete_or_not_at_all(
    killed: bool, replaces: bool, write: Callable[[RunDirectory, int], None], tmp_path: Path
) -> None:
    """After a failure the same run can be created again, with `force`."""

    def work(path: Path, number: int) -> Callable[[], None]:
        def begin() -> None:
            check_free(path, force=True)
            write(RunDirectory.create(path, CONFIG, TOKENIZER), number)

        return begin

    def prepare(path: Path) -> None:
        if replaces:
            shutil.copytree(tmp_path / "template", path)

    work(tmp_path / "template", 1)()
    prepare(tmp_path / "whole")
    changes = interrupted(work(tmp_path / "whole", 2), killed, None)
    assert changes is not None and changes > 5
    for fails_at in range(1, changes + 1):
        path = tmp_path / f"run{fails_at}"
        prepare(path)
        completed = interrupted(work(path, 2), killed, fails_at) is not None
        assert not completed or best_save(path) == 2  # the failure came after the commit
        if replaces or path.exists():
            assert best_save(path) in ((1, 2) if replaces else (2,))
        work(path, 3)()
        assert best_save(path) == 3
        assert write is save_without_last or last_save(path) == 3


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ({"last.new": 2}, 2),
        ({"last.old": 1}, 1),
        ({"last.new": 2, "last.old": 1}, 2),
        ({"last": 1, "last.new": 2}, 1),
        ({"last": 2, "last.old": 1}, 2),
        ({"last": 3, "last.new": 2, "last.old": 1}, 3),
    ],
)
def test_an_interrupted_replacement_of_last_is_finished(folders: dict[str, int], expected: int, tmp_path: Path) -> None:
    """Also if the next save is interrupted, too."""
    path = tmp_path / "run"
    run = saved_run(path, 0)
    shutil.rmtree(path / "last")
    for name, number in folders.items():
        saved_run(tmp_path / str(number), number)
        (tmp_path / str(number) / "last").rename(path / name)
    for fails_at in range(1, 24, 2):
        again = tmp_path / f"again{fails_at}"
        shutil.copytree(path, again)
        interrupted(lambda again=again: save(RunDirectory(again), 5), killed=True, fails_at=fails_at)
        assert last_save(again) in (expected, 5)
    assert last_save(path) == expected
    save(run, 5)
    assert last_save(path) == 5
    assert not (path / "last.new").exists()
    assert not (path / "last.old").exists()


def test_a_save_without_its_manifest_is_never_used(tmp_path: Path) -> None:
    """The manifest is written last, so that a `last.new` without it is incomplete."""
    path = tmp_path / "run"
    saved_run(path, 1)
    shutil.copytree(path / "last", path / "last.new")
    (path / "last").rename(path / "last.old")
    (path / "last.new" / "manifest.json").unlink()
    (path / "last.new" / "model.safetensors").write_bytes(b"half")
    assert last_save(path) == 1


# Where a run may be written


def test_an_absent_path_and_an_empty_folder_are_free_and_a_run_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for force in (False, True):
        check_free(path, force)
    path.mkdir()
    for force in (False, True):
        check_free(path, force)
    saved_run(path, 1).append_metrics({"step": 1})
    (path / "tokens").mkdir()
    with pytest.raises(RunExistsError, match=r"already holds a run.*`force`.*`out`"):
        check_free(path, force=False)
    check_free(path, force=True)
    assert best_save(path) == 1
    run = RunDirectory.create(path, CONFIG, TOKENIZER)
    assert best_save(path) == 1
    save(run, 2)
    assert best_save(path) == last_save(path) == 2
    assert read_metrics(run.path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("force", [True, False])
def test_files_that_belong_to_no_run_are_never_changed(force: bool, tmp_path: Path) -> None:
    """A foreign file in a run, a part of a run without its config, and a file in the place of the run."""
    for foreign in ("notes.txt", ".git", "src", "model.pt", "config.json.orig"):
        path = tmp_path / foreign / "run"
        saved_run(path, 1)
        (path / foreign).mkdir()
        with pytest.raises(UsageError, match=rf"contains files that do not belong to a run \({foreign}\)"):
            check_free(path, force)
        assert best_save(path) == 1
    for entry in ("tokens", "metrics.jsonl", "tokenizer.json", "last"):
        (tmp_path / entry / entry).mkdir(parents=True)
        with pytest.raises(UsageError, match=r"contains no run: it has no config\.json"):
            check_free(tmp_path / entry, force)
        assert (tmp_path / entry / entry).exists()
    (tmp_path / "thesis").write_text("mine")
    with pytest.raises(UsageError, match="thesis is a file; choose another "):
        check_free(tmp_path / "thesis", force)
    assert (tmp_path / "thesis").read_text() == "mine"


@pytest.mark.parametrize("names", [(".run.tinylm-old", ".run.tinylm-new"), (".run.tinylm-old",)])
def test_a_run_left_under_a_hidden_name_by_a_kill_is_recovered_before_leftovers_are_deleted(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    for number, name in enumerate(names, start=1):
        saved_run(tmp_path / "made", number)
        (tmp_path / "made").rename(tmp_path / name)
    with pytest.raises(RunExistsError, match="already holds a run"):
        check_free(tmp_path / "run", force=False)
    assert best_save(tmp_path / "run") == len(names)
    RunDirectory.create(tmp_path / "other", CONFIG, TOKENIZER)  # the start was interrupted before the first save
    check_free(tmp_path / "other", force=False)
    assert not [entry for entry in tmp_path.iterdir() if "other" in entry.name]


def test_a_foreign_file_created_during_training_is_not_deleted(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", 1)
    check_free(tmp_path / "run", force=True)
    run = RunDirectory.create(tmp_path / "run", CONFIG, TOKENIZER)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(TinyLMError, match=r"contains files that do not belong to a run \(notes\.txt\)"):
        save(run, 2)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert best_save(tmp_path / "run") == 1


def test_a_run_that_cannot_be_replaced_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is simulated: tests may run as root, for whom no folder is read-only."""
    path, mkdtemp = tmp_path / "run", tempfile.mkdtemp
    saved_run(path, 1)
    before = snapshot(tmp_path)
    for part in ("", "last"):

        def read_only(part: str = part, **options: Any) -> str:
            if options["dir"] == path / part:
                raise OSError(errno.EROFS, "Read-only file system")
            return mkdtemp(**options)

        monkeypatch.setattr(tempfile, "mkdtemp", read_only)
        with pytest.raises(UsageError, match=r"Cannot replace .*run: .* cannot be written: Read-only file system"):
            check_free(path, force=True)
        assert snapshot(tmp_path) == before


def test_a_new_run_is_committed_even_if_the_replaced_one_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    saved_run(path, 1)
    check_free(path, force=True)
    run = RunDirectory.create(path, CONFIG, TOKENIZER)

    def immutable(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", immutable)
        save(run, 2)
    assert (tmp_path / ".run.tinylm-old").exists()
    assert best_save(path) == 2
    save(run, 3)
    assert last_save(path) == 3


def test_a_committed_run_is_saved_even_if_its_parent_folder_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    saved_run(tmp_path / "run", 1)
    assert best_save(tmp_path / "run") == last_save(tmp_path / "run") == 1
