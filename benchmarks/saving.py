"""How long training waits for a save, and how long the save takes.

    python benchmarks/saving.py                                                                      # 15 seconds
    python benchmarks/saving.py --training                                                           # 5 minutes
    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/saving.py --training --parallel fsdp

Without --training, prints for each save of random weights and Adam moments of this size together the seconds that
training would wait and the seconds until the save is on disk. The trainer's check for finite weights, which precedes a
save, is not included.

With --training, trains a model of that size with AdamW on a CPU, in turns with saves every SAVE_EVERY steps and
without. The difference per save includes all that a save takes from the steps beside it: processor time and memory
bandwidth of the thread that writes.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measure import describe_machine

import tinylm
from tinylm.presets import make_model_config
from tinylm.run_config import RunConfig, TokenizerConfig
from tinylm.run_directory.directory import RunDirectory
from tinylm.text.tokenizer import train_char
from tinylm.training.background_save import BackgroundSaver
from tinylm.training.events import Event, Stepped
from tinylm.training.state import TrainerState

MATRIX = 1024  # rows and columns of each matrix of random weights
TOKENIZER = train_char("abc")
CONFIG = RunConfig.new(
    model=make_model_config(vocab_size=TOKENIZER.vocab_size, preset="modern", size="nano"),
    tokenizer=TokenizerConfig(kind="char", sha256=TOKENIZER.sha256),
)
WIDTH, CONTEXT, BATCH = 768, 128, 8  # of the trained model
SAVE_EVERY, SAVES = 4, 3  # the first save creates the files, and is not measured


def measure_saves(gigabytes: float, saves: int) -> None:
    number = max(1, round(gigabytes * 1e9 / (3 * 4 * MATRIX**2)))
    weights = {f"layers.{index}.weight": torch.randn(MATRIX, MATRIX) for index in range(number)}
    moments = {f"{name}/{kind}": torch.rand(MATRIX, MATRIX) for name in weights for kind in ("exp_avg", "exp_avg_sq")}
    size = 3 * number * 4 * MATRIX**2
    with tempfile.TemporaryDirectory() as folder, BackgroundSaver() as saver:
        run = RunDirectory.create(Path(folder) / "run", CONFIG, TOKENIZER)
        stalls, totals = [], []
        for step in range(saves + 1):
            state = TrainerState(step=step, val_loss=1.0).to_json()
            start = time.perf_counter()
            saver.write(
                lambda tensors, state=state: run.save_last(
                    {name: tensors[name] for name in weights}, {name: tensors[name] for name in moments}, state, CONFIG
                ),
                weights | moments,
                wait=not run.is_in_place,
            )
            stalls.append(time.perf_counter() - start)
            saver.finish()
            totals.append(time.perf_counter() - start)
            print(
                f"save {step}: {size / 1e9:.2f} GB, training waits {stalls[-1]:.3f} s, on disk after {totals[-1]:.2f} s"
            )
    stall, total = statistics.median(stalls[1:]), statistics.median(totals[1:])
    print(f"median of saves 1 to {saves}: waits {stall:.3f} s of {total:.2f} s, {100 * stall / total:.1f} %")


def measure_training(gigabytes: float, rounds: int, parallel: str) -> None:
    layers = max(1, round(gigabytes * 1e9 / (12 * 12 * WIDTH**2)))
    differences, steps = [], []
    for _ in range(rounds):
        without, with_saves = (train(layers, parallel, save_every) for save_every in (1000, SAVE_EVERY))
        if without:  # the callbacks of rank 0 only
            differences.append((sum(with_saves) - sum(without)) / SAVES)
            steps.append(statistics.median(without))
    if not differences:
        return
    size = layers * 12 * WIDTH**2 * 12 / 1e9
    low, middle, high = min(differences), statistics.median(differences), max(differences)
    print(
        f"{parallel}, {os.environ.get('WORLD_SIZE', 1)} ranks, about {size:.2f} GB per save, "
        f"{statistics.median(steps):.2f} s per step: a save holds training up by {middle:.2f} s "
        f"({low:.2f} to {high:.2f}, {rounds} rounds)"
    )
    print(describe_machine(["torch"]))


def train(layers: int, parallel: str, save_every: int) -> list[float]:
    """The seconds of each step between the first save and the one after the last."""
    times: list[float] = []

    def record(event: Event) -> None:
        if isinstance(event, Stepped):
            times.append(time.perf_counter())

    steps = SAVE_EVERY * (SAVES + 2)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("It was cold by the sea, and the old man said so. " * 2000)
        tinylm.train(
            text,
            Path(folder) / "run",
            layers=layers,
            heads=WIDTH // 64,
            width=WIDTH,
            context=CONTEXT,
            tokenizer="char",
            batch_size=BATCH,
            optimizer="adamw",
            steps=steps,
            eval_every=steps,
            save_every=save_every,
            device="cpu",
            compile="off",
            parallel=parallel,
            callbacks=[record],
        )
    first, last = SAVE_EVERY, steps - 1  # the last save is at the end
    measured = times[first:last]
    return [end - start for start, end in itertools.pairwise(measured)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of a save (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=5, help="without --training (default: %(default)s)")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, help="with --training (default: %(default)s)")
    parser.add_argument("--parallel", default="ddp", choices=("ddp", "fsdp"), help="with --training, under torchrun")
    options = parser.parse_args()
    if options.training:
        measure_training(options.gigabytes, options.rounds, options.parallel)
    else:
        measure_saves(options.gigabytes, options.saves)


if __name__ == "__main__":
    main()
