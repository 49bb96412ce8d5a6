"""Training in several processes. Reference: the losses of the same run in one process."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.shell import child_process, run_child, run_ok, story
from tests.trained_runs import pairs_file
from tests.training.ranks_worker import train
from tinylm.loaded_model import load
from tinylm.ranks import ONE_RANK
from tinylm.run_directory.metrics_log import read_metrics

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")

STEPS = 50
MODEL = {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.0, "tokenizer": "char"}
TRAINING = {
    "steps": STEPS,
    "log_every": 1,
    "eval_every": 25,
    "dtype": "fp32",
    "compile": "off",
    "batch_size": 6,
    "lr": 1e-3,
}
NEW: dict[str, dict[str, Any]] = {
    "text": {},
    "averaged": {"average": 0.1},
    "experts": {"experts": 4, "expert_balance": 0.1},
    "masked": {"architecture": "encoder"},
    "pairs": {"architecture": "encoder-decoder", "label_smoothing": 0.1},
    "chat": {"pack": False},
    "packed": {"pack": True, "batch_size": 2},
    "small batch": {"batch_size": 3, "micro_batch": 1},
}
ADAPTED = {"lora": ("finetune-lora", {"rank": 2}), "bottleneck": ("finetune-adapter", {"bottleneck": 4})}
FAST = [
    ("text", "muon"),
    ("pairs", "adamw"),
]
ALL = [(kind, optimizer) for kind in (*NEW, *ADAPTED) for optimizer in ("adamw", "adam", "muon")]
ALL = [case for case in ALL if case not in (("lora", "muon"), ("bottleneck", "muon"))]  # no matrices of layers to train


def torchrun(ranks: int, *arguments: object) -> list[str]:
    """The command of torchrun, which looks at its processes every 3 s, so that they can report before it ends them."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
        "--monitor-interval",
        "3",
    ]
    return [*command, "--nproc-per-node", str(ranks), *map(str, arguments)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(story(6000))
    pairs_file(folder / "pairs.tsv")
    rng = random.Random(0)
    words = ["the", "old", "man", "said", "it", "was", "cold", "by", "sea"]
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(40):
            said = [" ".join(rng.choices(words, k=rng.randint(1, 4))) for _ in range(2)]
            roles = zip(("user", "assistant"), said, strict=True)
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n")
    return folder


def runs(texts: Path, out: Path, cases: list[tuple[str, str]], base: Path | None) -> list[Any]:
    made = []
    for kind, optimizer in cases:
        common = {**TRAINING, "optimizer": optimizer, "out": str(out / f"{kind} {optimizer}")}
        file = {"pairs": "pairs.tsv", "chat": "chat.jsonl", "packed": "chat.jsonl"}.get(kind, "text.txt")
        if kind in NEW:
            context = {"context": 64} if file == "chat.jsonl" else {}
            made.append(["train", [str(texts / file)], {**MODEL, **context, **common, **NEW[kind]}])
        else:
            command, settings = ADAPTED[kind]
            made.append([command, [str(texts / file)], {**common, **settings, "model": str(base)}])
    return made


def losses(run: Path) -> list[float]:
    return [record.get("loss", record.get("val_loss")) for record in read_metrics(run)]


def gradient_norms(run: Path) -> list[float]:
    return [record["grad_norm"] for record in read_metrics(run) if "grad_norm" in record]


def check_equal_losses(texts: Path, folder: Path, cases: list[tuple[str, str]], ranks: int) -> None:
    base = folder / "base"
    train([["train", [str(texts / "text.txt")], {**MODEL, **TRAINING, "steps": 5, "out": str(base)}]], ONE_RANK)
    train(runs(texts, folder / "one", cases, base), ONE_RANK)
    (folder / "runs.json").write_text(json.dumps(runs(texts, folder / "several", cases, base)))
    done = run_child(torchrun(ranks, Path(__file__).parent / "ranks_worker.py", folder / "runs.json"), 280)
    assert done.returncode == 0, done.stderr
    for kind, optimizer in cases:
        name = f"{kind} {optimizer}"
        expected, found = losses(folder / "one" / name), losses(folder / "several" / name)
        assert len(expected) == STEPS + 3, name
        assert found == pytest.approx(expected, rel=1e-5), name
        # Adam and Muon undo a factor of the gradient, so the losses alone do not show one.
        expected, found = gradient_norms(folder / "one" / name), gradient_norms(folder / "several" / name)
        assert len(expected) == STEPS and found == pytest.approx(expected, rel=1e-3), name


def test_two_ranks_have_the_losses_of_one_for_each_objective(texts: Path, tmp_path: Path) -> None:
    check_equal_losses(texts, tmp_path, FAST, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_losses_of_one_for_each_objective_and_optimizer(texts: Path, tmp_path: Path, ranks: int) -> None:
    check_equal_losses(texts, tmp_path, ALL, ranks)


OPTIONS = [
    *("--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size", "4", "--dropout", "0.1"),
    *("--log-every", "1", "--eval-every", "20", "--save-every", "10", "--tokenizer", "char", "--compile", "off"),
]


def saved_step(run: Path) -> int:
    """The step of the last save; -1 before the first one."""
    try:
        return int(json.loads((run / "last" / "state.json").read_text())["step"])
    except (OSError, ValueError):  # it is being replaced
        return -1


def wait_for_save(run: Path, step: int, child: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 100
    while saved_step(run) < step:
        assert child.poll() is None, "training ended early"
        assert time.monotonic() < limit
        time.sleep(0.02)


def ranks_of(child: subprocess.Popen[str]) -> dict[int, int]:
    """The process number of each rank of torchrun, read from the environment of its children."""
    found = {}
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    for pid in children.read_text().split():
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        found |= {int(v.removeprefix(b"RANK=")): int(pid) for v in variables if v.startswith(b"RANK=")}
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")


@needs_proc
@pytest.mark.slow
def test_ctrl_c_saves_and_resuming_in_one_process_goes_on(texts: Path, tmp_path: Path) -> None:
    run, text = tmp_path / "run", texts / "text.txt"
    command = torchrun(2, "-m", "tinylm", "train", text, "--out", run, "--steps", 100_000, *OPTIONS)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process(command, **pipes) as child:
        wait_for_save(run, 10, child)
        os.kill(child.pid, signal.SIGINT)
        out, err = child.communicate()
    step = saved_step(run)
    assert step >= 10 and f"Stopped at step {step}; the run is saved." in err
    assert err.count("Resume it with") == 1
    assert not out
    run_ok("train", "--resume", run, "--steps", step + 5)
    assert saved_step(run) == step + 5


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_when_one_is_killed_and_the_last_save_is_whole(texts: Path, tmp_path: Path, rank: int) -> None:
    run, text = tmp_path / "run", texts / "text.txt"
    command = torchrun(2, "-m", "tinylm", "train", text, "--out", run, "--steps", 100_000, *OPTIONS)
    with child_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
        wait_for_save(run, 10, child)
        os.kill(ranks_of(child)[rank], signal.SIGKILL)
        err = child.communicate(timeout=60)[1]
        assert child.returncode == 1
    if rank == 1:
        assert "Another process of the run has ended" in err
    assert "Internal error" not in err
    run_ok("train", "--resume", run, "--steps", saved_step(run) + 5)
    load(run)


def test_an_error_of_the_first_rank_is_printed_once_and_ends_all(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff" * 9)
    command = torchrun(2, "-m", "tinylm", "train", tmp_path / "bad.txt", "--out", tmp_path / "run")
    done = run_child(command)
    assert done.stderr.count("UTF-8") == 1
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(800)
def test_random_kills_lose_nothing_where_torchrun_restarts(texts: Path, tmp_path: Path) -> None:
    """Reference: the same run in the same number of processes without a kill. TINYLM_KILLS=20 makes more of them."""
    kills = int(os.environ.get("TINYLM_KILLS", "3"))
    text, steps = texts / "text.txt", 200 * kills
    arguments = ["-m", "tinylm", "train", text, "--steps", steps, *OPTIONS]
    assert run_child(torchrun(2, *arguments, "--out", tmp_path / "whole"), 250).returncode == 0
    run = tmp_path / "killed"
    command = torchrun(2, *arguments, "--out", run)
    command[3:3] = ["--max-restarts", "100"]
    rng = random.Random(0)
    with child_process(command, 500, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        for kill in range(kills):
            if kill % 4:  # after a save of this attempt; otherwise while it starts
                wait_for_save(run, saved_step(run) + 10, child)
            time.sleep(rng.uniform(0, 0.5))
            while len(ranks := ranks_of(child)) < 2:
                assert child.poll() is None, f"training ended after {kill} kills"
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(list(ranks.values())), signal.SIGKILL)
        out = child.communicate()[0]
    assert child.returncode == 0
    assert out.split() == [str(run)]
    assert saved_step(run) == steps
    assert losses(run) == losses(tmp_path / "whole")
    found, expected = (load_file(folder / "last" / "model.safetensors") for folder in (run, tmp_path / "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
