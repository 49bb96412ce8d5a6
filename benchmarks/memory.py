"""Peak memory of tinylm train: for a large corpus, or for large models beside the plan's estimate.

    python benchmarks/memory.py --megabytes 1000
    python benchmarks/memory.py --models 4x128,6x384,12x768
    python benchmarks/memory.py --models 8x1024 --kinds adamw --ranks 2 --parallel fsdp

The corpus is generated: half of its words occur only once, the worst case for the memory of training a tokenizer. The
first command prints the peak anonymous memory, summed over the processes of the command. The second one trains each
model for a few steps, with AdamW and with Muon, with and without checkpointed activations, and a LoRA adapter on it,
and prints the estimate of `--dry-run`, the peak resident memory of the process and their ratio. A LoRA adapter is
trained on the model of the row before. With --ranks, torchrun starts N processes, and each has a row, whose estimate is
that of rank 0. The model 1b has a billion parameters: with AdamW it needs 20 GB of memory, and 16 GB of disk to save
it. Linux only.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from measure import LIMIT, describe_machine, run_tinylm, table

COMMON = ["the", "of", "and", "to", "in", "was", "it", "that", "he", "his", "with", "for", "as", "had", "you", "not"]
VOCABULARY = 50_000
SHAPES = {  # layers, width, heads, context, sequences per step
    "4x128": (4, 128, 4, 128, 16),
    "6x384": (6, 384, 6, 256, 16),
    "12x768": (12, 768, 12, 256, 4),
    "8x1024": (8, 1024, 16, 256, 4),
    "6x1536": (6, 1536, 16, 128, 2),
    "0.5b": (10, 2048, 16, 128, 1),
    "1b": (20, 2048, 16, 128, 1),
}
CHECKPOINTED = "--checkpoint-activations"
KINDS = {  # of training, with their options
    "adamw": ("--optimizer", "adamw"),
    "adamw, checkpointed": ("--optimizer", "adamw", CHECKPOINTED),
    "muon": ("--optimizer", "muon"),
    "muon, checkpointed": ("--optimizer", "muon", CHECKPOINTED),
    "lora": (),
    "lora, checkpointed": (CHECKPOINTED,),
}
TINY = ("--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--steps", "5", "--compile", "off")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000, help="size of the corpus (default: 1000)")
    parser.add_argument("--models", help=f"models to train on a small corpus instead, of {','.join(SHAPES)}")
    parser.add_argument("--kinds", default=";".join(KINDS), help=f"default: {';'.join(KINDS)}")
    parser.add_argument("--dtype", default="bf16", help="default: bf16")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="processes, by torchrun (default: 1)")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="default: ddp")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = model_table(options, Path(folder)) if options.models else corpus_table(options.megabytes, Path(folder))
    print(describe_machine(["torch", "tokenizers"]))
    print(found)


def corpus_table(megabytes: float, folder: Path) -> str:
    """The table of the first command: training on a large corpus, by tokenizer."""
    rows = []
    corpus = folder / "corpus.txt"
    write_corpus(corpus, int(megabytes * 1e6))
    for tokenizer in ("char", "bpe"):
        command = tinylm("train", corpus, "--out", folder / tokenizer, "--tokenizer", tokenizer, *TINY)
        seconds, peak = run_and_measure_memory(command, folder)
        rows.append([tokenizer, f"{seconds:.0f}", f"{peak / 1e6:,.0f}"])
    return table([f"{megabytes:g} MB as", "seconds", "peak anonymous memory, MB"], rows)


def model_table(options: argparse.Namespace, folder: Path) -> str:
    """The table of the second command: estimates and peaks by model and kind of training."""
    write_corpus(folder / "words.txt", 5_000_000)
    corpus, tokenizer = folder / "corpus.txt", folder / "tokenizer.json"
    corpus.write_text((folder / "words.txt").read_text()[:300_000])
    run_tinylm(
        ["train-tokenizer", f"{folder}/words.txt", "--vocab-size", str(VOCABULARY), "--out", str(tokenizer), "-q"]
    )
    rows = []
    for model in options.models.split(","):
        layers, width, heads, context, sequences = SHAPES[model]
        common = f"--steps 3 --eval-every 3 --save-every 1 --batch-size {sequences} --val-fraction 0.02 --compile off"
        shape = ("--layers", layers, "--width", width, "--heads", heads, "--context", context)
        vocabulary = ("--tokenizer", tokenizer if width >= 768 else "char")
        base = folder / "base"
        for kind in options.kinds.split(";"):
            if kind.startswith("lora"):
                start = ("finetune-lora", corpus, "--model", base, "--out", folder / "lora")
            else:
                start = ("train", corpus, "--out", base, *shape, *vocabulary)
            words = (*start, *common.split(), "--dtype", options.dtype, *KINDS[kind], "--force", "--quiet")
            command = in_ranks(tinylm(*words), options.ranks, options.parallel)
            estimate = estimated_memory(command)
            for rank, peak in enumerate(peak_resident_memory(command)):
                name = kind if options.ranks == 1 else f"{kind}, {options.parallel}, rank {rank} of {options.ranks}"
                rows.append([model, name, f"{estimate / 1e6:,.0f}", f"{peak / 1e6:,.0f}", f"{estimate / peak:.2f}"])
                print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    return table([f"model, {options.dtype}", "training", "estimate, MB", "peak resident memory, MB", "ratio"], rows)


def tinylm(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tinylm", *map(str, arguments)]


def in_ranks(command: list[str], ranks: int, parallel: str) -> list[str]:
    """The command of tinylm, started by torchrun if there are several ranks."""
    if ranks == 1:
        return command
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *launch, *command[1:], "--parallel", parallel]


def estimated_memory(command: Sequence[str]) -> int:
    """The estimate of the plan in bytes. With several ranks, it is that of rank 0."""
    plan = subprocess.run(
        [*command, "--dry-run", "--json"], check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    return int(json.loads(plan.stdout)["memory"])


def peak_resident_memory(command: Sequence[str]) -> list[int]:
    """Run a command; returns the peak resident memory of each rank in bytes, as recorded by the system.

    A command without torchrun is its only rank.
    """
    peaks: dict[int, int] = {}
    with running(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for pid in process_tree(process.pid):
                rank = rank_of(pid)
                peaks[rank] = max(peaks.get(rank, 0), memory_of(pid, "VmHWM"))
            time.sleep(0.02)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return [peaks[rank] for rank in sorted(peaks) if rank >= 0] or [peaks[-1]]


def rank_of(pid: int) -> int:
    """The rank of a process, from the variable that torchrun sets and its descendants inherit; -1 without torchrun."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended
        return -1
    return next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), -1)


@contextmanager
def running(command: Sequence[str], limit: float = LIMIT, **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """Context manager that yields a new process, which is killed with its descendants after `limit` seconds and at the
    end of the block.
    """
    with subprocess.Popen(command, **options) as process:
        timer = threading.Timer(limit, kill_tree, [process])
        timer.daemon = True
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            kill_tree(process)


def kill_tree(process: "subprocess.Popen[Any]") -> None:
    if process.returncode is None:  # not waited for yet, so its id is not reused
        for pid in list(process_tree(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def write_corpus(path: Path, size: int) -> None:
    """Write at least `size` bytes of words, of which every second one is random."""
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    with path.open("w") as file:
        while file.tell() < size:
            words = [w for _ in range(5000) for w in (rng.choice(COMMON), "".join(rng.choices(letters, k=8)))]
            lines = (" ".join(words[start : start + 12]) for start in range(0, len(words), 12))
            file.write("\n".join(lines) + "\n")


def run_and_measure_memory(command: Sequence[str], cache: Path) -> tuple[float, int]:
    """Run a command; returns its time in seconds, and the peak anonymous memory of its processes together in bytes,
    sampled 20 times per second.
    """
    started = time.monotonic()
    peak = 0
    environment = {**os.environ, "TINYLM_CACHE": str(cache / "cache")}
    with running(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            peak = max(peak, sum(memory_of(pid, "RssAnon") for pid in process_tree(process.pid)))
            time.sleep(0.05)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.monotonic() - started, peak


def process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # the process has ended
            continue
        for child in children:
            yield from process_tree(int(child))


def memory_of(pid: int, entry: str) -> int:
    """An entry of the status of a process in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:")), 0)


if __name__ == "__main__":
    main()
