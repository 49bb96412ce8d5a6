"""Training in several processes. Reference: the losses of the same run in one process."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shell import child_process, records, run_child, run_ok, story
from tests.trained_runs import pairs_file
from tests.training.ranks_worker import train
from tinylm.loaded_model import load
from tinylm.ranks import ONE_RANK
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import read_config
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
    "small batch": {"batch_size": 3, "micro_batch": 1, "checkpoint_activations": True},
}
ADAPTED = {"lora": ("finetune-lora", {"rank": 2}), "bottleneck": ("finetune-adapter", {"bottleneck": 4})}
OPTIMIZERS = ("adamw", "adam", "muon", "normuon")
ADAMS = OPTIMIZERS[:2]
FAST = [
    ("text", "normuon"),
    ("pairs", "adamw"),
]
ALL = [(kind, optimizer) for kind in (*NEW, *ADAPTED) for optimizer in OPTIMIZERS]
ALL = [(kind, optimizer) for kind, optimizer in ALL if kind in NEW or optimizer in ADAMS]  # Muon trains no adapters


def each_kind(shift: int) -> list[tuple[str, str]]:
    """Each kind of training with one optimizer; shifts 0 to 3 give all."""
    chosen = [(kind, OPTIMIZERS[(shift + index) % 4]) for index, kind in enumerate((*NEW, *ADAPTED))]
    return [case for case in chosen if case in ALL]


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


def runs(texts: Path, out: Path, cases: list[tuple[str, str]], base: Path | None, parallel: str = "auto") -> list[Any]:
    made = []
    for kind, optimizer in cases:
        common = {**TRAINING, "optimizer": optimizer, "parallel": parallel, "out": str(out / f"{kind} {optimizer}")}
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


def check_equal_losses(texts: Path, folder: Path, cases: list[tuple[str, str]], ranks: int, parallel: str) -> None:
    base = folder / "base"
    train([["train", [str(texts / "text.txt")], {**MODEL, **TRAINING, "steps": 5, "out": str(base)}]], ONE_RANK)
    train(runs(texts, folder / "one", cases, base), ONE_RANK)
    run_worker(folder, ranks, *runs(texts, folder / "several", cases, base, parallel))
    for kind, optimizer in cases:
        name = f"{kind} {optimizer}"
        expected, found = losses(folder / "one" / name), losses(folder / "several" / name)
        assert len(expected) == STEPS + 3, name
        assert found == pytest.approx(expected, rel=1e-5), name
        # Adam and Muon undo a factor of the gradient, so the losses alone do not show one.
        expected, found = gradient_norms(folder / "one" / name), gradient_norms(folder / "several" / name)
        assert len(expected) == STEPS and found == pytest.approx(expected, rel=1e-3), name
        shards = ranks if parallel == "fsdp" and kind not in ADAPTED else 1
        assert len(list((folder / "several" / name / "last").glob("*model*.safetensors"))) == shards
        weights, expected_weights = (last_weights(folder / runs / name) for runs in ("several", "one"))
        for tensor in expected_weights:
            torch.testing.assert_close(weights[tensor], expected_weights[tensor], rtol=0, atol=0.02)


def last_weights(run: Path) -> dict[str, torch.Tensor]:
    return RunDirectory(run).load_last(read_config(run)).read_weights()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_have_the_losses_of_one(texts: Path, tmp_path: Path, parallel: str) -> None:
    check_equal_losses(texts, tmp_path, FAST, 2, parallel)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_losses_of_one_for_each_objective_and_optimizer(texts: Path, tmp_path: Path, ranks: int) -> None:
    check_equal_losses(texts, tmp_path, ALL, ranks, "ddp")


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize(("ranks", "cases"), [(2, each_kind(0)), (4, each_kind(1))], ids=["2", "4"])
def test_sharded_ranks_have_the_losses_of_one(
    texts: Path, tmp_path: Path, ranks: int, cases: list[tuple[str, str]]
) -> None:
    """TINYLM_ALL=1 takes every objective with every optimizer; then add --timeout 2000."""
    check_equal_losses(texts, tmp_path, ALL if "TINYLM_ALL" in os.environ else cases, ranks, "fsdp")


def run_worker(folder: Path, ranks: int, *made: list[Any], expected: int = 0) -> str:
    """Train runs in several processes; returns what they print on stderr."""
    (folder / "runs.json").write_text(json.dumps(made))
    limit = 1700 if "TINYLM_ALL" in os.environ else 280
    done = run_child(torchrun(ranks, Path(__file__).parent / "ranks_worker.py", folder / "runs.json"), limit)
    assert done.returncode == expected, done.stderr
    return done.stderr


@pytest.mark.slow
def test_a_run_goes_on_in_other_numbers_of_ranks_and_modes_with_the_losses_of_one(texts: Path, tmp_path: Path) -> None:
    """Replicas to shards and back, with Adam's moments, NorMuon's momentum and row moments, and averaged weights."""
    settings = {**MODEL, **TRAINING, "optimizer": "normuon", "average": 0.1, "log_gradients": True}
    one, several = tmp_path / "one", tmp_path / "several"
    text = [str(texts / "text.txt")]
    train([["train", text, {**settings, "out": str(one)}]], ONE_RANK)
    train([["train", text, {**settings, "out": str(several), "stop_at": 8}]], ONE_RANK)
    sessions = [(2, "fsdp", 16), (4, "fsdp", 24), (2, "ddp", 32), (1, "fsdp", None)]
    for ranks, parallel, stop_at in sessions:
        resume = ["resume", [], {"out": str(several), "parallel": parallel, "stop_at": stop_at}]
        if ranks == 1:
            train([resume], ONE_RANK)
        else:
            run_worker(tmp_path, ranks, resume)
        assert saved_step(several) == (stop_at or STEPS)
        assert len(list((several / "last").glob("model*"))) == (ranks if parallel == "fsdp" else 1)
    assert losses(several) == pytest.approx(losses(one), rel=1e-5)
    assert gradient_norms(several) == pytest.approx(gradient_norms(one), rel=1e-3)
    for record, expected in zip(read_metrics(several), read_metrics(one), strict=True):
        if "gradient_norms" in expected:
            assert record["gradient_norms"] == pytest.approx(expected["gradient_norms"], rel=1e-2)
    assert load(several).evaluate(text).loss == pytest.approx(load(one).evaluate(text).loss, rel=1e-4)


@pytest.mark.slow
def test_sharded_ranks_end_with_one_message_when_one_runs_out_of_memory(texts: Path, tmp_path: Path) -> None:
    made = ["train", [str(texts / "text.txt")], {**MODEL, **TRAINING, "parallel": "fsdp", "out": str(tmp_path / "run")}]
    made[2]["fail_on"] = 1
    err = run_worker(tmp_path, 2, made, expected=1)
    assert "TinyLMError: Out of memory in step 3; choose a smaller `micro_batch` (it is 6), `size` or `context`" in err
    assert "PeerError: On rank 1: Out of memory in step 3" in err
    load(tmp_path / "run")


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


@pytest.mark.slow
def test_eval_prints_the_result_of_one_process_once(run: Path, texts: Path) -> None:
    command = ["-m", "tinylm", "eval", texts / "text.txt", "--model", run, "--batch-size", 7, "--unknown", "skip"]
    (expected,) = records(run_ok(*command[2:], "--json"))
    done = run_child(torchrun(2, *command, "--json"))
    found = json.loads(done.stdout)
    assert found.pop("resampled") == expected.pop("resampled")
    assert found == pytest.approx(expected, rel=1e-12)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("number", "parallel"), [(signal.SIGINT, "ddp"), (signal.SIGTERM, "fsdp")])
def test_a_signal_saves_and_resuming_in_one_process_goes_on(
    texts: Path, tmp_path: Path, number: int, parallel: str
) -> None:
    run, text = tmp_path / "run", texts / "text.txt"
    arguments = ["--out", run, "--steps", 100_000, "--parallel", parallel, *OPTIONS]
    command = torchrun(2, "-m", "tinylm", "train", text, *arguments)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process(command, **pipes) as child:
        wait_for_save(run, 10, child)
        os.kill(child.pid, number)
        out, err = child.communicate()
    step = saved_step(run)
    assert step >= 10 and f"Stopped at step {step}; the run is saved." in err
    assert err.count("Resume it with") == 1
    assert not out
    run_ok("train", "--resume", run, "--steps", step + 5)
    assert saved_step(run) == step + 5


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("rank", "parallel"), [(0, "ddp"), (1, "ddp"), (1, "fsdp")])
def test_all_ranks_end_when_one_is_killed_and_the_last_save_is_whole(
    texts: Path, tmp_path: Path, rank: int, parallel: str
) -> None:
    run, text = tmp_path / "run", texts / "text.txt"
    arguments = ["--out", run, "--steps", 100_000, "--parallel", parallel, *OPTIONS]
    command = torchrun(2, "-m", "tinylm", "train", text, *arguments)
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


@pytest.mark.slow
def test_an_error_of_the_first_rank_is_printed_once_and_ends_all(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff" * 9)
    command = torchrun(2, "-m", "tinylm", "train", tmp_path / "bad.txt", "--out", tmp_path / "run")
    done = run_child(command)
    assert done.stderr.count("UTF-8") == 1
    assert "exitcode  : 2" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_program_trains_again_after_calls_that_failed(texts: Path, tmp_path: Path) -> None:
    done = run_child(torchrun(2, Path(__file__).parent / "ranks_again_worker.py", texts / "text.txt", tmp_path / "run"))
    assert sorted(done.stdout.splitlines()) == ["PeerError PeerError 4", "UsageError Fault 4"], done.stderr
    assert done.returncode == 0


FAULTS = [
    ("error", 0, 0, "ddp", "Error: Internal error of tinylm (RuntimeError: injected)"),
    ("error", 1, 1, "ddp", "Error: On rank 1: RuntimeError: injected"),
    ("disk", 0, 0, "ddp", "No space left on device"),
    ("disk", 1, 0, "fsdp", "No space left on device; the last save is intact"),
]


@pytest.mark.slow
@pytest.mark.parametrize("fault, rank, restarts, parallel, message", FAULTS)
def test_a_fault_of_one_rank_ends_all_with_one_message_and_a_whole_save(
    texts: Path, tmp_path: Path, fault: str, rank: int, restarts: int, parallel: str, message: str
) -> None:
    """Restarts: each attempt resumes the last save, and fails again."""
    run, worker = tmp_path / "run", Path(__file__).parent / "ranks_fault_worker.py"
    options = ["--out", run, "--steps", 60, "--parallel", parallel, *OPTIONS]
    command = torchrun(2, worker, fault, rank, 25, "train", texts / "text.txt", *options)
    command[3:3] = ["--max-restarts", str(restarts)]
    done = run_child(command)
    assert done.returncode == 1 and not done.stdout
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 + restarts and all(message in line for line in errors), done.stderr
    assert "exitcode  : 1" in done.stderr
    assert saved_step(run) == 20
    run_ok("train", "--resume", run, "--steps", 60)
    steps = [record["step"] for record in read_metrics(run) if "loss" in record]
    assert steps == list(range(1, 61))


def machine(endpoint: str, restarts: int, *arguments: object) -> list[str]:
    """The command of the torchrun agent of one of two machines, with one process each."""
    options = ["--nnodes", "2", "--max-restarts", str(restarts), "--rdzv-id", "run", "--rdzv-conf", "join_timeout=60"]
    command = torchrun(1, *arguments)
    command[command.index("localhost:0")] = endpoint
    return [*command[:3], *options, *command[3:]]


@contextlib.contextmanager
def two_machines(restarts: int, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    with socket.create_server(("localhost", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = machine(endpoint, restarts, *arguments)
    with child_process(command, 200, **pipes) as one, child_process(command, 200, **pipes) as other:
        yield one, other


def kill_a_rank(machines: tuple[subprocess.Popen[str], subprocess.Popen[str]], rank: int) -> None:
    """Kill a rank as soon as both machines have started theirs."""
    limit = time.monotonic() + 100
    while len(ranks := ranks_of(machines[0]) | ranks_of(machines[1])) < 2:
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(ranks[rank], signal.SIGKILL)


@needs_proc
@pytest.mark.slow
def test_two_machines_restart_together_also_if_only_one_of_them_counts_a_failure(texts: Path, tmp_path: Path) -> None:
    """A kill during start-up: torchrun on the other machine restarts its rank and does not count that."""
    run = tmp_path / "run"
    arguments = ["-m", "tinylm", "train", texts / "text.txt", "--out", run, "--steps", 60, *OPTIONS]
    with two_machines(9, *arguments) as machines:
        kill_a_rank(machines, 1)
        wait_for_save(run, 10, machines[0])
        kill_a_rank(machines, 0)
        out = "".join(child.communicate()[0] for child in machines)
        assert [child.returncode for child in machines] == [0, 0]
    assert out.split() == [str(run)]
    assert [record["step"] for record in read_metrics(run) if "loss" in record] == list(range(1, 61))


@needs_proc
@pytest.mark.slow
def test_ctrl_c_at_one_of_two_machines_saves_and_ends_both(texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["-m", "tinylm", "train", texts / "text.txt", "--out", run, "--steps", 100_000, *OPTIONS]
    with two_machines(0, *arguments) as machines:
        wait_for_save(run, 10, machines[0])
        os.kill(machines[1].pid, signal.SIGINT)
        messages = "".join(child.communicate()[1] for child in machines)
    step = saved_step(run)
    assert step >= 10 and messages.count(f"Stopped at step {step}; the run is saved.") == 1
    run_ok("train", "--resume", run, "--steps", step + 5)


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_random_kills_lose_nothing_where_torchrun_restarts(texts: Path, tmp_path: Path, parallel: str) -> None:
    """Reference: the same run in the same number of processes without a kill. TINYLM_KILLS=20 makes more of them."""
    kills = int(os.environ.get("TINYLM_KILLS", "3"))
    text, steps = texts / "text.txt", 200 * kills
    arguments = ["-m", "tinylm", "train", text, "--steps", steps, "--parallel", parallel, *OPTIONS]
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
    found, expected = (last_weights(folder) for folder in (run, tmp_path / "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
