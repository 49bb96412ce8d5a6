"""Peak memory of each rank: torchrun --standalone --nproc-per-node 2 benchmarks/sharding.py --parallel fsdp.

Trains a model of 52 million parameters for two steps on a CPU in fp32, and prints the peak resident memory of each
process before and after the training.
"""

import argparse
import os
import resource
import tempfile
from pathlib import Path

import tinylm

MODEL = {"layers": 8, "heads": 8, "width": 768, "context": 32, "tokenizer": "char", "tie": True}


def peak() -> float:
    """Peak resident memory of this process so far, in MiB on Linux."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", default="fsdp", help="ddp or fsdp (default: fsdp)")
    options = parser.parse_args()
    before = peak()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("It was cold by the sea, and the old man said so. " * 200)
        settings = {"steps": 2, "batch_size": 2, "eval_every": 2, "device": "cpu", "dtype": "fp32", "compile": "off"}
        tinylm.train(text, Path(folder) / "run", parallel=options.parallel, **MODEL, **settings)
    print(
        f"rank {os.environ.get('RANK', 0)}, {options.parallel}: {before:,.0f} MB before, {peak():,.0f} MB at most",
        flush=True,
    )


if __name__ == "__main__":
    main()
