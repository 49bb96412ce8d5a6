"""Peak anonymous memory of tinylm train, summed over its processes, for a large corpus.

    python benchmarks/memory.py --megabytes 1000

The corpus is generated: half of its words occur only once, which needs most memory in the training of a tokenizer.
Linux only.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from measure import describe_machine, table

COMMON = ["the", "of", "and", "to", "in", "was", "it", "that", "he", "his", "with", "for", "as", "had", "you", "not"]
TINY = ("--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--steps", "5", "--compile", "off")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000, help="size of the corpus (default: 1000)")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        write_corpus(corpus, int(options.megabytes * 1e6))
        for tokenizer in ("char", "bpe"):
            out = Path(folder) / tokenizer
            command = ["train", corpus, "--out", out, "--tokenizer", tokenizer, *TINY]
            seconds, peak = run_and_measure_memory([sys.executable, "-m", "tinylm", *map(str, command)], Path(folder))
            rows.append([tokenizer, f"{seconds:.0f}", f"{peak / 1e6:,.0f}"])
    print(describe_machine(["torch", "tokenizers"]))
    print(table([f"{options.megabytes:g} MB as", "seconds", "peak anonymous memory, MB"], rows))


def write_corpus(path: Path, size: int) -> None:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    with path.open("w") as file:
        while file.tell() < size:
            words = [w for _ in range(5000) for w in (rng.choice(COMMON), "".join(rng.choices(letters, k=8)))]
            lines = (" ".join(words[start : start + 12]) for start in range(0, len(words), 12))
            file.write("\n".join(lines) + "\n")


def run_and_measure_memory(command: Sequence[str], cache: Path) -> tuple[float, int]:
    """Run a command; returns its time in seconds and its peak memory in bytes, sampled 20 times per second."""
    started = time.monotonic()
    peak = 0
    environment = {**os.environ, "TINYLM_CACHE": str(cache / "cache")}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None:
            peak = max(peak, sum(anonymous_memory(pid) for pid in process_tree(process.pid)))
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


def anonymous_memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


if __name__ == "__main__":
    main()
