"""How long training waits for a save, and how long the save takes: python benchmarks/saving.py [--gigabytes 1].

Prints, for each save of random weights and Adam moments of this size together, the seconds that training waits and the
seconds until the save is on disk. The trainer's check for finite weights, which precedes a save, is not included.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tinylm.presets import make_model_config
from tinylm.run_config import RunConfig, TokenizerConfig
from tinylm.run_directory.directory import RunDirectory
from tinylm.text.tokenizer import train_char
from tinylm.training.background_save import BackgroundSaver
from tinylm.training.state import TrainerState

MATRIX = 1024  # rows and columns of each matrix
TOKENIZER = train_char("abc")
CONFIG = RunConfig.new(
    model=make_model_config(vocab_size=TOKENIZER.vocab_size, preset="modern", size="nano"),
    tokenizer=TokenizerConfig(kind="char", sha256=TOKENIZER.sha256),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of a save (default: 1)")
    parser.add_argument("--saves", type=int, default=5, help="saves after the first one (default: 5)")
    options = parser.parse_args()
    number = max(1, round(options.gigabytes * 1e9 / (3 * 4 * MATRIX**2)))
    weights = {f"layers.{index}.weight": torch.randn(MATRIX, MATRIX) for index in range(number)}
    moments = {f"{name}/{kind}": torch.rand(MATRIX, MATRIX) for name in weights for kind in ("exp_avg", "exp_avg_sq")}
    size = 3 * number * 4 * MATRIX**2
    with tempfile.TemporaryDirectory() as folder, BackgroundSaver() as saver:
        run = RunDirectory.create(Path(folder) / "run", CONFIG, TOKENIZER)
        stalls, totals = [], []
        for step in range(options.saves + 1):
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
    print(f"median of saves 1 to {options.saves}: waits {stall:.3f} s of {total:.2f} s, {100 * stall / total:.1f} %")


if __name__ == "__main__":
    main()
