"""The training losses of several ranks beside those of one process, for each kind of run and parallel mode.

    python benchmarks/rank_losses.py --steps 50 --modes "ddp 2,ddp 4,fsdp 2,fsdp 4"

Each kind of run trains a small model in fp32 on the CPU, on the same batches in all modes. The table has the loss of
the last step in one process, and for each mode the largest relative difference from the losses of one process over all
steps. Differences are rounding, which training amplifies. One torchrun trains the runs of a mode, one after the other.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import print_machine, table

import tinylm
from tinylm.run_directory.metrics_log import read_metrics

DATA = Path(__file__).resolve().parent.parent / "data"
MODEL = {"layers": 2, "heads": 2, "width": 32, "context": 32, "tokenizer": "char", "dropout": 0.0}
TRAINING = {"batch_size": 8, "lr": 1e-3, "log_every": 1, "device": "cpu", "dtype": "fp32", "compile": "off"}
NEW: dict[str, tuple[str, dict[str, Any]]] = {  # kind: file and settings
    "next token, AdamW": ("text.txt", {"optimizer": "adamw"}),
    "next token, Adam": ("text.txt", {"optimizer": "adam"}),
    "next token, Muon": ("text.txt", {"optimizer": "muon"}),
    "masked tokens": ("text.txt", {"architecture": "encoder", "optimizer": "adamw"}),
    "pairs": ("pairs.tsv", {"architecture": "encoder-decoder", "optimizer": "adamw"}),
    "chat": ("chat.jsonl", {"context": 256, "optimizer": "adamw"}),
    "experts": ("text.txt", {"experts": 4, "expert_balance": 0.1, "optimizer": "adamw"}),
}
ADAPTERS = ("LoRA", "bottleneck")
LIMIT = 900  # seconds for all runs in one mode together
BASE = "next token, AdamW"  # the base model of adapters


def write_texts(folder: Path) -> None:
    """Write a plain text, pairs and conversations."""
    text = (DATA / "corpus.txt").read_text()[:20_000]
    (folder / "text.txt").write_text(text)
    lines = [line[:24] for line in text.splitlines() if line]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line[::-1]}\n" for line in lines))
    (folder / "chat.jsonl").write_bytes(b"".join((DATA / "company.jsonl").read_bytes().splitlines(keepends=True)[:100]))


def train_all(folder: Path, mode: str, steps: int) -> None:
    """Train each kind of run in this process, or in the ranks of this torchrun."""
    out, parallel = folder / mode, mode.split()[0]
    common: dict[str, Any] = {**TRAINING, "steps": steps, "eval_every": steps, "parallel": parallel}
    for kind, (file, settings) in NEW.items():
        tinylm.train(folder / file, out / kind, **{**MODEL, **common, **settings})
    base, text = folder / "ddp 1" / BASE, folder / "text.txt"
    tinylm.finetune_lora(text, base, out / "LoRA", rank=4, **common)
    tinylm.finetune_adapter(text, base, out / "bottleneck", bottleneck=8, **common)


def losses(run: Path) -> list[float]:
    """The training loss of each step."""
    return [record["loss"] for record in read_metrics(run) if "loss" in record]


def row(folder: Path, kind: str, modes: list[str]) -> list[str]:
    """The row of the table for a kind of run."""
    one = losses(folder / "ddp 1" / kind)
    found = []
    for mode in modes:
        pairs = zip(losses(folder / mode / kind), one, strict=True)
        found.append(f"{max(abs(loss / expected - 1) for loss, expected in pairs):.1e}")
    return [kind, f"{one[-1]:.4f}", *found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="default: 50")
    parser.add_argument(
        "--modes", default="ddp 2,ddp 4,fsdp 2,fsdp 4", metavar="LIST", help="modes with their numbers of ranks"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # in the processes of torchrun
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    if arguments.folder is not None:
        torch.set_num_threads(1)
        train_all(arguments.folder, modes[0], arguments.steps)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder)
        for mode in ("ddp 1", *modes):
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", mode.split()[1]]
            options = ["--steps", str(arguments.steps), "--modes", mode, "--folder", name]
            command = [sys.executable, *launch, __file__, *options]
            subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=LIMIT)
        print(table(["run", "loss, one process", *modes], [row(folder, kind, modes) for kind in (*NEW, *ADAPTERS)]))
    print_machine()


if __name__ == "__main__":
    main()
