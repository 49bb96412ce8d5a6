"""Damage, kills and full disks, on a run of a few hundred weights. A read gives what was saved, or a TinyLMError."""

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.shell import snapshot
from tests.variants import small
from tinylm import checkpoint as c
from tinylm.checkpoint import RunFolder, load_model, read_config, restore_model
from tinylm.config import AdapterConfig, Budget, DataConfig, RunConfig, RuntimeConfig, TokenizerConfig, TrainingConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.model.build import build_model
from tinylm.place import check_free, only_user
from tinylm.text.tokenizer import train_char

TOKENIZER = train_char("abc")
SHAPE = small(vocab_size=4, context=4, layers=1, width=4, heads=2, kv_heads=1, ffn_width=4)
CONFIG = RunConfig(
    version="0.1",
    created="now",
    model=SHAPE,
    tokenizer=TokenizerConfig(kind="char", sha256=TOKENIZER.sha256),
    data=DataConfig(
        corpus=("c.txt",),
        train_characters=9,
        fingerprint="f",
        characters=10,
        bytes=10,
        documents=1,
        train_tokens=9,
        val_tokens=1,
    ),
    training=TrainingConfig(budget=Budget(steps=9), batch_size=2, micro_batch=1, lr=0.1, min_lr=0.0, warmup=0.0),
    runtime=RuntimeConfig(device="cpu", dtype="fp32", compile=False, threads=1),
)

Content = tuple[dict[str, bytes], dict[str, bytes], dict[str, Any]]


def weights_of(generation: int) -> dict[str, Tensor]:
    return {name: tensor + generation for name, tensor in build_model(SHAPE, seed=1).state_dict().items()}


def optimizer_of(generation: int) -> dict[str, Tensor]:
    return {"embedding.weight/exp_avg": torch.full((4, 4), float(generation)), "norm.weight/step": torch.tensor(1.0)}


def state_of(generation: int) -> dict[str, Any]:
    return {"step": generation, "val_loss": 1.0 / (1 + generation), "rng": {"cpu": "00"}}


def save(run: RunFolder, generation: int) -> None:
    state = state_of(generation)
    run.save_best(weights_of(generation), CONFIG, generation, state["val_loss"])
    run.save_last(weights_of(generation), optimizer_of(generation), state, CONFIG)


def saved_run(path: Path, *generations: int) -> RunFolder:
    run = RunFolder.create(path, CONFIG, TOKENIZER)
    for generation in generations or (0,):
        save(run, generation)
    return run


def raw(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


def best_generation(path: Path) -> int:
    """Loads the model as `sample` does, and says which save it is of; anything between two saves fails."""
    model, _, _, weights = load_model(path)
    assert raw(dict(model.state_dict())) == raw(weights.tensors) == raw(weights_of(weights.step))
    assert weights.val_loss == state_of(weights.step)["val_loss"]
    model(torch.tensor([[0, 1, 2]]))
    return weights.step


def last_generation(path: Path) -> int:
    """Loads what `--resume` goes on from, and says which save it is of."""
    config = read_config(path)
    last = RunFolder(path).load_last(config)
    generation = last.state["step"]
    assert last.state == state_of(generation)
    assert raw(dict(restore_model(config, last.weights, Path()).state_dict())) == raw(weights_of(generation))
    assert raw(last.optimizer) == raw(optimizer_of(generation))
    return int(generation)


def names(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# What is written.


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", 0, 1, 2)
    assert (best_generation(tmp_path / "run"), last_generation(tmp_path / "run")) == (2, 2)
    model, config, tokenizer, _ = load_model(tmp_path / "run")
    assert not model.training
    assert config == CONFIG
    assert tokenizer.sha256 == TOKENIZER.sha256


def test_best_and_last_weights_are_saved_apart(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    run.save_last(weights_of(5), optimizer_of(5), state_of(5), CONFIG)
    assert (best_generation(tmp_path / "run"), last_generation(tmp_path / "run")) == (0, 5)


def test_a_folder_holds_the_documented_files_and_nothing_is_pickled(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0, 1)
    run.append_metrics({"step": 1})
    assert names(tmp_path / "run") == {
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "model.safetensors",
        "last/model.safetensors",
        "last/optimizer.safetensors",
        "last/state.json",
        "last/manifest.json",
    }
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file() and file.suffix not in (".json", ".jsonl"):
            safetensors.torch.load_file(file)


def test_a_run_leaves_no_trace_until_its_first_save(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", CONFIG, TOKENIZER)
    run.append_metrics({"step": 0})
    run.save_best(weights_of(0), CONFIG, 0, 1.0)
    assert not (tmp_path / "run").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == [".run.tinylm-new"]
    run.save_last(weights_of(0), optimizer_of(0), state_of(0), CONFIG)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert run.read_metrics() == [{"step": 0}]


def test_a_save_before_the_first_step_has_no_optimizer_and_loads(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    run.save_last(weights_of(0), {}, state_of(0), CONFIG)
    assert RunFolder(tmp_path / "run").load_last(CONFIG).optimizer == {}


def test_weights_that_share_memory_or_lie_askew_are_saved(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    shared = torch.arange(12.0).reshape(3, 4)
    run.save_best({"a": shared, "b": shared.t(), "c": torch.tensor(1.0, dtype=torch.bfloat16)}, CONFIG, 1, None)
    tensors = c.read_weights(tmp_path / "run", CONFIG)
    assert torch.equal(tensors.tensors["b"], shared.t())
    assert (tensors.step, tensors.val_loss) == (1, None)


def test_a_summary_tells_what_is_saved(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 3)
    run.save_last(weights_of(5), optimizer_of(5), state_of(5), CONFIG)
    summary = c.summarise(tmp_path / "run")
    assert summary.pop("saved") > 0
    assert summary == {
        "kind": "model",
        "parameters": sum(tensor.numel() for tensor in weights_of(0).values()),
        "step": 5,
        "best_step": 3,
        "val_loss": 0.25,
    }
    shutil.rmtree(tmp_path / "run" / "last")
    assert c.summarise(tmp_path / "run")["step"] == 3


# Damage.


def check_reads(path: Path) -> None:
    """Every way to read a run gives what was saved or raises a TinyLMError, and no other exception."""
    for read in (best_generation, last_generation):
        with contextlib.suppress(TinyLMError):
            assert read(path) == 1
    with contextlib.suppress(TinyLMError):
        c.summarise(path)
    with contextlib.suppress(TinyLMError):
        RunFolder(path).cut_metrics(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "run"
    saved_run(path, 1).append_metrics({"step": 1, "val_loss": 2.0})
    return path


FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "metrics.jsonl",
    "last/model.safetensors",
    "last/optimizer.safetensors",
    "last/state.json",
    "last/manifest.json",
)


@contextlib.contextmanager
def replaced(file: Path, content: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=80)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_does_no_harm(run: Path, name: str, place: float, bit: int) -> None:
    content = bytearray((run / name).read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    with replaced(run / name, bytes(content)):
        check_reads(run)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=25)
@given(part=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_noticed(run: Path, name: str, part: float) -> None:
    content = (run / name).read_bytes().rstrip(b"\n")  # which nobody would miss
    with replaced(run / name, content[: int(part * len(content))]):
        check_reads(run)
        if name != "metrics.jsonl":
            with pytest.raises(TinyLMError):
                (last_generation if name.startswith("last/") else best_generation)(run)
    assert best_generation(run) == last_generation(run) == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"7", b"{}", b'"text"', b"\xff\xfe", b"\x80" * 20])
def test_a_file_of_something_else_is_noticed(run: Path, name: str, content: bytes) -> None:
    with replaced(run / name, content):
        check_reads(run)


@pytest.mark.parametrize("name", [name for name in FILES if name != "metrics.jsonl"])
def test_a_missing_file_is_named(run: Path, name: str) -> None:
    (run / name).rename(run / "away")
    try:
        with pytest.raises(TinyLMError, match=Path(name).name.replace(".", r"\.")):
            (last_generation if name.startswith("last/") else best_generation)(run)
    finally:
        (run / "away").rename(run / name)


def test_weights_without_their_last_tensor_or_of_another_save_are_noticed(run: Path, tmp_path: Path) -> None:
    """A safetensors file that is sound in itself, but not the one that was saved."""
    tensors = weights_of(1)
    with safetensors.safe_open(run / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    shorter = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}
    others = [(shorter, metadata), (weights_of(2), metadata), (tensors, {**metadata, "step": "2"}), (tensors, None)]
    for index, (content, data) in enumerate([*others, ({**tensors, "norm.weight": torch.ones(5)}, metadata)]):
        safetensors.torch.save_file(content, tmp_path / f"{index}", data)
        for place, read in (("", best_generation), ("last/", last_generation)):
            file = run / f"{place}model.safetensors"
            with replaced(file, (tmp_path / f"{index}").read_bytes()), pytest.raises(TinyLMError):
                read(run)


@pytest.mark.parametrize("changes", [{"layers": 2}, {"rope_theta": 500.0}, {"dropout": 0.5}, {"tie": False}])
def test_weights_under_another_shape_are_noticed(run: Path, changes: dict[str, Any]) -> None:
    other = dataclasses.replace(CONFIG, model=dataclasses.replace(SHAPE, **changes))
    with replaced(run / "config.json", json.dumps(other.to_json()).encode()):
        for read in (best_generation, last_generation):
            with pytest.raises(TinyLMError):
                read(run)


def test_another_tokenizer_is_noticed(run: Path) -> None:
    for other in (train_char("acb"), train_char("abcd")):
        with (
            replaced(run / "tokenizer.json", other.to_str().encode()),
            pytest.raises(TinyLMError, match="is not the tokenizer that these weights were trained with"),
        ):
            load_model(run)


class Trap:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def pickled(mark: Path, path: Path) -> None:
    pickle.dump(Trap(mark), path.open("wb"))


def pickled_by_torch(mark: Path, path: Path) -> None:
    torch.save({"model": Trap(mark)}, path)


@pytest.mark.parametrize("write", [pickled, pickled_by_torch])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_pickle_is_never_opened_whatever_it_is_called(
    run: Path, name: str, write: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    write(tmp_path / "mark", tmp_path / "trap")
    with replaced(run / name, (tmp_path / "trap").read_bytes()):
        check_reads(run)
        if name.endswith(".safetensors"):
            with pytest.raises(TinyLMError, match=r"not a safetensors file|has changed since it was saved"):
                (last_generation if name.startswith("last/") else best_generation)(run)
    assert not (tmp_path / "mark").exists()


def test_a_pickle_beside_no_weights_is_named_and_left_closed(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", 0)
    (tmp_path / "run" / "model.safetensors").unlink()
    pickled_by_torch(tmp_path / "mark", tmp_path / "run" / "model.pt")
    with pytest.raises(TinyLMError, match=r"has no model\.safetensors; model\.pt is not opened, since a pickle"):
        load_model(tmp_path / "run")
    with pytest.raises(UsageError, match="pickled checkpoints are never opened"):
        load_model(tmp_path / "run" / "model.pt")
    assert not (tmp_path / "mark").exists()


# Paths that are no run, and formats of the future.


def test_a_path_that_is_no_run_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no run at .*absent"):
        read_config(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"is not a run folder: it has no config\.json"):
        read_config(tmp_path)


def test_a_newer_format_asks_for_an_upgrade(run: Path) -> None:
    values = {**CONFIG.to_json(), "format": 3, "something": "new"}
    with (
        replaced(run / "config.json", json.dumps(values).encode()),
        pytest.raises(TinyLMError, match=r"newer tinylm \(format 3, this one reads 2\); upgrade tinylm"),
    ):
        read_config(run)


def test_an_older_format_asks_for_training_again(run: Path) -> None:
    with (
        replaced(run / "config.json", json.dumps({"format": 1}).encode()),
        pytest.raises(TinyLMError, match=r"older tinylm \(format 1, this one reads 2\); train the model again"),
    ):
        read_config(run)


def test_a_run_without_a_last_save_cannot_be_resumed_and_still_loads(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run" / "last")
    with pytest.raises(TinyLMError, match=r"has no last/ folder, so it cannot be resumed"):
        last_generation(tmp_path / "run")
    assert best_generation(tmp_path / "run") == 4


def test_an_adapter_is_not_loaded_as_a_model(tmp_path: Path) -> None:
    adapter = AdapterConfig(base="b", base_digest="d", rank=1, alpha=1.0, dropout=0.0, targets=("q_proj",))
    config = dataclasses.replace(CONFIG, adapter=adapter)
    run = RunFolder.create(tmp_path / "run", config, TOKENIZER, {"peft_type": "LORA"})
    run.save_best({"lora": torch.ones(2)}, config, 1, 0.5)
    run.save_last({"lora": torch.ones(2)}, {}, state_of(1), config)
    with pytest.raises(UsageError, match="is an adapter, not a model; give its base as --model"):
        load_model(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text()) == {"peft_type": "LORA"}
    assert c.summarise(tmp_path / "run")["kind"] == "adapter"
    assert torch.equal(c.read_weights(tmp_path / "run", config).tensors["lora"], torch.ones(2))
    for other in (dataclasses.replace(adapter, alpha=2.0), dataclasses.replace(adapter, base_digest="e")):
        with pytest.raises(TinyLMError, match="does not match its digest"):
            c.read_weights(tmp_path / "run", dataclasses.replace(config, adapter=other))


# Metrics.


def test_metrics_after_a_step_are_cut_and_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    for step in range(5):
        run.append_metrics({"step": step, "loss": step / 3})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [record["step"] for record in run.read_metrics()] == [0, 1, 2, 3, 4]
    run.cut_metrics(2)
    run.append_metrics({"step": 3})
    assert run.read_metrics() == [*({"step": s, "loss": s / 3} for s in range(3)), {"step": 3}]


def test_a_run_without_metrics_has_none(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    assert run.read_metrics() == []
    run.cut_metrics(3)
    assert run.read_metrics() == []


# A kill or a full disk at any moment.

WRITES = ((os, "fsync"), (safetensors.torch, "save_file"), (Path, "write_text"), (Path, "mkdir"))
MOVES = ((Path, "rename"), (Path, "replace"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree"))


class Killed(BaseException):
    """No handler of any error runs any more, and nothing touches the disk."""


class Disk:
    """Counts what changes the disk. From number `fails_at` on, writes fail (full) or nothing is done (killed)."""

    def __init__(self, patch: pytest.MonkeyPatch, killed: bool, fails_at: int | None) -> None:
        self.calls = 0
        for owner, name in WRITES + (MOVES if killed else ()):
            original = getattr(owner, name)

            def call(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
                self.calls += 1
                if fails_at is None or self.calls < fails_at:
                    return original(*args, **kwargs)
                if self.calls == fails_at:  # some of a file was written
                    if name == "write_text":
                        original(args[0], args[1][: len(args[1]) // 2], **kwargs)
                    if name == "save_file":
                        original(*args, **kwargs)
                        os.truncate(args[1], 40)
                raise Killed if killed else OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(owner, name, call)


def interrupted(work: Callable[[], None], killed: bool, fails_at: int | None) -> int | None:
    """Does the work on a failing disk; the number of changes to it when the work was done, else None."""
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch, killed, fails_at)
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


both = pytest.mark.parametrize("killed", [True, False], ids=["killed", "full"])


@both
def test_a_failed_save_leaves_the_one_before_it_or_is_whole(killed: bool, tmp_path: Path) -> None:
    """And the next save succeeds, whatever the failed one left behind."""
    template = tmp_path / "template"
    saved_run(template, 0, 1)

    def save_again(path: Path) -> Callable[[], None]:
        return lambda: save(RunFolder(path), 2)

    shutil.copytree(template, tmp_path / "whole")
    changes = interrupted(save_again(tmp_path / "whole"), killed, None)
    assert changes is not None and changes > 8
    seen = set()
    for fails_at in range(1, changes + 1):
        path = tmp_path / f"run{fails_at}"
        shutil.copytree(template, path)
        assert interrupted(save_again(path), killed, fails_at) is None
        assert killed or not (path / "last.new").exists()
        seen.add((best_generation(path), last_generation(path)))
        check_free(path, force=True)
        save(RunFolder(path), 3)
        assert (best_generation(path), last_generation(path)) == (3, 3)
    assert seen == {(1, 1), (2, 1), (2, 2)}


@both
@pytest.mark.parametrize("replaces", [False, True])
def test_a_run_appears_whole_or_not_at_all(killed: bool, replaces: bool, tmp_path: Path) -> None:
    """After a failure the same command can be given again, with --force."""

    def work(path: Path) -> Callable[[], None]:
        def begin() -> None:
            check_free(path, force=True)
            save(RunFolder.create(path, CONFIG, TOKENIZER), 2)

        return begin

    def prepare(path: Path) -> None:
        if replaces:
            saved_run(path, 1)

    prepare(tmp_path / "whole")
    changes = interrupted(work(tmp_path / "whole"), killed, None)
    assert changes is not None and changes > 8
    for fails_at in range(1, changes + 1):
        path = tmp_path / f"run{fails_at}"
        prepare(path)
        ended_well = interrupted(work(path), killed, fails_at) is not None
        assert not ended_well or best_generation(path) == 2  # what failed came after the run was in its place
        if replaces:
            assert best_generation(path) in (1, 2)
        elif path.exists():
            assert best_generation(path) == 2
        work(path)()
        assert (best_generation(path), last_generation(path)) == (2, 2)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        ({"last.new": 2}, 2),
        ({"last.old": 1}, 1),
        ({"last.new": 2, "last.old": 1}, 2),
        ({"last": 1, "last.new": 2}, 1),
        ({"last": 2, "last.old": 1}, 2),
        ({"last": 3, "last.new": 2, "last.old": 1}, 3),
    ],
)
def test_a_swap_that_was_interrupted_is_finished(there: dict[str, int], expected: int, tmp_path: Path) -> None:
    """Also when the next save is interrupted too."""
    path = tmp_path / "run"
    run = saved_run(path, 0)
    for name, generation in there.items():
        saved_run(tmp_path / "other", generation)
        shutil.copytree(tmp_path / "other" / "last", path / f"{name}.made")
        shutil.rmtree(tmp_path / "other")
    shutil.rmtree(path / "last")
    for name in there:
        (path / f"{name}.made").rename(path / name)
    for fails_at in range(1, 24, 2):
        again = tmp_path / f"again{fails_at}"
        shutil.copytree(path, again)
        interrupted(lambda again=again: save(RunFolder(again), 5), killed=True, fails_at=fails_at)
        assert last_generation(again) in (expected, 5)
    assert last_generation(path) == expected
    save(run, 5)
    assert last_generation(path) == 5
    assert not (path / "last.new").exists()
    assert not (path / "last.old").exists()


def test_half_a_save_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """Without its manifest, which is written at the end."""
    path = tmp_path / "run"
    saved_run(path, 1)
    shutil.copytree(path / "last", path / "last.new")
    (path / "last").rename(path / "last.old")
    (path / "last.new" / "manifest.json").unlink()
    (path / "last.new" / "model.safetensors").write_bytes(b"half")
    assert last_generation(path) == 1


# Where a run may be written.


def test_a_free_path_is_free(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for force in (False, True):
        check_free(tmp_path / "absent", force)
        check_free(tmp_path / "empty", force)
    saved_run(tmp_path / "empty", 1)
    assert best_generation(tmp_path / "empty") == 1


def test_a_run_that_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "run"
    saved_run(path, 1).append_metrics({"step": 1})
    (path / "tokens").mkdir()
    with pytest.raises(UsageError, match=rf"already holds a run.* --resume {path}.*--force.*--out"):
        check_free(path, force=False)
    check_free(path, force=True)
    assert best_generation(path) == 1
    run = RunFolder.create(path, CONFIG, TOKENIZER)
    assert best_generation(path) == 1
    save(run, 2)
    assert best_generation(path) == last_generation(path) == 2
    assert run.read_metrics() == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("stranger", ["notes.txt", ".git", "src", "model.pt", "config.json.orig"])
def test_a_folder_that_holds_anything_else_is_never_touched(force: bool, stranger: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    saved_run(path, 1)
    (path / stranger).mkdir()
    with pytest.raises(UsageError, match=rf"holds other things than a run \({stranger}\)"):
        check_free(path, force)
    assert best_generation(path) == 1


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize("entry", ["tokens", "metrics.jsonl", "tokenizer.json", "last"])
def test_a_folder_that_only_looks_like_part_of_a_run_is_never_touched(force: bool, entry: str, tmp_path: Path) -> None:
    (tmp_path / "mine" / entry).mkdir(parents=True)
    with pytest.raises(UsageError, match="holds other things than a run"):
        check_free(tmp_path / "mine", force)
    assert (tmp_path / "mine" / entry).exists()


@pytest.mark.parametrize("force", [True, False])
def test_a_file_is_never_overwritten(force: bool, tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("mine")
    with pytest.raises(UsageError, match="thesis is a file; choose another folder"):
        check_free(tmp_path / "thesis", force)
    assert (tmp_path / "thesis").read_text() == "mine"


def test_what_an_interrupted_start_left_is_cleared_away(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", CONFIG, TOKENIZER)
    check_free(tmp_path / "run", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hidden", "generation"), [((".run.tinylm-new", ".run.tinylm-old"), 2), ((".run.tinylm-old",), 1)]
)
def test_a_run_that_a_kill_left_under_a_hidden_name_is_found_before_anything_is_cleared_away(
    hidden: tuple[str, ...], generation: int, tmp_path: Path
) -> None:
    for name in hidden:
        saved_run(tmp_path / "made", {".run.tinylm-new": 2, ".run.tinylm-old": 1}[name])
        (tmp_path / "made").rename(tmp_path / name)
    with pytest.raises(UsageError, match="already holds a run"):
        check_free(tmp_path / "run", force=False)
    assert best_generation(tmp_path / "run") == generation


def test_a_stranger_that_comes_during_training_is_not_deleted(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", 1)
    check_free(tmp_path / "run", force=True)
    run = RunFolder.create(tmp_path / "run", CONFIG, TOKENIZER)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(TinyLMError, match=r"holds other things than a run \(notes\.txt\)"):
        save(run, 2)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert best_generation(tmp_path / "run") == 1


@pytest.mark.parametrize("part", ["", "last"])
def test_a_run_that_cannot_be_replaced_is_refused_before_the_training(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only folder refuses new entries; tests may run as root, who is refused by nothing."""
    path = tmp_path / "run"
    saved_run(path, 1)
    mkdtemp = tempfile.mkdtemp

    def read_only(**options: Any) -> str:
        if options["dir"] == path / part:
            raise OSError(errno.EROFS, "Read-only file system")
        return mkdtemp(**options)

    monkeypatch.setattr(tempfile, "mkdtemp", read_only)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=r"run cannot be replaced, since .* cannot be written: Read-only file system"):
        check_free(path, force=True)
    assert snapshot(tmp_path) == before


def test_what_is_left_of_a_replaced_run_is_no_error_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    saved_run(path, 1)
    check_free(path, force=True)
    run = RunFolder.create(path, CONFIG, TOKENIZER)

    def immutable(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(c, "remove_run", immutable)
        save(run, 2)
    assert best_generation(path) == 2
    save(run, 3)
    assert last_generation(path) == 3


def test_a_run_that_was_deleted_during_training_is_not_said_to_be_intact(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 1)
    shutil.rmtree(tmp_path / "run")
    for write in (lambda: save(run, 2), lambda: run.append_metrics({"step": 2})):
        with pytest.raises(
            TinyLMError, match=r"run was deleted or moved during training, with all that was saved"
        ) as e:
            write()
        assert "intact" not in str(e.value)


@pytest.mark.skipif(os.name != "posix", reason="on Windows the lock is released first")
def test_the_lock_is_released_and_its_file_deleted(tmp_path: Path) -> None:
    for _ in range(2):
        with only_user(tmp_path / "run"):
            assert [entry.name for entry in tmp_path.iterdir()] == [".run.tinylm-lock"]
        assert list(tmp_path.iterdir()) == []


def test_on_windows_the_lock_is_released_before_its_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows deletes no open file."""
    order: list[str] = []
    release, unlink = filelock.FileLock.release, Path.unlink
    monkeypatch.setattr("tinylm.place.WINDOWS", True)
    monkeypatch.setattr(filelock.FileLock, "release", lambda self: (order.append("release"), release(self))[1])
    monkeypatch.setattr(Path, "unlink", lambda self, **options: (order.append("delete"), unlink(self, **options))[1])
    with only_user(tmp_path / "run"):
        pass
    assert order[:2] == ["release", "delete"]


def test_a_run_that_is_in_its_place_is_saved_whatever_becomes_of_the_folder_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = c.flush_folder

    def full(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(folder)

    monkeypatch.setattr(c, "flush_folder", full)
    saved_run(tmp_path / "run", 1)
    assert best_generation(tmp_path / "run") == last_generation(tmp_path / "run") == 1
