"""Encoding a large corpus: MB/s per core, memory, start of a run on the encoded corpus, and resumption after a kill.

    python benchmarks/corpora.py --gigabytes 10

The corpus is generated in a temporary folder (--folder: where), with the cache beside it; both take 1.6 times its size.
Lines of common words are repeated in random order, each with a word that occurs only once. 10 GB take about five
minutes on two cores. The last column extrapolates to 1 TB. Linux only.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from measure import LIMIT, describe_machine, table
from memory import memory_of, process_tree, running

LINES = 50_000  # that are repeated
LINE_WORDS = 48
BLOCK_LINES = 50_000  # written at a time
TERABYTE = 1e12
VAL_FRACTION = "0.01"
TORCH = (sys.executable, "-c", "import torch")
TINY = ("--layers", "1", "--heads", "2", "--width", "32", "--context", "32", "--steps", "1", "--compile", "off")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10, help="size of the corpus (default: 10)")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made (default: $TMPDIR)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        prepare(options.child)
        return
    size = int(options.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        os.environ["TINYLM_CACHE"] = str(Path(folder) / "cache")
        corpus = Path(folder) / "corpus.txt"
        started = time.monotonic()
        write_corpus(corpus, size)
        print(f"made {corpus.stat().st_size / 1e9:.2f} GB in {time.monotonic() - started:.0f} s", flush=True)
        time.sleep(3)  # statistics of files that have just changed are not cached (files.SETTLED_SECONDS)
        first = Measured(corpus)
        print(first, flush=True)
        start = Measured(corpus)
        print(start, flush=True)
        torch = min(seconds_of(TORCH) for _ in range(3))
        train = [sys.executable, "-m", "tinylm", "train", str(corpus), "--val-fraction", VAL_FRACTION, *TINY]
        command = min(seconds_of([*train, "--dry-run"]) for _ in range(3)) - torch
        step = min(seconds_to_first_step(train, Path(folder) / f"run{number}") for number in range(3)) - torch
        resumed, kept, lost = kill_and_resume(corpus, Path(folder) / "cache" / "tokens")
        shards = len(list((Path(folder) / "cache" / "tokens").glob("*/train*.bin")))
    print_report(size, first, start, (command, step), (resumed, kept, lost), shards)


def print_report(
    size: int,
    first: "Measured",
    start: "Measured",
    commands: tuple[float, float],
    kill: tuple[float, int, int],
    shards: int,
) -> None:
    cores = len(os.sched_getaffinity(0))
    resumed, kept, lost = kill
    dry_run, step = commands
    larger = TERABYTE / size
    speed = size / 1e6 / first.phases["encode"]
    reading = max(resumed - start.seconds, 0.0)  # of what was encoded before the kill; the rest is start-up
    rows = [
        ["reading once (hash, alphabet), MB/s", f"{size / 1e6 / first.phases['scan']:.0f}", ""],
        ["reading once, hours", f"{first.phases['scan'] / 3600:.3f}", f"{first.phases['scan'] * larger / 3600:.1f}"],
        [
            "choosing a tokenizer, seconds",
            f"{first.phases['tokenizer']:.1f}",
            f"at most {first.phases['tokenizer'] * larger:,.0f}",  # one pass, and training, whose time is constant
        ],
        ["encoding, MB/s", f"{speed:.1f}", ""],
        ["encoding, MB/s per core", f"{speed / cores:.1f}", ""],
        [
            f"encoding on {cores} cores, hours",
            f"{first.phases['encode'] / 3600:.3f}",
            f"{first.phases['encode'] * larger / 3600:.1f}",
        ],
        ["peak memory of all processes, MB", f"{first.peak / 1e6:,.0f}", "the same"],
        ["peak memory of the main process, MB", f"{first.peak_main / 1e6:,.0f}", "the same"],
        ["peak memory of a worker, MB", f"{first.peak_worker / 1e6:,.0f}", "the same"],
        ["token files of the training text", str(shards), f"{shards * larger:,.0f}"],
        ["preparing an encoded corpus, seconds", f"{sum(start.phases.values()):.2f}", ""],
        ["of these, opening the token files", f"{start.phases['open']:.3f}", f"{start.phases['open'] * larger:.2f}"],
        ["tinylm train --dry-run, seconds after import torch", f"{dry_run:.2f}", ""],
        ["tinylm train to the first logged step, seconds after import torch", f"{step:.2f}", ""],
        [
            "continuing after a kill in the middle, seconds",
            f"{resumed:.1f}",
            f"{start.seconds + reading * larger:,.0f}",
        ],
        ["token files kept at the kill, and lost", f"{kept}, {lost}", ""],
    ]
    print(describe_machine(["torch", "tokenizers", "gigatoken", "numpy"]))
    print(table(["", f"{size / 1e9:g} GB", "1 TB"], rows))


def write_corpus(path: Path, size: int) -> None:
    """Lines of about 300 bytes of common words, in random order, each with a word of its own."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = ["".join(rng.choices(letters[: 8 + n % 18], k=2 + n % 9)) for n in range(30_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    drawn = rng.choices(words, weights, k=LINE_WORDS * LINES)
    lines = [" ".join(drawn[start : start + LINE_WORDS]) for start in range(0, len(drawn), LINE_WORDS)]
    to_letters = str.maketrans("0123456789abcdef", "bcdfghklmnprstvw")
    with path.open("w", encoding="ascii") as file:
        while file.tell() < size:
            block = rng.choices(lines, k=BLOCK_LINES)
            new = f"{rng.getrandbits(40 * BLOCK_LINES):0{10 * BLOCK_LINES}x}".translate(to_letters)
            file.write("".join(f"{line} {new[10 * n : 10 * n + 8]}.\n" for n, line in enumerate(block)))


def prepare(corpus: Path) -> None:
    """Scan and encode a text as a run does, and print the seconds of each phase as JSON. For a process of its own."""
    from tinylm.text.corpus import find_corpus
    from tinylm.text.corpus_encoding import encode_split, split_corpus
    from tinylm.text.token_files import open_part, token_key
    from tinylm.text.tokenizer_choice import choose_tokenizer

    phases = {}
    clock = time.monotonic()

    def lap(name: str) -> None:
        nonlocal clock
        phases[name] = time.monotonic() - clock
        clock = time.monotonic()

    split = split_corpus(find_corpus([str(corpus)]), None, float(VAL_FRACTION))
    lap("scan")
    tokenizer = choose_tokenizer(split, "auto", None)
    lap("tokenizer")
    tokens, data = encode_split(split, tokenizer)
    lap("encode")
    key = token_key(data.fingerprint, data.val_fingerprint, data.train_characters, tokenizer, data.encoder)
    open_part(tokens.path, "train", key, tokenizer.vocab_size)
    lap("open")
    print(json.dumps(phases))


class Measured:
    """The seconds of each phase of `prepare`, and peaks of anonymous memory in bytes."""

    def __init__(self, corpus: Path) -> None:
        self.peak = self.peak_main = self.peak_worker = 0
        started = time.monotonic()
        with start_child(corpus) as process:
            while process.poll() is None:
                sizes = [(pid, memory_of(pid, "RssAnon")) for pid in process_tree(process.pid)]
                self.peak = max(self.peak, sum(size for _, size in sizes))
                self.peak_main = max(self.peak_main, *(size for pid, size in sizes if pid == process.pid))
                self.peak_worker = max(self.peak_worker, 0, *(size for pid, size in sizes if pid != process.pid))
                time.sleep(0.05)
            assert process.stdout is not None
            output = process.stdout.read()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, "prepare")
        self.seconds = time.monotonic() - started
        self.phases: dict[str, float] = json.loads(output)

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())


def start_child(corpus: Path) -> AbstractContextManager["subprocess.Popen[str]"]:
    command = [sys.executable, __file__, "--child", str(corpus)]
    return running(command, stdout=subprocess.PIPE, text=True)


def seconds_of(command: Sequence[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT)
    return time.monotonic() - started


def seconds_to_first_step(train: Sequence[str], run: Path) -> float:
    """Seconds from the start of the command to the metrics of step 1, which follow the first evaluation."""
    command = [*train, "--log-every", "1", "--out", str(run)]
    started = time.monotonic()
    with running(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: has_first_step(run.parent), process)
        seconds = time.monotonic() - started
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    shutil.rmtree(run)
    return seconds


def has_first_step(folder: Path) -> bool:
    """Whether a run in the folder has logged step 1; its directory has another name until its first save."""
    with suppress(OSError):  # it was renamed between both calls
        return any('"step": 1,' in file.read_text() for file in folder.glob("*/metrics.jsonl"))
    return False


def kill_and_resume(corpus: Path, cache: Path) -> tuple[float, int, int]:
    """Kill the encoding of a text in the middle, and encode it again.

    Returns the seconds until the encoding continues, the token files that were kept, and those that were lost.
    """
    (folder,) = cache.glob("[!.]*")
    half = max(len(list(folder.glob("train*.bin"))) // 2, 1)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    unfinished = cache / f".{folder.name}.tokens"
    with start_child(corpus) as process:
        wait_for(lambda: len(complete(unfinished)) >= half, process)
        process.send_signal(signal.SIGKILL)
    kept = complete(unfinished)
    lost = [path for path in unfinished.glob("*.bin") if path.name not in kept]
    for path in lost:
        path.unlink()
    started = time.monotonic()
    with start_child(corpus) as process:
        wait_for(lambda: any(path.name not in kept for path in unfinished.glob("*.bin")), process)
        seconds = time.monotonic() - started
        process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "prepare")
    return seconds, len(kept), len(lost)


def complete(unfinished: Path) -> set[str]:
    """The names of the complete training files of an unfinished encoding."""
    try:
        count = len(json.loads((unfinished / "tokens.json").read_text())["train"])
    except (OSError, ValueError):
        return set()
    return {f"train-{index:05}.bin" if index else "train.bin" for index in range(count)}


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[Any]") -> None:
    while process.poll() is None and not condition():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
