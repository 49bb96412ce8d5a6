"""Measurement shared by the benchmarks: functions in turns, medians and ratios, memory, the machine, tables.

Functions that are compared take turns (A B A B ...), so that a change in the machine's speed affects all of them.
Speeds are medians over rounds. Ratios are computed per round; their median, minimum and maximum are printed.
"""

import argparse
import datetime
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.config.presets import make_model_config

Times = dict[str, list[float]]  # by name, the seconds of each round
LIMIT = 6 * 3600.0  # seconds that one command may take: enough for an hour of training on a busy machine


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of some values."""

    median: float
    minimum: float
    maximum: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.minimum:.2f} to {self.maximum:.2f})"


def take_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Call all functions in turn, `rounds` times after `warmup` rounds. Returns the seconds of each measured call.

    Raises ValueError for less than one round.
    """
    if rounds < 1:
        raise ValueError(f"{rounds} rounds measure nothing")
    times: Times = {name: [] for name in functions}
    for number in range(warmup + rounds):
        for name, function in functions.items():
            begun = clock()
            function()
            seconds = clock() - begun
            if number >= warmup:
                times[name].append(seconds)
    return times


def speedup(times: Times, name: str, base: str) -> Spread:
    """The speed of `name` relative to `base`, computed per round."""
    ratios = [slow / fast for slow, fast in zip(times[base], times[name], strict=True)]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def tokens_per_second(times: Times, name: str, tokens: int) -> str:
    """The median speed. tokens: per call."""
    return f"{tokens / statistics.median(times[name]):,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def run_tinylm(words: Sequence[object], limit: float = LIMIT) -> str:
    """Run a command of tinylm and return its stdout. It is killed after `limit` seconds.

    Raises CalledProcessError and TimeoutExpired.
    """
    return subprocess.run(tinylm_command(*words), stdout=subprocess.PIPE, text=True, check=True, timeout=limit).stdout


def describe_machine(packages: Sequence[str] = ("torch", "transformers")) -> str:
    """The CPU model, the numbers of cores and torch threads, the load, the versions of packages and the date."""
    import torch

    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads{load}; {versions}, "
        f"Python {platform.python_version()}; {datetime.date.today().isoformat()}"
    )


def add_options(parser: argparse.ArgumentParser, context: int) -> None:
    """Add options for the shape of the models and the numbers of rounds and warm-up rounds. context: its default."""
    defaults = {"layers": 6, "heads": 6, "width": 384, "context": context, "vocab_size": 65, "rounds": 5, "warmup": 1}
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")


def chosen_shape(arguments: argparse.Namespace, preset: str) -> ModelConfig:
    """The configuration of a preset with the shape that the options set."""
    shape = {name: getattr(arguments, name) for name in ("vocab_size", "layers", "heads", "width", "context")}
    return make_model_config(preset=preset, size="small", **shape)


# Processes and their memory. Linux only.


def tinylm_command(*words: object) -> list[str]:
    """The command line of tinylm, with this interpreter."""
    return [sys.executable, "-m", "tinylm", *map(str, words)]


@contextmanager
def running(command: Sequence[str], limit: float = LIMIT, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A new process, killed with its descendants after `limit` seconds and at the end of the block."""
    with subprocess.Popen(command, text=True, **options) as process:
        timer = threading.Timer(limit, kill_tree, [process])
        timer.daemon = True
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            kill_tree(process)


def kill_tree(process: "subprocess.Popen[str]") -> None:
    """Kill a process and its descendants, unless it has been waited for, since its id may be another's then."""
    for pid in list(process_tree(process.pid)) if process.returncode is None else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the process has ended
            for child in task.read_text().split():
                yield from process_tree(int(child))


def memory_of(pid: int, entry: str) -> int:
    """An entry of the status of a process in bytes, such as VmHWM or RssAnon; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:")), 0)


def ask(process: "subprocess.Popen[str]", question: str = "", limit: float = LIMIT) -> dict[str, Any]:
    """Write a line to a process that answers each with a line of JSON, and return its next answer.

    Raises RuntimeError if it ends, or takes longer than `limit` seconds.
    """
    assert process.stdin is not None and process.stdout is not None
    if question:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    if not select.select([process.stdout], [], [], limit)[0]:
        raise RuntimeError(f"{process.args!r} took longer than {limit:.0f} s")
    if not (line := process.stdout.readline()):
        raise RuntimeError(f"{process.args!r} ended with {process.wait(60)}")
    return dict(json.loads(line))
