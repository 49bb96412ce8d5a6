"""Bad texts, damaged run directories, missing devices and full disks: message, exit code, and that nothing is lost."""

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.machines import write_profile
from tests.shell import TINY, assert_error, copied, edit_config, run_ok, same_tensors, snapshot, story, tinylm
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model

ONE_STEP = (*TINY, "--steps", 1)


# Texts


# Run directories


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def other_tokenizer(run: Path) -> None:
    run_ok("train-tokenizer", "-", "--kind", "char", "--out", run / "tokenizer.json", "--force", stdin="abc")


def pickled(run: Path) -> None:
    (run / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(1)}, run / "model.pt")


def foreign(run: Path) -> None:
    safetensors.torch.save_file({"transformer.wte.weight": torch.zeros(2, 2)}, run / "model.safetensors")


def renamed_tensor(run: Path) -> None:
    file = run / "model.safetensors"
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = safetensors.torch.load_file(file)
    tensors["norm2.weight"] = tensors.pop("norm.weight")
    safetensors.torch.save_file(tensors, file, metadata)


def changed_config(run: Path) -> None:
    edit_config(run, model={"norm_placement": "post"})


def cut(name: str) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / name, (run / name).stat().st_size // 2)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (
        lambda run: (run / "model.safetensors").unlink(),
        "has no model.safetensors. Copy the whole run directory",
    ),
    "empty weights": (lambda run: (run / "model.safetensors").write_bytes(b""), "model.safetensors is damaged"),
    "truncated weights": (cut("model.safetensors"), "model.safetensors is damaged"),
    "first byte flipped": (lambda run: flip(run / "model.safetensors", 0), "model.safetensors is damaged"),
    "last byte flipped": (lambda run: flip(run / "model.safetensors", -1), "does not match its digest"),
    "foreign weights": (foreign, "model.safetensors was not written by tinylm: it has no"),
    "renamed tensor": (renamed_tensor, "does not match its digest"),
    "pickle": (pickled, "model.pt is not opened, since a pickle can execute its author's code"),
    "pickle under our name": (
        lambda run: torch.save({}, run / "model.safetensors"),
        "is damaged or not a safetensors file",
    ),
    "no tokenizer": (
        lambda run: (run / "tokenizer.json").unlink(),
        "no tokenizer.json; copy the whole run directory",
    ),
    "truncated tokenizer": (cut("tokenizer.json"), "tokenizer.json as a tokenizer"),
    "another tokenizer": (other_tokenizer, "tokenizer.json is not the tokenizer that these weights were trained with"),
    "truncated config": (cut("config.json"), "config.json is damaged"),
    "another config": (changed_config, "belongs to another config.json"),
    "edited config": (
        lambda run: (run / "config.json").write_text(
            (run / "config.json").read_text().replace('"seed": 0', '"seed": 1')
        ),
        "config.json: it has changed since it was saved",
    ),
    "config of another tool": (
        lambda run: (run / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "n_layer": 12}'),
        "config.json: it is not a tinylm run configuration",
    ),
    "config that is a list": (lambda run: (run / "config.json").write_text("[]"), "not a tinylm run configuration"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_an_error_with_the_reason(name: str, run: Path, here: Path) -> None:
    damage, message = DAMAGE[name]
    path = copied(run, here / "bad")
    damage(path)
    before = snapshot(here)
    for command in (("sample", "-n", 2), ("eval",), ("finetune-lora", "-", "--out", "ad", "--steps", 1)):
        assert_error(tinylm(*command, "--model", "bad", stdin=story(500)), 1, message, "bad", sentences=3)
    assert_error(tinylm("train", "-", "--init-from", "bad", "--steps", 1, stdin=story(500)), 1, message, sentences=3)
    assert snapshot(here) == before


def test_every_flipped_bit_in_the_weights_is_detected_or_harmless(run: Path, here: Path) -> None:
    """At offsets spread over header and tensors, the weights are refused or unchanged."""
    path = copied(run, here / "bad")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    refusals = 0
    for offset in [*range(0, 300, 23), *range(300, len(whole), len(whole) // 40)]:
        flip(file, offset)
        result = tinylm("sample", "-m", path, "-n", 1)
        if result.exit_code:
            assert_error(result, 1, str(file), sentences=3)
            refusals += 1
        else:
            assert same_tensors(file, run / "model.safetensors")
        file.write_bytes(whole)
    assert refusals > 40


class Bomb:
    """Its pickle creates a folder when it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("option", ["--model", "--adapter"])
def test_a_pickle_is_rejected_without_loading_it(option: str, here: Path) -> None:
    (here / "model.pt").write_bytes(pickle.dumps(Bomb()))
    assert_error(tinylm("sample", option, "model.pt"), 2, "model.pt is a file", "Pickled checkpoints are never opened")
    (here / "folder").mkdir()
    shutil.copy("model.pt", "folder/pytorch_model.bin")
    assert_error(tinylm("sample", option, "folder"), 2, "folder is not a run directory: it has no config.json")
    assert not (here / "exploded").exists()


def test_pickles_in_a_run_directory_are_never_loaded(run: Path, here: Path) -> None:
    path = copied(run, here / "bad")
    for name in ("model.safetensors", "last/model.safetensors", "last/optimizer.safetensors"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    assert_error(tinylm("sample", "-m", path), 1, "pickles are never opened")
    assert_error(tinylm("train", "--resume", path), 1, "damaged", sentences=3)
    assert not (here / "exploded").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_a_run_with_a_damaged_last_save_can_be_sampled_but_not_resumed(
    name: str, how: str, run: Path, here: Path
) -> None:
    path = copied(run, here / "bad")
    file = path / "last" / name
    if how == "missing":
        file.unlink()
    elif how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        flip(file, file.stat().st_size // 2)
    before = snapshot(path)
    result = tinylm("train", "--resume", path, "--steps", 300)
    assert_error(result, 1, f"{path}/last is damaged", "cannot be resumed", f"tinylm train --init-from {path}")
    assert snapshot(path) == before
    run_ok("sample", "-m", path, "-n", 2)


def test_a_run_without_a_last_save_cannot_be_resumed(run: Path, here: Path) -> None:
    path = copied(run, here / "bad")
    shutil.rmtree(path / "last")
    assert_error(
        tinylm("train", "--resume", path), 1, "has no last/ folder, so it cannot be resumed", "--init-from", sentences=3
    )


@pytest.mark.parametrize("path", ["nope.gguf", "models/hf", "../run"])
@pytest.mark.parametrize("command", [("sample", "--model"), ("import",), ("sample", "--adapter")])
def test_a_missing_file_or_folder_is_not_called_a_run(command: tuple[str, ...], path: str) -> None:
    result = tinylm(*command, path)
    assert_error(result, 2, f"Error: There is no file or folder at {path}; check the path.", sentences=1)


@pytest.mark.parametrize("name", ["cut", "flipped", "missing"])
def test_a_damaged_adapter_is_an_error(name: str, adapter: Path, here: Path) -> None:
    path = copied(adapter, here / "bad")
    file = path / "adapter.safetensors"
    {"cut": lambda: os.truncate(file, 200), "flipped": lambda: flip(file, -1), "missing": file.unlink}[name]()
    base = ("--model", adapter.parent / "run")
    assert_error(tinylm("sample", "--adapter", path, *base), 1, "adapter.safetensors", sentences=3)
    assert_error(tinylm("merge-lora", path, *base, "--out", "merged"), 1, "adapter.safetensors", sentences=3)
    assert [entry.name for entry in here.iterdir()] == ["bad"]


# The machine


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_missing_device_is_an_error(device: str, run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    (here / "text.txt").write_text(story(1000))
    before = snapshot(here)
    commands = (
        ("train", "text.txt", *ONE_STEP),
        ("sample", "-m", run),
        ("eval", "text.txt", "-m", run),
        ("finetune-lora", "text.txt", "-m", run, "--out", "ad", "--steps", 1),
    )
    for command in commands:
        assert_error(tinylm(*command, "--device", device), 2, f"--device {device} is not available", "use one of: cpu.")
    assert snapshot(here) == before


def test_a_run_from_a_gpu_can_be_sampled_but_not_resumed_without_one(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = copied(run, here / "gpu")
    edit_config(path, runtime={"device": "cuda"})
    assert_error(tinylm("train", "--resume", path, "--steps", 300), 2, "--device cuda is not available")
    run_ok("sample", "-m", path, "-n", 1)


def test_out_of_memory_names_the_options_that_reduce_memory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sizes: object, **how: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes.")

    (here / "text.txt").write_text(story(1000))
    before = snapshot(here)
    monkeypatch.setattr(RunDirectory, "create", refuse)
    assert_error(
        tinylm("train", "text.txt", *ONE_STEP),
        1,
        "Out of memory. Reduce one of: --size, --context, --batch-size, --micro-batch.",
    )
    assert snapshot(here) == before


# The disk


class FullDisk:
    """Makes os.fsync fail as on a full disk, after `works` successful calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, works: int) -> None:
        self.calls = 0
        self.works = works
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        if self.calls > self.works:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._fsync(descriptor)


FULL = "No space left on device"


def test_a_disk_full_at_the_first_save_leaves_a_complete_run_or_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the writes before the run appears at its path is the first to fail in turn."""
    (here / "text.txt").write_text(story(1000))
    before = snapshot(here)
    failures = 0
    for works in range(40):
        with monkeypatch.context() as patch:
            patch.setenv("TINYLM_CACHE", str(here.parent / f"cache-{works}"))
            write_profile(here.parent / f"cache-{works}")
            disk = FullDisk(patch, works)
            result = tinylm("train", "text.txt", "--out", "run", *ONE_STEP)
        if disk.calls <= works:
            break
        failures += 1
        assert_error(result, 1, FULL)
        if (here / "run").exists():
            load_model(here / "run")
            shutil.rmtree(here / "run")
        assert snapshot(here) == before
    assert result.exit_code == 0
    assert failures > 10


def test_a_disk_full_while_replacing_a_run_leaves_the_old_or_the_new_run(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "text.txt").write_text(story(1000))
    path = copied(run, here / "old")
    before = snapshot(path)
    kept = 0
    for works in range(12):
        with monkeypatch.context() as patch:
            FullDisk(patch, works)
            result = tinylm("train", "text.txt", "--out", "old", "--force", *ONE_STEP)
        assert_error(result, 1, FULL)
        load_model(path)
        kept += snapshot(path) == before
        if kept <= works:
            break
    assert kept >= 5


@pytest.mark.usefixtures("shelf_cache")
def test_a_disk_full_during_a_later_save_keeps_the_previous_save(
    run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = copied(run, here / "again")
    resume = ("train", "--resume", path, "--steps", 202, "--save-every", 1, "--eval-every", 1)
    for works in range(20):
        with monkeypatch.context() as patch:
            disk = FullDisk(patch, works)
            result = tinylm(*resume)
        if disk.calls <= works:
            break
        assert_error(result, 1, FULL)
        load_model(path)
        assert not (path / "last.new").exists()
        run_ok(*resume)
        shutil.rmtree(path)
        copied(run, path)
    assert result.exit_code == 0
    assert works > 10


@pytest.mark.usefixtures("shelf_cache")
def test_a_write_error_of_safetensors_names_the_run(run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied(run, here / "again")

    def fail(*arguments: object) -> None:
        raise safetensors.SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    result = tinylm("train", "--resume", path, "--steps", 202)
    assert_error(
        result,
        1,
        f"Cannot write {path}: ",
        FULL,
        "; the last save is intact.",
        f"then continue: tinylm train --resume {path}",
    )
    monkeypatch.undo()
    load_model(path)
