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
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.shell import child_process, records, run_child, run_ok, story
from tests.trained_runs import pairs_file
from tests.training.ranks_worker import train
from tinylm.models.load import load
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import weights_file
from tinylm.run_directory.loading import read_config
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.system.ranks import ONE_RANK

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")

STEPS = 30
LOSSES = ("loss", "val_loss")
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
END_SECONDS = 30.0  # within which all processes end after a signal or a kill
MODEL = {"layers": 1, "heads": 2, "width": 16, "context": 16, "dropout": 0.0, "tokenizer": "char"}
TRAINING = {"steps": STEPS, "log_every": 1, "eval_every": 15, "dtype": "fp32", "compile": "off"}
TRAINING |= {"batch_size": 6, "lr": 1e-3}
NEW: dict[str, dict[str, Any]] = {
    "text": {},
    "averaged": {"average": 0.1},
    "experts": {"experts": 4, "expert_balance": 0.1},
    "merged experts": {"experts": 4, "expert_mode": "merge"},
    "continued": {},  # from a base
    "masked": {"architecture": "encoder"},
    "pairs": {"architecture": "encoder-decoder", "label_smoothing": 0.1},
    "labels": {"class_weights": "balanced"},
    "chat": {"pack": False},
    "packed": {"pack": True, "batch_size": 2},
    "small batch": {"batch_size": 3, "micro_batch": 1, "checkpoint_activations": True},
    "growing": {"batch_size": 3, "sequence_growth": 2},
    "multi-token": {"batch_size": 3, "sequence_growth": 2, "mtp_weight": 0.5},
}
FILES = {"pairs": "pairs.tsv", "chat": "chat.jsonl", "packed": "chat.jsonl", "preferences": "preferences.jsonl"}
FILES |= {"labels": "labels.jsonl", "labels on a decoder": "labels.jsonl"}
ADAPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("finetune-lora", {"rank": 2}),
    "shared B": ("finetune-lora", {"rank": 2, "share_b": True}),
    "bottleneck": ("finetune-adapter", {"bottleneck": 4}),
    "preferences": ("finetune-lora", {"rank": 2, "pack": False, "lr": 1e-2}),
    "labels on a decoder": ("finetune-lora", {"rank": 2, "lr": 1e-2}),
}
OPTIMIZERS = ("adamw", "adam", "muon", "normuon")
ADAMS = OPTIMIZERS[:2]  # Muon trains no adapters
ONCE = ("pairs twice", "merged experts", "continued", "shared B", "multi-token")  # trained with AdamW only
BY_KIND = {
    kind: OPTIMIZERS[:1] if kind in ONCE else ADAMS if kind in ADAPTED else OPTIMIZERS for kind in (*NEW, *ADAPTED)
}


def each_kind(shift: int) -> list[tuple[str, str]]:
    """Each kind of training with one optimizer; shifts 0 to 3 give all."""
    return [(kind, BY_KIND[kind][(shift + index) % len(BY_KIND[kind])]) for index, kind in enumerate(BY_KIND)]


def torchrun(ranks: int, *arguments: object) -> list[str]:
    """The command of torchrun, which looks at its processes every 3 s, so that they can report before it ends them."""
    options = "--rdzv-backend c10d --rdzv-endpoint localhost:0 --monitor-interval 3 --nproc-per-node"
    return [sys.executable, "-m", "torch.distributed.run", *options.split(), str(ranks), *map(str, arguments)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(story(6000))
    pairs_file(folder / "pairs.tsv")
    rng = random.Random(0)
    words = ["the", "old", "man", "said", "it", "was", "cold", "by", "sea"]
    with (folder / "chat.jsonl").open("w") as file:
        for _ in range(40):
            said = [(role, " ".join(rng.choices(words, k=rng.randint(1, 4)))) for role in ("user", "assistant")]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in said]}) + "\n")
    with (folder / "preferences.jsonl").open("w") as file:
        for _ in range(40):
            prompt, chosen, rejected = (" ".join(rng.choices(words[:6], k=rng.randint(1, 2))) for _ in range(3))
            file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected + " sea"}) + "\n")
    with (folder / "labels.jsonl").open("w") as file:
        for _ in range(60):
            label, text = rng.randrange(3), " ".join(rng.choices(words, k=rng.randint(1, 9)))
            file.write(json.dumps({"text": text, "label": label}) + "\n")
    (folder / "lines.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    return folder


def runs(texts: Path, out: Path, cases: list[tuple[str, str]], base: Path, parallel: str = "auto") -> list[Any]:
    made = []
    for kind, optimizer in cases:
        common = {**TRAINING, "optimizer": optimizer, "parallel": parallel, "out": str(out / f"{kind} {optimizer}")}
        file = FILES.get(kind, "text.txt")
        command, settings = ADAPTED.get(kind) or ("train", NEW[kind])
        if kind in ADAPTED or kind == "continued":
            settings = {**settings, "model" if kind in ADAPTED else "init_from": str(base)}
        else:
            settings = {**MODEL, "context": 64 if file == "chat.jsonl" else 16, **settings}
        if kind == "preferences":
            settings = {**settings, "chat_template": str(texts / "lines.jinja")}
        made.append([command, [str(texts / file)], {**common, **settings}])
    return made


def logged(run: Path, *names: str) -> list[float]:
    """The numbers of the records that have the first of these names that a record has."""
    found = ([record[name] for name in names if name in record] for record in read_metrics(run))
    return [numbers[0] for numbers in found if numbers]


def weights_files(last: Path) -> list[Path]:
    """The files of a model's or an adapter's weights in a `last/`, one per shard."""
    return [file for file in last.glob("*.safetensors") if not file.name.startswith("optimizer")]


def weights_of(run: Path) -> tuple[dict[str, torch.Tensor], ...]:
    """The last and the best weights."""
    config = read_config(run)
    return RunDirectory(run).load_last(config).read_weights(), safetensors.torch.load_file(run / weights_file(config))


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    ("ranks", "parallel", "cases"), [(2, "ddp", each_kind(2)), (4, "fsdp", each_kind(1))], ids=["2-ddp", "4-fsdp"]
)
def test_ranks_have_the_losses_of_one(
    texts: Path, tmp_path: Path, ranks: int, parallel: str, cases: list[tuple[str, str]]
) -> None:
    """Each kind of training with one optimizer in each mode."""
    base = tmp_path / "base"
    train([["train", [str(texts / "text.txt")], {**MODEL, **TRAINING, "steps": 5, "out": str(base)}]], ONE_RANK)
    train(runs(texts, tmp_path / "one", cases, base), ONE_RANK)
    run_worker(tmp_path, ranks, *runs(texts, tmp_path / "several", cases, base, parallel))
    for kind, optimizer in cases:
        name = f"{kind} {optimizer}"
        one, several = tmp_path / "one" / name, tmp_path / "several" / name
        # Adam and Muon undo a factor of the gradient, so the losses alone do not show one.
        for names, count, tolerance in ((LOSSES, STEPS + 3, 1e-5), (("grad_norm",), STEPS, 1e-3)):
            expected, found = logged(one, *names), logged(several, *names)
            assert len(expected) == count and found == pytest.approx(expected, rel=tolerance), name
        assert len(weights_files(several / "last")) == (ranks if parallel == "fsdp" and kind not in ADAPTED else 1)
        assert saved_state(several)["best_step"] == saved_state(one)["best_step"], name
        torch.testing.assert_close(weights_of(several), weights_of(one), rtol=0, atol=0.02)


def run_worker(folder: Path, ranks: int, *made: list[Any]) -> None:
    """Train runs in several processes."""
    (folder / "runs.json").write_text(json.dumps(made))
    done = run_child(torchrun(ranks, Path(__file__).parent / "ranks_worker.py", folder / "runs.json"), 400)
    assert done.returncode == 0, done.stderr


RESUMED = [("averaged", "normuon"), ("lora", "adamw"), ("pairs", "adamw"), ("experts", "adam")]
# The number of ranks; the mode and the last step of each session in these processes.
SESSIONS = [(2, [("ddp", 6), ("fsdp", 12)]), (4, [("fsdp", 18)]), (2, [("ddp", 24)]), (1, [("fsdp", None)])]


@pytest.mark.slow
def test_runs_go_on_in_other_numbers_of_ranks_and_modes_with_the_losses_of_one(texts: Path, tmp_path: Path) -> None:
    """Replicas to shards and back, with Adam's moments, NorMuon's momentum and row moments, and averaged weights."""
    one, several = tmp_path / "one", tmp_path / "several"
    base = several / "base"  # where resuming an adapter finds it
    train([["train", [str(texts / "text.txt")], {**MODEL, **TRAINING, "steps": 5, "out": str(base)}]], ONE_RANK)
    expected = runs(texts, one, RESUMED, base)
    train(expected, ONE_RANK)
    for ranks, sessions in SESSIONS:
        made = []
        for parallel, stop_at in sessions:
            begun = runs(texts, several, RESUMED, base, parallel)
            for kind, files, settings in begun:
                again = {"out": settings["out"], "parallel": parallel, "stop_at": stop_at}
                made.append([kind, files, {**settings, **again}] if stop_at == 6 else ["resume", kind, again])
        train(made, ONE_RANK) if ranks == 1 else run_worker(tmp_path, ranks, *made)
        for kind, optimizer in RESUMED:
            run = several / f"{kind} {optimizer}"
            assert saved_step(run) == (stop_at or STEPS)
            assert len(weights_files(run / "last")) == (ranks if parallel == "fsdp" and kind != "lora" else 1)
    for kind, optimizer in RESUMED:
        found, expected = (folder / f"{kind} {optimizer}" for folder in (several, one))
        assert logged(found, *LOSSES) == pytest.approx(logged(expected, *LOSSES), rel=1e-5), kind
        assert logged(found, "grad_norm") == pytest.approx(logged(expected, "grad_norm"), rel=1e-3), kind
    found, expected = (folder / "averaged normuon" for folder in (several, one))
    text = [str(texts / "text.txt")]
    assert load(found).evaluate(text).loss == pytest.approx(load(expected).evaluate(text).loss, rel=1e-4)


OPTIONS = [
    *("--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size", "4", "--dropout", "0.1"),
    *("--log-every", "1", "--eval-every", "20", "--save-every", "10", "--tokenizer", "char", "--compile", "off"),
]


def saved_state(run: Path) -> dict[str, Any]:
    return json.loads((run / "last" / "state.json").read_text())


def saved_step(run: Path) -> int:
    """The step of the last save; -1 before the first one."""
    try:
        return int(saved_state(run)["step"])
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


AGAIN = """
import sys
import tinylm
from tinylm.errors import TinyLMError

def fail(event):
    if type(event).__name__ == "Stepped":
        raise ZeroDivisionError

settings, errors = {"steps": 4, "layers": 1, "heads": 2, "width": 16, "context": 16, "compile": "off"}, []
for text, callbacks in ((sys.argv[1] + ".missing", []), (sys.argv[1], [fail])):
    try:
        tinylm.train([text], sys.argv[2], callbacks=callbacks, **settings)
    except (TinyLMError, ZeroDivisionError) as error:
        errors.append(type(error).__name__)
result = tinylm.train([sys.argv[1]], sys.argv[2], force=True, **settings)
sys.stdout.write(f"{' '.join(errors)} {result.step}\\n")  # in one piece: both ranks write to one pipe
"""


@pytest.mark.slow
def test_a_program_trains_again_after_calls_that_failed(texts: Path, tmp_path: Path) -> None:
    """On rank 0, the first call fails at its start, and the second one while it trains."""
    (tmp_path / "again.py").write_text(AGAIN)
    done = run_child(torchrun(2, tmp_path / "again.py", texts / "text.txt", tmp_path / "run"))
    assert sorted(done.stdout.splitlines()) == ["PeerError PeerError 4", "UsageError ZeroDivisionError 4"], done.stderr
    assert done.returncode == 0


@needs_proc
@pytest.mark.slow
def test_a_signal_of_torchrun_saves_and_resuming_in_one_process_goes_on(texts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ["train", texts / "text.txt", "--out", run, "--steps", 100_000, "--parallel", "fsdp", *OPTIONS]
    with child_process(with_faults(tmp_path, ["none", 0, 0, None, train]), **PIPES) as child:
        wait_for_save(run, 10, child)
        os.kill(child.pid, signal.SIGTERM)
        out, err = child.communicate(timeout=END_SECONDS)
    assert child.returncode == 1 and exit_codes(tmp_path) == {0: 143, 1: 143}
    step = saved_step(run)
    assert step >= 10 and f"Stopped at step {step}; the run is saved." in err
    assert err.count("Resume it with") == 1
    assert not out
    run_ok("train", "--resume", run, "--steps", step + 5)
    assert saved_step(run) == step + 5


LOST = "Another process of the run has ended"
FAULTS = [  # fault, rank, mode, exit codes of the ranks, message
    ("error", 0, "ddp", (1, 1), "Error: Internal error of tinylm (RuntimeError: injected)"),
    ("disk", 0, "ddp", (1, 1), "No space left on device"),
    ("disk", 1, "fsdp", (1, 1), "No space left on device; the last save is intact"),
    ("memory", 1, "ddp", (1, 1), "Error: Out of memory with one sequence at a time; choose a smaller --size or"),
    ("memory", 1, "fsdp", (1, 1), "Error: On rank 1: Out of memory in step 13; choose a smaller"),
    ("inf", 1, "fsdp", (3, 3), "Error: The loss of step 13 is not finite; saved weights are from before that step."),
    ("kill", 1, "ddp", (1, -signal.SIGKILL), LOST),
    ("kill", 1, "fsdp", (1, -signal.SIGKILL), LOST),
    ("signal", 1, "ddp", (143, 143), "Stopped at step 13; the run is saved."),
]


def with_faults(folder: Path, *cases: list[Any]) -> list[str]:
    """The command of torchrun for two ranks with the cases of ranks_fault_worker.py."""
    lines = [[*case, list(map(str, arguments))] for *case, arguments in cases]
    (folder / "codes").mkdir()
    (folder / "cases.json").write_text(json.dumps(lines))
    return torchrun(2, Path(__file__).parent / "ranks_fault_worker.py", folder / "cases.json", folder / "codes")


def exit_codes(folder: Path, case: int = 0) -> dict[int, int]:
    """The exit code of each rank that was not killed."""
    return {int(file.name.split("-")[1]): int(file.read_text()) for file in (folder / "codes").glob(f"{case}-*")}


@pytest.mark.slow
def test_a_fault_of_one_rank_ends_all_with_one_message_and_a_whole_save(run: Path, texts: Path, tmp_path: Path) -> None:
    """The first command lines succeed, and print their metrics and results once. The next one has a text that is not
    UTF-8.
    """
    runs, report = [tmp_path / f"run{number}" for number in range(len(FAULTS) + 1)], tmp_path / "report.html"
    (tmp_path / "bad.txt").write_bytes(b"a\xff\xfe" * 9)
    text, none = texts / "text.txt", ("none", 0, 0, None)
    evaluate = ["eval", text, "--model", run, "--batch-size", 7, "--unknown", "skip", "--json"]
    cases = [
        [*none, ["train", text, "--steps", 20, *OPTIONS, "--out", runs[0], "--json", "--report", report]],
        [*none, evaluate],
        [*none, ["train", tmp_path / "bad.txt", "--out", tmp_path / "bad"]],
    ]
    for path, (fault, rank, parallel, *_) in zip(runs[1:], FAULTS, strict=True):
        train = ["train", text, "--steps", 20, *OPTIONS, "--out", path, "--parallel", parallel]
        cases.append([fault, rank, 12, None, train])
    done = run_child(with_faults(tmp_path, *cases), 280)
    assert done.returncode == 1 and "exitcode  : 143" in done.stderr, done.stderr
    assert exit_codes(tmp_path, 0) == exit_codes(tmp_path, 1) == {0: 0, 1: 0}
    *metrics, result, evaluated = [json.loads(line) for line in done.stdout.splitlines()]
    assert metrics == read_metrics(runs[0]) and result["run"] == str(runs[0])
    assert report.read_text().rstrip().endswith("</html>")
    (expected,) = records(run_ok(*evaluate))
    for name in ("model", "text", "resampled"):
        assert evaluated.pop(name) == expected.pop(name)
    assert evaluated == pytest.approx(expected, rel=1e-8)
    assert exit_codes(tmp_path, 2) == {0: 2, 1: 2} and not (tmp_path / "bad").exists()
    first, *errors = [line for line in done.stderr.splitlines() if line.startswith(("Error: ", "Stopped at step 13;"))]
    assert "UTF-8" in first
    assert len(errors) == len(FAULTS), done.stderr
    for number, (path, (fault, _, mode, codes, message)) in enumerate(zip(runs[1:], FAULTS, strict=True)):
        assert exit_codes(tmp_path, number + 3) == dict(enumerate(codes)), message
        assert message in errors[number]
        assert saved_step(path) == {("signal", "ddp"): 13, ("memory", "ddp"): 12}.get((fault, mode), 10)
    for path in (runs[1], runs[3], runs[8]):
        run_ok("train", "--resume", path)
        check_steps(path, 20)


def check_steps(run: Path, last: int) -> None:
    """Each step is logged once."""
    assert [record["step"] for record in read_metrics(run) if "loss" in record] == list(range(1, last + 1))


@pytest.mark.slow
def test_restarts_continue_a_resumed_run_and_an_adapter_from_their_last_saves(texts: Path, tmp_path: Path) -> None:
    """The first attempt fails in the first command line, the second one in the second."""
    base, resumed, adapter = (tmp_path / name for name in ("base", "resumed", "adapter"))
    text = texts / "text.txt"
    for path in (base, resumed):
        run_ok("train", text, "--out", path, "--steps", 5, *OPTIONS)
    tuned = ["finetune-lora", text, "--model", base, "--out", adapter, "--steps", 30, "--log-every", 1]
    tuned += ["--compile", "off", "--batch-size", 4, "--eval-every", 20, "--save-every", 10]
    resume = ["train", "--resume", resumed, "--steps", 30]
    command = with_faults(tmp_path, ["error", 1, 15, 0, resume], ["error", 0, 15, 1, tuned])
    command[command.index("--monitor-interval") + 1] = "1"
    command[3:3] = ["--max-restarts", "2"]
    done = run_child(command)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeError: injected") == 2
    for path in (resumed, adapter):
        assert done.stderr.count(f"Resuming {path} at step 10") == 1
        check_steps(path, 30)
    load(base, adapters=[adapter])


@needs_proc
@pytest.mark.slow
def test_two_machines_restart_together_and_ctrl_c_at_one_saves_and_ends_both(texts: Path, tmp_path: Path) -> None:
    """A kill during start-up: torchrun on the other machine restarts its rank and does not count that. At the end,
    Ctrl-C at one machine saves the run and ends both."""
    run = tmp_path / "run"
    arguments = ["-m", "tinylm", "train", texts / "text.txt", "--out", run, "--steps", 100_000, *OPTIONS]
    with socket.create_server(("localhost", 0)) as server:
        endpoint = f"localhost:{server.getsockname()[1]}"
    command = [endpoint if part == "localhost:0" else part for part in torchrun(1, *arguments)]
    command[3:3] = ["--nnodes", "2", "--max-restarts", "9", "--rdzv-id", "run", "--rdzv-conf", "join_timeout=60"]
    with child_process(command, 200, **PIPES) as one, child_process(command, 200, **PIPES) as other:
        for killed in (1, 0):
            limit = time.monotonic() + 100
            while len(ranks := ranks_of(one) | ranks_of(other)) < 2:
                assert time.monotonic() < limit
                time.sleep(0.02)
            os.kill(ranks[killed], signal.SIGKILL)
            wait_for_save(run, saved_step(run) + 10, one)
        os.kill(other.pid, signal.SIGINT)
        messages = "".join(child.communicate()[1] for child in (one, other))
    step = saved_step(run)
    assert step >= 10 and messages.count(f"Stopped at step {step}; the run is saved.") == 1
    check_steps(run, step)


@needs_proc
@pytest.mark.slow
@pytest.mark.timeout(800)
def test_random_kills_lose_nothing_where_torchrun_restarts(texts: Path, tmp_path: Path) -> None:
    """Reference: the same run in the same number of processes without a kill. TINYLM_KILLS=20 makes more of them."""
    kills = int(os.environ.get("TINYLM_KILLS", "2"))
    text, steps = texts / "text.txt", 200 * kills
    arguments = ["-m", "tinylm", "train", text, "--steps", steps, "--parallel", "fsdp", *OPTIONS]
    assert run_child(torchrun(2, *arguments, "--out", tmp_path / "whole"), 200 + 25 * kills).returncode == 0
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
    assert set(out.split()) == {str(run)}  # printed again if a rank is killed after the end of the training
    assert saved_step(run) == steps
    assert logged(run, *LOSSES) == logged(tmp_path / "whole", *LOSSES)
    torch.testing.assert_close(weights_of(run), weights_of(tmp_path / "whole"), rtol=0, atol=0)
