"""Measurement shared by the benchmarks: functions in turns, medians and ratios, the machine's description, tables.

Functions that are compared take turns (A B A B ...), so that a change in the machine's speed affects all of them.
Speeds are medians over rounds. Ratios are computed per round; their median, minimum and maximum are printed.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tinylm.model_config import ModelConfig
from tinylm.presets import make_model_config

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


def run_tinylm(words: Sequence[str], limit: float = LIMIT) -> str:
    """Run a command of tinylm and return its stdout. It is killed after `limit` seconds.

    Raises CalledProcessError and TimeoutExpired.
    """
    command = [sys.executable, "-m", "tinylm", *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=limit).stdout


def describe_machine(packages: Sequence[str] = ("torch", "transformers")) -> str:
    """The CPU model, the numbers of cores and torch threads, the versions of packages and the date."""
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; {versions}, "
        f"Python {platform.python_version()}; {datetime.date.today().isoformat()}"
    )


def print_machine() -> None:
    """Print the machine and its load average, for a benchmark that needs torch only."""
    print(describe_machine(["torch"]))
    print(f"The load average was {os.getloadavg()[0]:.1f}.\n", flush=True)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


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
