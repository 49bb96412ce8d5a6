"""Run directories from strangers, with every digest right: opening one ends with an error at worst, and touches nothing
else.
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
from tests.shell import TINY, copied, done, edit_config, records, refused, snapshot, story, tinylm
from tinylm.checkpoint import read_config, read_weights
from tinylm.weights import read_tensors, write_tensors, write_weights

DEEP = "[" * 100_000 + "]" * 100_000
CANARY = "what a stranger must not change\n"


@pytest.fixture(scope="session")
def piped(shelf: Path) -> Path:
    """A run with its encoded text inside, as one from standard input has it."""
    text = (shelf / "one.txt").read_bytes()
    rhythm = ("--steps", 4, "--eval-every", 2, "--log-every", 1, "--save-every", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(shelf / "cache"))
        write_profile(shelf / "cache")
        done("train", "-", "--out", shelf / "piped", *rhythm, *TINY, stdin=text)
    return shelf / "piped"


@pytest.fixture
def bad(piped: Path, here: Path) -> Path:
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


def survives(run: Path, canary: Path) -> list[int]:
    """The exit codes of every command that may open a run, none of which ends otherwise than it should."""
    codes = []
    before = snapshot(canary)
    for command in commands(run):
        result = tinylm(*command, stdin=story(300))
        assert result.exit_code in (0, 1, 2, 3), (command, result.output)
        for sign in ("Traceback", "went wrong inside", "Out of memory"):
            assert sign not in result.output, command
        codes.append(result.exit_code)
        assert snapshot(canary) == before, command
    return codes


def test_the_run_that_is_forged_below_works_as_it_is(bad: Path, canary: Path) -> None:
    """Only what takes an adapter refuses it."""
    assert survives(bad, canary) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 0]


# Files in the place of others


FILES = (
    *("config.json", "tokenizer.json", "metrics.jsonl", "model.safetensors"),
    *("last/manifest.json", "last/state.json", "last/model.safetensors", "last/optimizer.safetensors"),
    *("tokens/tokens.json", "tokens/train.bin", "tokens/val.bin"),
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "device", "empty", "deep"])
def test_nothing_but_a_regular_file_is_opened_in_a_run(kind: str, name: str, bad: Path, canary: Path) -> None:
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
    codes = survives(bad, canary)
    assert any(codes) or name == "metrics.jsonl"
    assert len(codes) == len(commands(bad))


@pytest.mark.parametrize("name", ["last", "tokens"])
def test_no_folder_of_a_run_is_a_link(name: str, bad: Path, canary: Path) -> None:
    (bad / name).rename(canary / name)
    (bad / name).symlink_to(canary / name)
    codes = survives(bad, canary)
    assert codes[-1] == 1


@pytest.mark.parametrize("name", ["config.json.tmp", "metrics.jsonl.tmp", "model.safetensors.tmp", "state.json.tmp"])
def test_no_link_waits_for_what_a_resumed_run_writes(name: str, bad: Path, canary: Path) -> None:
    for folder in (bad, bad / "last"):
        (folder / name).symlink_to(canary / "file")
    survives(bad, canary)
    assert (canary / "file").read_text() == CANARY


@pytest.mark.parametrize("name", ["last.new", "last.old"])
def test_no_link_to_a_folder_is_written_into_or_emptied(name: str, bad: Path, canary: Path) -> None:
    (bad / name).symlink_to(canary)
    survives(bad, canary)
    done("train", "--resume", bad, "--steps", 12)
    assert snapshot(canary) == {"file": CANARY.encode()}
    assert not (bad / name).is_symlink()


@pytest.mark.parametrize("name", [".out.tinylm-new", ".out.tinylm-old", ".out.tinylm-lock"])
def test_no_link_beside_a_new_run_is_written_into_or_emptied(name: str, here: Path, canary: Path) -> None:
    target = canary / "file" if name.endswith("lock") else canary
    (here / name).symlink_to(target)
    tinylm("train", "-", "--steps", 1, *TINY, "--out", "out", stdin=story(500))
    assert snapshot(canary) == {"file": CANARY.encode()}


# The encoded text


def edit_tokens(run: Path, **changes: Any) -> None:
    """Change what tokens.json says of both parts."""
    file = run / "tokens" / "tokens.json"
    record = json.loads(file.read_text())
    for part in ("train", "val"):
        record[part] |= changes
    file.write_text(json.dumps(record))


def set_token(run: Path, value: int) -> None:
    """Put an id into both parts, and say so in the record."""
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
def test_a_forged_record_of_tokens_is_refused(changes: dict[str, Any], bad: Path, canary: Path) -> None:
    edit_tokens(bad, **changes)
    codes = survives(bad, canary)
    assert (codes[1], codes[2], codes[-1]) == (2, 1, 1)


def test_an_id_that_is_not_in_the_vocabulary_is_refused(bad: Path, canary: Path) -> None:
    set_token(bad, 255)
    codes = survives(bad, canary)
    assert (codes[1], codes[2], codes[-1]) == (2, 1, 1)
    refused(tinylm("eval", "--model", bad), 1, "val.bin has an id that is not in the vocabulary")


def test_a_text_is_hashed_again_before_it_drafts_only_if_it_was_changed(
    bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model corrects wrong guesses, so that size and time are enough there; nothing else relies on them."""
    hashed: list[str] = []
    digest = hashlib.file_digest

    def spy(file: Any, kind: str) -> Any:
        hashed.append(file.name if isinstance(file.name, str) else "")
        return digest(file, kind)

    file = bad / "tokens" / "train.bin"
    edit_tokens(bad, changed=file.stat().st_mtime_ns)
    monkeypatch.setattr(hashlib, "file_digest", spy)
    done("sample", "--model", bad, "-n", 20, "--draft", "ngram")
    assert hashed == []
    os.utime(file)
    done("sample", "--model", bad, "-n", 20, "--draft", "ngram")
    assert len(hashed) == 1


def test_the_paths_recorded_in_a_run_are_shown_and_not_opened(bad: Path, here: Path, canary: Path) -> None:
    fifo = here / "fifo"
    os.mkfifo(fifo)
    for path in (str(fifo), "/", "/etc", "/dev/zero", str(canary)):
        edit_config(bad, data={"corpus": [path], "val_corpus": [path], "tokens_in_run": False})
        codes = survives(bad, canary)
        assert codes[-1] == 1
    refused(tinylm("train", "--resume", bad, "--steps", 9), 1, "is not here any more; name the text", str(canary))


# Weights and state


def resave(run: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of both saves, as if they had been saved so."""
    config = read_config(run)
    for folder in (run, run / "last"):
        weights = read_weights(folder, config)
        change(weights.tensors)
        write_weights(folder / "model.safetensors", weights.tensors, config, weights.step, weights.val_loss)
    sign(run)


def sign(run: Path) -> None:
    """Write the manifest of last/ anew."""
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
def test_tensors_that_do_not_fit_the_configuration_are_refused(name: str, bad: Path, canary: Path) -> None:
    change, message = TENSORS[name]
    resave(bad, change)
    refused(tinylm("sample", "--model", bad, "-n", 2), 1, message, sentences=3)
    codes = survives(bad, canary)
    assert (codes[0], codes[2], codes[-1]) == (1, 1, 1)


def test_weights_that_overflow_end_without_an_internal_error(bad: Path, canary: Path) -> None:
    resave(bad, lambda tensors: [tensor.fill_(3e38) for tensor in tensors.values()])
    survives(bad, canary)


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
def test_what_a_weights_file_says_of_itself_is_checked(changes: dict[str, str], bad: Path, canary: Path) -> None:
    set_metadata(bad, **changes)
    refused(tinylm("sample", "--model", bad), 1, "model.safetensors is damaged", sentences=3)
    survives(bad, canary)


def test_one_bad_run_is_one_line_and_hides_no_other(bad: Path, piped: Path, here: Path) -> None:
    copied(piped, here / "checkpoints" / "good")
    set_metadata(bad, val_loss='"low"')
    rows = records(done("runs", "--json"))
    assert {(row["name"], row["kind"]) for row in rows} == {("good", "model"), ("bad", "damaged")}
    assert len(done("runs").stdout.splitlines()) == 3


def set_state(run: Path, **changes: Any) -> None:
    file = run / "last" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    sign(run)


NUMBERS = ("step", "seconds", "setup_seconds", "micro_batch", "best_loss", "evaluated", "nats", "scored", "sequences")


@pytest.mark.parametrize("value", ["x", -7, 1 << 60, float("nan"), float("inf"), [], {}, True])
def test_a_state_that_no_training_saved_is_refused(value: Any, bad: Path, canary: Path) -> None:
    file = bad / "last" / "state.json"
    whole = file.read_text()
    for name in (*NUMBERS, "rng", "told", "scaler", "unknown"):
        may_be = {-7: ("best_loss", "nats"), 1 << 60: ("seconds", "setup_seconds", "best_loss", "nats")}
        if (type(value) is int and name in may_be[value]) or (name in ("told", "scaler") and value == {}):
            continue
        set_state(bad, **{name: value})
        refused(tinylm("train", "--resume", bad, "--steps", 9), 1, "damaged", sentences=3)
        file.write_text(whole)
    sign(bad)
    assert survives(bad, canary)[-1] == 0


@pytest.mark.parametrize("left, position", [(624, 624), (0, 0), (1, 625), (625, 0), (-1, 1), (300, 300), (2, 0)])
def test_a_state_of_random_numbers_that_would_be_read_beyond_its_end_is_refused(
    left: int, position: int, bad: Path
) -> None:
    state = bytearray.fromhex(json.loads((bad / "last" / "state.json").read_text())["rng"]["cpu"])
    struct.pack_into("=i", state, 8, left)
    struct.pack_into("=Q", state, 16, position)
    set_state(bad, rng={"cpu": state.hex()})
    refused(tinylm("train", "--resume", bad, "--steps", 9), 1, "random number generator is out of range", sentences=3)


@pytest.mark.parametrize("drawn", [0, 1, 2, 623, 624, 625, 1000])
def test_every_state_of_random_numbers_that_torch_has_is_accepted(drawn: int, bad: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(drawn, generator=generator)
    set_state(bad, rng={"cpu": generator.get_state().numpy().tobytes().hex()})
    done("train", "--resume", bad, "--steps", 5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["last/model.safetensors", "last/optimizer.safetensors", "tokens/train.bin"])
def test_a_file_of_holes_is_not_read_for_hours(name: str, bad: Path) -> None:
    os.truncate(bad / name, 1 << 40)
    if name.startswith("tokens"):
        edit_tokens(bad, tokens=1 << 40)
    refused(tinylm("train", "--resume", bad, "--steps", 9), 1, "it is almost empty for its size", sentences=3)


def test_a_file_of_metrics_with_too_many_lines_is_not_read_to_its_end(
    bad: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinylm.checkpoint.METRICS_LINES", 1000)
    with (bad / "metrics.jsonl").open("a") as file:
        file.write("\n" * 1001)
    refused(tinylm("info", bad), 1, "has more than 1000 lines")


def change_optimizer(run: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = run / "last" / "optimizer.safetensors"
    tensors, metadata = read_tensors(file)
    change(tensors)
    write_tensors(file, tensors, metadata)
    sign(run)


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
def test_an_optimizer_state_that_does_not_fit_is_refused(name: str, bad: Path) -> None:
    change_optimizer(bad, OPTIMIZERS[name])
    message = "damaged" if name == "integer" else "The saved optimizer does not fit the model"
    refused(tinylm("train", "--resume", bad, "--steps", 9), 1, message, sentences=3)


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
def test_a_line_of_metrics_that_is_none_is_left_out(line: str, bad: Path, canary: Path) -> None:
    expected = records(done("info", bad, "--json"))[0]["curve"]
    with (bad / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert records(done("info", bad, "--json"))[0]["curve"] == expected
    done("info", bad)
    assert survives(bad, canary)[-1] == 0


# Adapters


def test_the_base_of_an_adapter_is_found_by_its_digest_and_not_by_its_recorded_path(
    adapter: Path, run: Path, here: Path, canary: Path
) -> None:
    lora = copied(adapter, here / "checkpoints" / "lora")
    for path in (str(canary), "/", "/dev/zero", "x" * 4000):
        edit_config(lora, adapter={"base": path})
        refused(tinylm("sample", "--adapter", lora), 2, "is neither beside it nor under checkpoints/", "--model")
    edit_config(lora, adapter={"base": str(run)})  # the digest of its weights covers this, too
    copied(run, here / "checkpoints" / "renamed")
    done("sample", "--adapter", lora, "-n", 2)
    moved = here / "elsewhere"
    lora.rename(moved)
    done("sample", "--adapter", moved, "-n", 2)
    edit_config(moved, adapter={"base": "/nowhere"})
    reseal_adapter(moved)
    done("merge-lora", moved, "--out", "merged")
    assert read_config(here / "merged").merged_steps[0] == read_weights(run, read_config(run)).step


def reseal_adapter(adapter: Path) -> None:
    """Sign an adapter's weights for its configuration."""
    config = read_config(adapter)
    tensors, metadata = read_tensors(adapter / "adapter_model.safetensors")
    write_weights(
        adapter / "adapter_model.safetensors", tensors, config, int(metadata["step"]), json.loads(metadata["val_loss"])
    )


@pytest.mark.parametrize("name", ["missing", "extra", "misshaped", "infinite"])
def test_tensors_of_an_adapter_that_do_not_fit_are_refused(name: str, adapter: Path, run: Path, here: Path) -> None:
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
    write_weights(lora / "adapter_model.safetensors", weights.tensors, config, weights.step, weights.val_loss)
    for command in (("sample", "--adapter", lora, "-n", 2), ("merge-lora", lora, "--out", "merged")):
        refused(tinylm(*command), 1, "lora", sentences=3)
