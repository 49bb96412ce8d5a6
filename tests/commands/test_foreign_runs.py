"""Forged run directories with valid digests: the worst result of opening one is an error, and no other file changes."""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.machines import write_profile
from tests.shell import (
    TINY,
    assert_error,
    copied,
    edit_config,
    records,
    run_ok,
    same_tensors,
    snapshot,
    story,
    tinylm,
)
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import read_config, read_weights
from tinylm.run_directory.tensor_files import Shard, read_tensors, write_tensors
from tinylm.run_directory.weights import read_header, write_weights

DEEP = "[" * 100_000 + "]" * 100_000
CANARY = "must not change\n"


@pytest.fixture(scope="session")
def piped(shelf: Path) -> Path:
    """A run that was trained on standard input, so that it contains its encoded text."""
    text = (shelf / "one.txt").read_bytes()
    intervals = ("--steps", 4, "--eval-every", 2, "--log-every", 1, "--save-every", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(shelf / "cache"))
        write_profile(shelf / "cache")
        run_ok("train", "-", "--out", shelf / "piped", *intervals, *TINY, stdin=text)
    return shelf / "piped"


@pytest.fixture
def bad(piped: Path, here: Path) -> Path:
    """A copy of the run, to be forged."""
    return copied(piped, here / "checkpoints" / "bad")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A folder outside of the run, which no command may change."""
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "file").write_text(CANARY)
    return folder


def commands(run: Path) -> list[tuple[object, ...]]:
    return [
        ("sample", "--model", run, "-n", 2),
        ("sample", "--model", run, "-n", 20, "--draft", "ngram"),
        ("eval", "--model", run),
        ("eval", "-", "--model", run, "--baselines"),
        ("info", run),
        ("runs",),
        ("runs", "--json"),
        ("train", "-", "--init-from", run, "--steps", 1, "--out", "next"),
        ("finetune-lora", "-", "--model", run, "--steps", 1, "--out", "lora"),
        ("merge-lora", run, "--out", "merged"),
        ("sample", "--adapter", run, "-n", 2),
        ("train", "--resume", run, "--steps", 6),
    ]


def run_all_commands(run: Path, canary: Path) -> list[int]:
    """Run every command that may open the run. Checks that none crashes or changes `canary`; returns the exit codes."""
    codes = []
    before = snapshot(canary)
    for command in commands(run):
        result = tinylm(*command, stdin=story(300))
        assert result.exit_code in (0, 1, 2, 3), (command, result.output)
        for sign in ("Traceback", "Internal error", "Out of memory"):
            assert sign not in result.output, command
        codes.append(result.exit_code)
        assert snapshot(canary) == before, command
    return codes


def test_the_run_works_before_it_is_forged(bad: Path, canary: Path) -> None:
    """Only commands that need an adapter reject it."""
    assert run_all_commands(bad, canary) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 0]


# Links, devices and the like in place of regular files


FILES = (
    *("config.json", "tokenizer.json", "metrics.jsonl", "model.safetensors"),
    *("last/manifest.json", "last/state.json", "last/model.safetensors", "last/optimizer.safetensors"),
    *("tokens/tokens.json", "tokens/train.bin", "tokens/val.bin"),
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "kind",
    ["link", "fifo", "deep", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder", "device", "empty"))],
)
def test_only_regular_files_of_a_run_are_opened(kind: str, name: str, bad: Path, canary: Path) -> None:
    file = bad / name
    content = file.read_bytes()
    file.unlink()
    if kind == "link":
        (canary / "linked").write_bytes(content)
        file.symlink_to(canary / "linked")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.write_text(DEEP if kind == "deep" else "")
    codes = run_all_commands(bad, canary)
    assert any(codes) or name == "metrics.jsonl"
    assert len(codes) == len(commands(bad))


@pytest.mark.parametrize("name", ["last", "tokens"])
def test_a_link_in_place_of_a_folder_of_a_run_is_an_error(name: str, bad: Path, canary: Path) -> None:
    (bad / name).rename(canary / name)
    (bad / name).symlink_to(canary / name)
    codes = run_all_commands(bad, canary)
    assert codes[-1] == 1


@pytest.mark.parametrize("name", ["config.json.tmp", "metrics.jsonl.tmp", "model.safetensors.tmp", "state.json.tmp"])
def test_resuming_does_not_write_through_links_with_temporary_names(name: str, bad: Path, canary: Path) -> None:
    for folder in (bad, bad / "last"):
        (folder / name).symlink_to(canary / "file")
    run_all_commands(bad, canary)
    assert (canary / "file").read_text() == CANARY


@pytest.mark.parametrize("name", ["last.new", "last.old"])
def test_resuming_does_not_write_to_or_empty_linked_folders(name: str, bad: Path, canary: Path) -> None:
    (bad / name).symlink_to(canary)
    run_all_commands(bad, canary)
    run_ok("train", "--resume", bad, "--steps", 12)
    assert snapshot(canary) == {"file": CANARY.encode()}
    assert not (bad / name).is_symlink()


@pytest.mark.parametrize("name", [".out.tinylm-new", ".out.tinylm-old", ".out.tinylm-lock"])
def test_training_does_not_write_to_or_empty_links_beside_the_run(name: str, here: Path, canary: Path) -> None:
    target = canary / "file" if name.endswith("lock") else canary
    (here / name).symlink_to(target)
    tinylm("train", "-", "--steps", 1, *TINY, "--out", "out", stdin=story(500))
    assert snapshot(canary) == {"file": CANARY.encode()}


# The encoded text


def edit_tokens(run: Path, **changes: Any) -> None:
    """Change the entries of both parts in tokens.json."""
    file = run / "tokens" / "tokens.json"
    record = json.loads(file.read_text())
    for part in ("train", "val"):
        record[part] |= changes
    file.write_text(json.dumps(record))


def set_token(run: Path, value: int) -> None:
    """Put a token id into both parts, with valid digests."""
    file = run / "tokens" / "tokens.json"
    record = json.loads(file.read_text())
    for part in ("train", "val"):
        ids = np.fromfile(run / "tokens" / f"{part}.bin", dtype=np.uint8)
        ids[len(ids) // 2] = value
        ids.tofile(run / "tokens" / f"{part}.bin")
        changed = (run / "tokens" / f"{part}.bin").stat().st_mtime_ns
        record[part] |= {"sha256": hashlib.sha256(ids.tobytes()).hexdigest(), "changed": changed}
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"dtype": dtype}
            for dtype in ("O", "object", "float64", "uint16", "|V8", "S1", 7, None, ["uint8"], "x" * 10**6)
        ),
        *({"tokens": tokens} for tokens in (0, -1, 1 << 62, 10.5, "9", None, True)),
        {"changed": "now", "sha256": 0},
        {"changed": 0, "sha256": "0" * 64},
    ],
)
def test_a_forged_tokens_json_is_an_error(changes: dict[str, Any], bad: Path, canary: Path) -> None:
    edit_tokens(bad, **changes)
    codes = run_all_commands(bad, canary)
    assert (codes[1], codes[2], codes[-1]) == (2, 1, 1)


def test_a_token_id_outside_the_vocabulary_is_an_error(bad: Path, canary: Path) -> None:
    set_token(bad, 255)
    codes = run_all_commands(bad, canary)
    assert (codes[1], codes[2], codes[-1]) == (2, 1, 1)
    assert_error(tinylm("eval", "--model", bad), 1, "val.bin has an id that is not in the vocabulary")


@pytest.fixture
def sharded(bad: Path) -> Path:
    """The run, with its training tokens in three files."""
    folder = bad / "tokens"
    index = json.loads((folder / "tokens.json").read_text())
    parts = np.array_split(np.fromfile(folder / "train.bin", dtype=np.uint8), 3)
    index["train"] = [
        {**index["train"], "tokens": len(part), "sha256": hashlib.sha256(part.tobytes()).hexdigest()} for part in parts
    ]
    for part, name in zip(parts, ("train.bin", "train-00001.bin", "train-00002.bin"), strict=True):
        part.tofile(folder / name)
    (folder / "tokens.json").write_text(json.dumps(index))
    return bad


def test_a_run_with_several_token_files_works(sharded: Path, canary: Path) -> None:
    assert run_all_commands(sharded, canary) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 0]


def test_a_damaged_token_file_of_the_training_text_leaves_out_the_baseline_that_reads_it(sharded: Path) -> None:
    file = sharded / "tokens" / "train.bin"
    file.write_bytes(bytes(file.stat().st_size))
    result = run_ok("eval", "--model", sharded, "--baselines")
    assert "Baselines that need the training text are left out: The encoded text in" in result.stderr


@pytest.mark.parametrize(
    "change",
    [
        *({"dtype": dtype} for dtype in ("O", "uint16", None)),
        *({"tokens": tokens} for tokens in (0, -1, 1 << 62, 10.5, None)),
        *({"sha256": digest} for digest in ("0" * 64, None)),
        *([], {}, 7, [7], ["x"], [{}], [{"dtype": "uint8", "tokens": 1}] * 30_000, "x" * (1 << 23)),
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_forged_index_of_several_token_files_is_an_error(change: Any, sharded: Path, canary: Path) -> None:
    file = sharded / "tokens" / "tokens.json"
    index = json.loads(file.read_text())
    if isinstance(change, dict) and change:
        index["train"][1] |= change
    else:
        index["train"] = change
    file.write_text(json.dumps(index))
    codes = run_all_commands(sharded, canary)
    assert (codes[1], codes[-1]) == (2, 1) or ("sha256" in change and codes[-1] == 1)


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device", "missing", "sparse"])
def test_only_regular_token_files_are_opened(kind: str, sharded: Path, canary: Path) -> None:
    file = sharded / "tokens" / "train-00001.bin"
    content = file.read_bytes()
    file.unlink()
    if kind == "link":
        (canary / "linked").write_bytes(content)
        file.symlink_to(canary / "linked")
    elif kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "sparse":
        file.touch()
        os.truncate(file, 1 << 40)
    codes = run_all_commands(sharded, canary)
    assert (codes[1], codes[-1]) == (2, 1)


def test_a_token_id_outside_the_vocabulary_in_a_later_file_is_an_error(sharded: Path, canary: Path) -> None:
    file = sharded / "tokens" / "train-00001.bin"
    file.write_bytes(b"\xff" * file.stat().st_size)
    index = json.loads((sharded / "tokens" / "tokens.json").read_text())
    index["train"][1]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    (sharded / "tokens" / "tokens.json").write_text(json.dumps(index))
    assert run_all_commands(sharded, canary)[-1] == 1
    message = "train-00001.bin has an id that is not in the vocabulary"
    assert_error(tinylm("train", "--resume", sharded, "--steps", 6), 1, message)


def test_tokens_for_speculative_decoding_are_hashed_only_if_the_file_was_changed(
    bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model rejects wrong draft tokens, so that size and modification time suffice here, and only here."""
    hashed: list[str] = []
    digest = hashlib.file_digest

    def spy(file: Any, kind: str) -> Any:
        hashed.append(file.name if isinstance(file.name, str) else "")
        return digest(file, kind)

    file = bad / "tokens" / "train.bin"
    edit_tokens(bad, changed=file.stat().st_mtime_ns)
    monkeypatch.setattr(hashlib, "file_digest", spy)
    run_ok("sample", "--model", bad, "-n", 20, "--draft", "ngram")
    assert hashed == []
    os.utime(file)
    run_ok("sample", "--model", bad, "-n", 20, "--draft", "ngram")
    assert len(hashed) == 1


def test_recorded_corpus_paths_are_printed_but_never_opened(bad: Path, here: Path, canary: Path) -> None:
    fifo = here / "fifo"
    os.mkfifo(fifo)
    for path in (str(fifo), "/", "/etc", "/dev/zero", str(canary)):
        edit_config(bad, data={"corpus": [path], "val_corpus": [path], "tokens_in_run": False})
        codes = run_all_commands(bad, canary)
        assert codes[-1] == 1
    assert_error(
        tinylm("train", "--resume", bad, "--steps", 9),
        1,
        "is no longer in the cache; name its training text",
        str(canary),
    )


# Weights and state


def resave(run: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of the run and of last/, with valid digests."""
    config = read_config(run)
    for folder in (run, run / "last"):
        weights = read_weights(folder, config)
        change(weights.tensors)
        write_weights(folder / "model.safetensors", weights.tensors, config, weights.step, weights.val_loss)
    write_manifest(run)


def write_manifest(run: Path) -> None:
    """Write the manifest of last/ again, with the digests of the present files."""
    last = run / "last"
    hashes = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in last.iterdir() if f.name != "manifest.json"}
    (last / "manifest.json").write_text(json.dumps(hashes))


NORM = "norm.weight"
TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(NORM), "lacks tensor norm.weight"),
    "extra": (lambda t: t.update(more=torch.zeros(2)), "has the unknown tensor more"),
    "misshaped": (lambda t: t.update({NORM: torch.zeros(2, 2)}), "norm.weight is torch.float32 (2, 2), not"),
    "scalar": (lambda t: t.update({NORM: torch.tensor(1.0)}), "norm.weight is torch.float32 (), not"),
    "half": (lambda t: t.update({NORM: t[NORM].half()}), "norm.weight is torch.float16 (16,), not"),
    "integer": (lambda t: t.update({NORM: t[NORM].long()}), "norm.weight is I64, and weights are"),
    "complex": (lambda t: t.update({NORM: t[NORM].to(torch.complex64)}), "norm.weight is C64, and weights are"),
    "byte": (lambda t: t.update({NORM: t[NORM].byte()}), "norm.weight is U8, and weights are"),
    "infinite": (lambda t: t.update({NORM: t[NORM] / 0}), "norm.weight has values that are not finite numbers"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_the_configuration_are_an_error(name: str, bad: Path, canary: Path) -> None:
    change, message = TENSORS[name]
    resave(bad, change)
    assert_error(tinylm("sample", "--model", bad, "-n", 2), 1, message, sentences=3)
    codes = run_all_commands(bad, canary)
    assert (codes[0], codes[2], codes[-1]) == (1, 1, 1)


def test_weights_that_overflow_cause_no_internal_error(bad: Path, canary: Path) -> None:
    resave(bad, lambda tensors: [tensor.fill_(3e38) for tensor in tensors.values()])
    run_all_commands(bad, canary)


def set_metadata(run: Path, **changes: str) -> None:
    config = read_config(run)
    file = run / "model.safetensors"
    weights = read_weights(run, config)
    metadata = {"format": "pt", "step": str(weights.step), "val_loss": "1.5", "digest": weights.digest, **changes}
    write_tensors(file, weights.tensors, metadata)


@pytest.mark.parametrize(
    "changes",
    [
        *({"step": step} for step in ("-1", "1e3", "", "9" * 4000, "9" * 5000, "\ud7ff", str(1 << 53))),
        *({"val_loss": loss} for loss in ("NaN", "1e999", '"x"', "[]", DEEP, "true", "", "9" * 400)),
    ],
    ids=lambda changes: f"{next(iter(changes))}={next(iter(changes.values()))[:9]}",
)
def test_the_metadata_of_a_weights_file_are_validated(changes: dict[str, str], bad: Path, canary: Path) -> None:
    set_metadata(bad, **changes)
    assert_error(tinylm("sample", "--model", bad), 1, "model.safetensors is damaged", sentences=3)
    run_all_commands(bad, canary)


def test_a_damaged_run_is_one_line_of_the_list_and_hides_no_other(bad: Path, piped: Path, here: Path) -> None:
    copied(piped, here / "checkpoints" / "good")
    set_metadata(bad, val_loss='"low"')
    rows = records(run_ok("runs", "--json"))
    assert {(row["name"], row["kind"]) for row in rows} == {("good", "model"), ("bad", "damaged")}
    assert len(run_ok("runs").stdout.splitlines()) == 3


def set_state(run: Path, **changes: Any) -> None:
    file = run / "last" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    write_manifest(run)


COUNTERS = ("step", "micro_batch", "last_eval_step", "n_tokens", "n_sequences")
NUMBERS = (*COUNTERS, "seconds", "setup_seconds", "best_loss", "loss_sum")


@pytest.mark.parametrize("value", ["x", -7, 1 << 60, float("nan"), float("inf"), [], {}, True])
def test_an_impossible_training_state_is_an_error(value: Any, bad: Path, canary: Path) -> None:
    file = bad / "last" / "state.json"
    whole = file.read_text()
    for name in (*NUMBERS, "rng", "metrics", "scaler", "unknown"):
        may_be = {-7: ("best_loss", "loss_sum"), 1 << 60: ("seconds", "setup_seconds", "best_loss", "loss_sum")}
        if (type(value) is int and name in may_be[value]) or (name in ("metrics", "scaler") and value == {}):
            continue
        set_state(bad, **{name: value})
        assert_error(tinylm("train", "--resume", bad, "--steps", 9), 1, "damaged", sentences=3)
        file.write_text(whole)
    write_manifest(bad)
    assert run_all_commands(bad, canary)[-1] == 0


@pytest.mark.parametrize("left, position", [(624, 624), (0, 0), (1, 625), (625, 0), (-1, 1), (300, 300), (2, 0)])
def test_a_generator_state_with_an_index_out_of_range_is_an_error(left: int, position: int, bad: Path) -> None:
    state = bytearray.fromhex(json.loads((bad / "last" / "state.json").read_text())["rng"]["cpu"])
    struct.pack_into("=i", state, 8, left)
    struct.pack_into("=Q", state, 16, position)
    set_state(bad, rng={"cpu": state.hex()})
    assert_error(
        tinylm("train", "--resume", bad, "--steps", 9), 1, "random number generator is out of range", sentences=3
    )


@pytest.mark.parametrize("drawn", [0, 1, 2, 623, 624, 625, 1000])
def test_every_generator_state_that_torch_produces_is_accepted(drawn: int, bad: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(drawn, generator=generator)
    set_state(bad, rng={"cpu": generator.get_state().numpy().tobytes().hex()})
    run_ok("train", "--resume", bad, "--steps", 5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["last/model.safetensors", "last/optimizer.safetensors", "tokens/train.bin"])
def test_a_huge_sparse_file_is_an_error_before_it_is_read(name: str, bad: Path) -> None:
    os.truncate(bad / name, 1 << 40)
    if name.startswith("tokens"):
        edit_tokens(bad, tokens=1 << 40)
    assert_error(tinylm("train", "--resume", bad, "--steps", 9), 1, "it is a sparse file, almost empty", sentences=3)


def test_a_metrics_file_with_too_many_lines_is_an_error(bad: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinylm.run_directory.metrics_log.MAX_LINES", 1000)
    with (bad / "metrics.jsonl").open("a") as file:
        file.write("\n" * 1001)
    assert_error(tinylm("info", bad), 1, "has more than 1000 lines")


def change_optimizer(run: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = run / "last" / "optimizer.safetensors"
    tensors = read_tensors([file])
    change(tensors)
    write_tensors(file, tensors, {"format": "pt"})
    write_manifest(run)


MOMENTUM = "layers.0.attention.q_proj.weight/momentum_buffer"
OPTIMIZERS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "of no parameter": lambda t: t.update({"nothing/exp_avg": torch.zeros(2)}),
    "of another optimizer": lambda t: t.update({"norm.weight/momentum_buffer": torch.zeros(16)}),
    "misshaped": lambda t: t.update({MOMENTUM: torch.zeros(3, 3)}),
    "scalar": lambda t: t.update({MOMENTUM: torch.tensor(0.0)}),
    "half": lambda t: t.update({MOMENTUM: t[MOMENTUM].half()}),
    "integer": lambda t: t.update({MOMENTUM: t[MOMENTUM].int()}),
    "in part": lambda t: t.pop("norm.weight/exp_avg"),
    "without step": lambda t: t.pop("norm.weight/step"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_state_that_does_not_fit_is_an_error(name: str, bad: Path) -> None:
    change_optimizer(bad, OPTIMIZERS[name])
    message = "damaged" if name == "integer" else "The saved optimizer does not fit the model"
    assert_error(tinylm("train", "--resume", bad, "--steps", 9), 1, message, sentences=3)


# A save that several ranks have written


def divide_last(run: Path, ranks: int) -> None:
    """Divide the tensors of last/ among the files of several ranks."""
    save, config = RunDirectory(run).load_last(read_config(run)), read_config(run)
    directory = RunDirectory(run)
    folder, hashes = directory.begin_last(), {}
    for shard in (Shard(index, ranks) for index in range(ranks)):
        parts = save.read_weights(shard), save.read_optimizer(shard)
        hashes |= directory.write_last(folder, *parts, save.state, config, shard)
    directory.commit_last(folder, hashes, save.state)


def rewrite(run: Path, file: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of one rank's file of weights, with a valid digest."""
    tensors, header = read_tensors([run / "last" / file]), read_header(run / "last" / file)
    change(tensors)
    write_weights(run / "last" / file, tensors, read_config(run), header.step, header.val_loss)


FIRST, SECOND = (f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2))
SHARDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda run: (run / "last" / SECOND).unlink(), "last is damaged"),
    "all missing": (lambda run: [file.unlink() for file in (run / "last").glob("*-of-*")], "last is damaged"),
    "without rows": (lambda run: rewrite(run, SECOND, lambda t: t.update({NORM: t[NORM][:1]})), "does not fit"),
    "without a tensor": (lambda run: rewrite(run, FIRST, lambda t: t.pop(NORM)), "does not fit the other 1 files"),
    "with too many rows": (
        lambda run: [rewrite(run, file, lambda t: t.update({NORM: torch.ones(99)})) for file in (FIRST, SECOND)],
        "norm.weight is torch.float32 (198,), not",
    ),
    "integers": (lambda run: rewrite(run, SECOND, lambda t: t.update({NORM: t[NORM].int()})), "norm.weight is I32"),
    "of another run": (
        lambda run: write_tensors(run / "last" / FIRST, read_tensors([run / "last" / FIRST]), {"format": "pt"}),
        "was not written by tinylm",
    ),
    "a number for the manifest": (lambda run: (run / "last" / "manifest.json").write_text("7"), "last is damaged"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_a_forged_save_of_several_ranks_is_an_error(name: str, bad: Path, canary: Path) -> None:
    divide_last(bad, 2)
    change, message = SHARDS[name]
    change(bad)
    if name != "a number for the manifest":
        write_manifest(bad)
    assert_error(tinylm("train", "--resume", bad, "--steps", 9), 1, message, sentences=3)
    assert run_all_commands(bad, canary)[:2] == [0, 0]


def test_one_process_resumes_a_save_of_several_ranks(bad: Path, here: Path) -> None:
    whole = copied(bad, here / "checkpoints" / "whole")
    divide_last(bad, 3)
    for run in (bad, whole):
        run_ok("train", "--resume", run, "--steps", 9)
        config = read_config(run)
        assert RunDirectory(run).load_last(config).state["step"] == 9
    for name in ("model", "optimizer"):
        assert same_tensors(bad / f"last/{name}.safetensors", whole / f"last/{name}.safetensors")


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1, "val_loss": "low"}',
        '{"step": 1, "val_loss": NaN}',
        '{"step": 1, "val_loss": null}',
        '{"step": 1, "val_loss": 1' + "0" * 400 + "}",
        '{"step": -1, "val_loss": 1.0}',
        '{"step": true, "val_loss": 2.0}',
        '{"step": "1", "val_loss": 2.0}',
        '{"step": 1, "val_loss": ' + DEEP + "}",
        '{"step": 1, "val_loss": ' + "9" * 5000 + "}",
        "\x00\x1b[2J",
    ],
    ids=lambda line: line[:26],
)
def test_an_invalid_line_of_metrics_is_skipped(line: str, bad: Path, canary: Path) -> None:
    expected = records(run_ok("info", bad, "--json"))[0]["curve"]
    with (bad / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert records(run_ok("info", bad, "--json"))[0]["curve"] == expected
    run_ok("info", bad)
    assert run_all_commands(bad, canary)[-1] == 0


# Adapters


def test_the_base_of_an_adapter_is_found_by_its_digest_and_not_by_its_recorded_path(
    adapter: Path, run: Path, here: Path, canary: Path
) -> None:
    lora = copied(adapter, here / "checkpoints" / "lora")
    for path in (str(canary), "/", "..", ".", "/dev/zero", "x" * 4000):
        edit_config(lora, adapter={"base": path})
        assert_error(
            tinylm("sample", "--adapter", lora), 2, "is neither beside it nor directly in checkpoints/", "--model"
        )
    edit_config(lora, adapter={"base": str(run)})  # the digest of its weights covers this, too
    copied(run, here / "checkpoints" / "renamed")
    run_ok("sample", "--adapter", lora, "-n", 2)
    moved = here / "elsewhere"
    lora.rename(moved)
    run_ok("sample", "--adapter", moved, "-n", 2)
    edit_config(moved, adapter={"base": "/nowhere"})
    reseal_adapter(moved)
    run_ok("merge-lora", moved, "--out", "merged")
    assert read_config(here / "merged").merged_steps[0] == read_weights(run, read_config(run)).step


def reseal_adapter(adapter: Path) -> None:
    """Save the weights of an adapter again, with the digest of its present configuration."""
    config = read_config(adapter)
    file = adapter / "adapter.safetensors"
    header = read_header(file)
    write_weights(file, read_tensors([file]), config, header.step, header.val_loss)


@pytest.mark.parametrize("name", ["missing", "extra", "misshaped", "infinite"])
def test_adapter_tensors_that_do_not_fit_are_an_error(name: str, adapter: Path, run: Path, here: Path) -> None:
    copied(run, here / "checkpoints" / "run")
    lora = copied(adapter, here / "checkpoints" / "lora")
    config = read_config(lora)
    weights = read_weights(lora, config)
    first = min(weights.tensors)
    changes: dict[str, Callable[[], object]] = {
        "missing": lambda: weights.tensors.pop(first),
        "extra": lambda: weights.tensors.update(more=torch.zeros(2)),
        "misshaped": lambda: weights.tensors.update({first: torch.zeros(2, 2)}),
        "infinite": lambda: weights.tensors[first].fill_(torch.inf),
    }
    changes[name]()
    write_weights(lora / "adapter.safetensors", weights.tensors, config, weights.step, weights.val_loss)
    for command in (("sample", "--adapter", lora, "-n", 2), ("merge-lora", lora, "--out", "merged")):
        assert_error(tinylm(*command), 1, "lora", sentences=3)
