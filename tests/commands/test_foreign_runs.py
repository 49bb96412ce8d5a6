"""Forged run directories with valid digests: the worst result of opening one is an error, and no other file changes.

One forgery of each kind goes through the commands; the values that a file may not have are given to the function that
reads it.
"""

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
from tests.shell import TINY, assert_error, copied, edit_config, records, run_ok, snapshot, story, tinylm
from tests.trained_runs import HELD_OUT
from tinylm.errors import TinyLMError
from tinylm.jobs.run_tokens import reopen_tokens
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_weights
from tinylm.run_directory.metrics_log import iterate_metrics
from tinylm.run_directory.weights import read_header, read_tensors, write_tensors, write_weights
from tinylm.training.state import TrainerState

DEEP = "[" * 100_000 + "]" * 100_000
Tensors = dict[str, Tensor]
Forge = Callable[[Path], object]


@pytest.fixture(scope="session")
def piped(shelf: Path) -> Path:
    """A run that was trained on standard input, so that it contains its encoded text."""
    text = (shelf / "one.txt").read_bytes()
    intervals = ("--steps", 4, "--eval-every", 2, "--log-every", 1, "--save-every", 2, *HELD_OUT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(shelf / "cache"))
        write_profile(shelf / "cache")
        run_ok("train", "-", "--out", shelf / "piped", *intervals, *TINY, stdin=text)
    return shelf / "piped"


@pytest.fixture
def bad(piped: Path, here: Path) -> Path:
    """A copy of the run, to be forged."""
    return copied(piped, here / "checkpoints" / "bad")


@pytest.fixture(autouse=True)
def canary(here: Path) -> Path:
    """A folder outside of the run, which no command may change."""
    folder = here.parent / "canary"
    folder.mkdir()
    (folder / "file").write_text("must not change\n")
    return folder


# Changes of a run, with valid digests


def replace(file: Path, kind: str) -> None:
    """Put a link, a device, a pipe, a folder or other content in place of a file or folder of the run `bad`."""
    file.rename(moved := Path.cwd().parent / "canary" / file.name)
    if kind in ("link", "device"):
        file.symlink_to(moved if kind == "link" else "/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.write_text(DEEP if kind == "deep" else "")


def write_manifest(run: Path) -> None:
    """Write the manifest of last/ again, with the digests of the present files."""
    last = run / "last"
    hashes = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in last.iterdir() if f.name != "manifest.json"}
    (last / "manifest.json").write_text(json.dumps(hashes))


def resave(run: Path, change: Callable[[Tensors], object]) -> None:
    """Change the tensors of the run and of last/."""
    config = read_config(run)
    for folder in (run, run / "last"):
        weights = read_weights(folder, config)
        change(weights.tensors)
        write_weights(folder / "model.safetensors", weights.tensors, config, weights.step, weights.val_loss)
    write_manifest(run)


def set_metadata(run: Path, **changes: str) -> None:
    weights = read_weights(run, read_config(run))
    metadata = {"format": "pt", "step": str(weights.step), "val_loss": "1.5", "digest": weights.digest, **changes}
    write_tensors(run / "model.safetensors", weights.tensors, metadata)


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def set_state(run: Path, **changes: Any) -> None:
    edit_json(run / "last" / "state.json", lambda state: state.update(changes))
    write_manifest(run)


def divide_tokens(run: Path) -> None:
    """Divide the training tokens among three files."""
    folder = run / "tokens"
    parts = np.array_split(np.fromfile(folder / "train.bin", dtype=np.uint8), 3)
    for part, name in zip(parts, ("train.bin", "train-00001.bin", "train-00002.bin"), strict=True):
        part.tofile(folder / name)
    hashes = [{"tokens": len(part), "sha256": hashlib.sha256(part.tobytes()).hexdigest()} for part in parts]
    edit_json(folder / "tokens.json", lambda index: index.update(train=[{**index["train"], **one} for one in hashes]))


def set_token(run: Path, file: str) -> None:
    """Put an id that is not in the vocabulary into a file of tokens."""
    path, index = run / "tokens" / file, run / "tokens" / "tokens.json"
    before = path.read_bytes()
    path.write_bytes(before[:9] + b"\xff" + before[10:])
    hashes = [hashlib.sha256(content).hexdigest() for content in (before, path.read_bytes())]
    index.write_text(index.read_text().replace(*hashes))


def change_optimizer(run: Path, change: Callable[[Tensors], object]) -> None:
    file = run / "last" / "optimizer.safetensors"
    tensors = read_tensors([file])
    change(tensors)
    write_tensors(file, tensors, {"format": "pt"})
    write_manifest(run)


# One forgery of each kind through the commands

NORM = "norm.weight"
COMMANDS: dict[str, tuple[object, ...]] = {
    "info": ("info", "checkpoints/bad"),
    "sample": ("sample", "--model", "checkpoints/bad", "-n", 2),
    "eval": ("eval", "--model", "checkpoints/bad"),
    "tune": ("finetune-lora", "-", "--model", "checkpoints/bad", "--steps", 1, "--out", "lora"),
    "resume": ("train", "--resume", "checkpoints/bad", "--steps", 6),
}
ALL, TOKENS, BEST = " ".join(COMMANDS), "eval resume", "sample eval tune"
NOT_REGULAR, RECORDED = "it is not a regular file", {"corpus": ["/dev/zero"], "tokens_in_run": False}

# Name: the forgery, the commands that report it, and what each of them says.
FORGERIES: dict[str, tuple[Forge, str, str]] = {
    "nothing": (lambda run: None, "", ""),
    "a link for the config": (lambda run: replace(run / "config.json", "link"), ALL, "a symbolic link"),
    "a pipe for the weights": (lambda run: replace(run / "model.safetensors", "pipe"), f"info {BEST}", NOT_REGULAR),
    "a folder for the state": (lambda run: replace(run / "last/state.json", "folder"), "info resume", NOT_REGULAR),
    "a link for the tokens": (lambda run: replace(run / "tokens", "link"), TOKENS, "is damaged"),
    "deep metrics": (lambda run: replace(run / "metrics.jsonl", "deep"), "", ""),
    "a token that is none": (lambda run: set_token(run, "val.bin"), TOKENS, "val.bin has an id that is not in the voc"),
    "a recorded path": (lambda run: edit_config(run, data=RECORDED), TOKENS, "is no longer in the cache"),
    "an infinite loss": (lambda run: set_metadata(run, val_loss="NaN"), f"info {BEST}", "model.safetensors is damaged"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_part_is_an_error_when_it_is_read(name: str, bad: Path, piped: Path, here: Path, canary: Path) -> None:
    forge, reporting, message = FORGERIES[name]
    copied(piped, here / "checkpoints" / "good")
    forge(bad)
    before = snapshot(canary)
    for command, words in COMMANDS.items():
        result = tinylm(*words, stdin=story(300))
        if command in reporting.split():
            assert_error(result, 1, message, sentences=3)
        else:
            assert result.exit_code == 0, (command, result.output)
        assert snapshot(canary) == before, command
    assert ("good", "model") in {(row["name"], row["kind"]) for row in records(run_ok("runs", "--json"))}


def test_nothing_is_written_through_links_in_the_way(bad: Path, here: Path, canary: Path) -> None:
    before = snapshot(canary)
    for name in ("config.json.tmp", "metrics.jsonl.tmp", "model.safetensors.tmp", "state.json.tmp"):
        for folder in (bad, bad / "last"):
            (folder / name).symlink_to(canary / "file")
    for name in ("last.new", "last.old"):
        (bad / name).symlink_to(canary)
    run_ok("train", "--resume", bad, "--steps", 6)
    assert snapshot(canary) == before
    assert not (bad / "last.new").is_symlink() and not (bad / "last.old").is_symlink()
    for name in (".out.tinylm-new", ".out.tinylm-old", ".out.tinylm-lock"):
        (here / name).symlink_to(canary / "file" if name.endswith("lock") else canary)
        tinylm("train", "-", "--steps", 1, *TINY, "--out", "out", "--force", stdin=story(500))
        assert snapshot(canary) == before


# Every file and every value, at the function that reads it


def read_last(run: Path) -> object:
    save = RunDirectory(run).load_last(read_config(run))
    return save.read_weights(), save.read_optimizer(), TrainerState.from_json(save.state)


def read_run_tokens(run: Path) -> object:
    _, config, tokenizer, _ = load_model(run)
    return np.asarray(reopen_tokens(run, config.data, tokenizer).train)


LAST = ("last/manifest.json", "last/state.json", "last/model.safetensors", "last/optimizer.safetensors")
READERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(("config.json", "tokenizer.json", "model.safetensors"), load_model),
    "metrics.jsonl": lambda run: list(iterate_metrics(run)),
    **dict.fromkeys(LAST, read_last),
    **dict.fromkeys((f"tokens/{file}" for file in ("tokens.json", "val.bin", "train-00001.bin")), read_run_tokens),
}


def accepted(read: Callable[[], object], message: str) -> bool:
    """Whether a function that must raise a TinyLMError with `message` does not."""
    try:
        read()
    except TinyLMError as error:
        return message not in str(error)
    return True


@pytest.mark.timeout(60)
def test_only_regular_files_of_a_run_are_opened(piped: Path, here: Path) -> None:
    wrong = []
    for name, read in READERS.items():
        for kind in ("link", "pipe", "folder", "device", "empty", "deep"):
            bad = copied(piped, here / f"{name.replace('/', ' ')} {kind}")
            divide_tokens(bad)
            read(bad)
            replace(bad / name, kind)
            skipped = name == "metrics.jsonl" and kind in ("empty", "deep")
            if accepted(lambda: read(bad), str(bad)) != skipped:  # noqa: B023, called at once
                wrong.append((name, kind))
    assert wrong == []


@pytest.mark.timeout(60)
def test_a_huge_sparse_file_is_an_error_before_it_is_read(piped: Path, here: Path) -> None:
    for name in ("last/model.safetensors", "last/optimizer.safetensors", "tokens/train.bin"):
        bad = copied(piped, here / name.replace("/", " "))
        os.truncate(bad / name, 1 << 40)
        edit_json(bad / "tokens/tokens.json", lambda index: index["train"].update(tokens=1 << 40))
        with pytest.raises(TinyLMError, match="it is a sparse file, almost empty"):
            READERS[name if "last" in name else "tokens/train-00001.bin"](bad)


TOKENS_JSON: tuple[Any, ...] = (
    *({"dtype": dtype} for dtype in ("O", "object", "float64", "uint16", "|V8", "S1", 7, None, ["uint8"], "x" * 10**6)),
    *({"tokens": tokens} for tokens in (0, -1, 1 << 62, 10.5, "9", None, True)),
    *({"sha256": digest} for digest in ("0" * 64, 0, None)),
    *([], {}, 7, [7], ["x"], [{}], [{"dtype": "uint8", "tokens": 1}] * 30_000, "x" * (1 << 23)),
)


@pytest.mark.parametrize("divided", [False, True])
def test_a_forged_tokens_json_is_an_error(divided: bool, bad: Path) -> None:
    if divided:
        divide_tokens(bad)
    file, wrong = bad / "tokens" / "tokens.json", []
    index = json.loads(file.read_text())
    for forged in TOKENS_JSON:
        train = index["train"]
        if isinstance(forged, dict) and forged:
            train = [train[0], {**train[1], **forged}, train[2]] if divided else {**train, **forged}
        else:
            train = forged
        file.write_text(json.dumps({**index, "train": train}))
        wrong += [str(forged)[:60]] if accepted(lambda: read_run_tokens(bad), "is damaged") else []
    assert wrong == []


TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(NORM), "lacks tensor norm.weight"),
    "scalar": (lambda t: t.update({NORM: torch.tensor(1.0)}), "norm.weight is torch.float32 (), not"),
    "half": (lambda t: t.update({NORM: t[NORM].half()}), "norm.weight is torch.float16 (16,), not"),
    "integer": (lambda t: t.update({NORM: t[NORM].long()}), "norm.weight is I64, and weights are"),
    "infinite": (lambda t: t.update({NORM: t[NORM] / 0}), "norm.weight has values that are not finite numbers"),
}
METADATA = (
    *({"step": step} for step in ("-1", "1e3", "", "9" * 4000, "9" * 5000, "\ud7ff", str(1 << 53))),
    *({"val_loss": loss} for loss in ("NaN", "1e999", '"x"', "[]", DEEP, "true", "", "9" * 400)),
)


def test_tensors_and_metadata_that_do_not_fit_the_configuration_are_an_error(piped: Path, here: Path) -> None:
    wrong = []
    for name, (change, message) in TENSORS.items():
        resave(bad := copied(piped, here / name), change)
        wrong += [name] if accepted(lambda: load_model(bad), message) else []
    for number, changes in enumerate(METADATA):
        set_metadata(bad := copied(piped, here / str(number)), **changes)
        wrong += [str(changes)[:40]] if accepted(lambda: load_model(bad), "safetensors is damaged") else []
    assert wrong == []


MOMENTUM = "layers.0.attention.q_proj.weight/momentum_buffer"


def test_an_optimizer_state_that_does_not_fit_is_an_error(bad: Path) -> None:
    for change, message in (
        ({f"{NORM}/momentum_buffer": torch.zeros(16)}, "The saved optimizer does not fit the model"),
        ({MOMENTUM: torch.zeros(16, 16).half()}, "The saved optimizer does not fit the model"),
        ({f"{NORM}/momentum_buffer": torch.zeros(16).int()}, "optimizer.safetensors is damaged"),
    ):
        change_optimizer(bad, lambda tensors: tensors.update(change))  # noqa: B023, called at once
        assert_error(tinylm("train", "--resume", bad, "--steps", 9), 1, message, sentences=3)


COUNTERS = ("step", "micro_batch", "last_eval_step", "n_targets")
STATE_NUMBERS = (*COUNTERS, "seconds", "setup_seconds", "best_loss", "loss_sum")


def test_an_impossible_training_state_is_an_error(piped: Path) -> None:
    state = json.loads((piped / "last" / "state.json").read_text())
    possible = [("best_loss", -7), ("loss_sum", -7), ("metrics", {}), ("scaler", {})]
    wrong = []
    for value in ("x", -7, 1 << 60, float("nan"), float("inf"), [], {}, True):
        for name in (*STATE_NUMBERS, "rng", "metrics", "scaler", "unknown"):
            found = accepted(lambda: TrainerState.from_json({**state, name: value}), "is damaged")  # noqa: B023, called at once
            wrong += [(name, value)] if found != ((name, value) in possible) else []
    assert wrong == []


def test_a_generator_state_is_accepted_exactly_if_torch_can_produce_it(piped: Path) -> None:
    """An index out of range would let torch read beyond its array."""
    state = json.loads((piped / "last" / "state.json").read_text())
    for left, position in ((624, 624), (0, 0), (1, 625), (625, 0), (-1, 1), (300, 300), (2, 0)):
        forged = bytearray.fromhex(state["rng"]["cpu"])
        struct.pack_into("=i", forged, 8, left)
        struct.pack_into("=Q", forged, 16, position)
        with pytest.raises(TinyLMError, match="random number generator is out of range"):
            TrainerState.from_json({**state, "rng": {"cpu": forged.hex()}})
    for drawn in (0, 1, 2, 623, 624, 625, 1000):
        generator = torch.Generator().manual_seed(3)
        torch.rand(drawn, generator=generator)
        TrainerState.from_json({**state, "rng": {"cpu": generator.get_state().numpy().tobytes().hex()}})
        assert torch.equal(torch.get_rng_state(), generator.get_state())


def test_invalid_lines_of_metrics_are_skipped_and_too_many_an_error(bad: Path) -> None:
    expected = list(iterate_metrics(bad))
    numbers = ('"low"', "NaN", "1" + "0" * 400, DEEP, "9" * 5000)
    lines = [f'{{"step": 1, "val_loss": {number}}}' for number in numbers]
    lines += [f'{{"step": {step}, "val_loss": 2.0}}' for step in ("-1", "true", '"1"', 1 << 60)]
    file = bad / "metrics.jsonl"
    file.write_text(file.read_text() + "\n".join([*lines, "[]", "\x00\x1b[2J", '{"step": 1, "val_l']))
    assert list(iterate_metrics(bad)) == expected != []
    file.write_text("\n" * (2**21 + 1))
    assert_error(tinylm("info", bad), 1, "has more than 2097152 lines")


# Adapters


def test_the_base_of_an_adapter_is_found_by_digest_alone(adapter: Path, run: Path, here: Path, canary: Path) -> None:
    lora = copied(adapter, here / "checkpoints" / "lora")
    for path in (str(canary), "/", "..", ".", "/dev/zero", "x" * 4000):
        edit_config(lora, adapter={"base": path})
        message = "is neither beside it nor directly in checkpoints/"
        assert_error(tinylm("sample", "--adapter", lora), 2, message, "--model")
    edit_config(lora, adapter={"base": str(run)})  # the digest of its weights covers this, too
    copied(run, here / "checkpoints" / "renamed")
    run_ok("sample", "--adapter", lora, "-n", 2)
    moved = lora.rename(here / "elsewhere")
    run_ok("sample", "--adapter", moved, "-n", 2)
    edit_config(moved, adapter={"base": "/nowhere"})
    file = moved / "adapter.safetensors"
    header = read_header(file)
    write_weights(file, read_tensors([file]), read_config(moved), header.step, header.val_loss)
    run_ok("merge-lora", moved, "--out", "merged")
    assert read_config(here / "merged").merged_steps[0] == read_weights(run, read_config(run)).step
