"""What the benchmarks share: taking turns, medians and ratios round by round, the machine, and a table.

Functions that are compared take turns (A B A B ...), so that a machine that grows slower meanwhile is slow for all of
them. Speeds are medians; a ratio is taken within each round and its median given, with the smallest and the largest.
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

from tinylm.config import ModelConfig
from tinylm.presets import make_model_config

Times = dict[str, list[float]]  # seconds by name, one for each round


@dataclass(frozen=True)
class Spread:
    """The median of some values, the smallest and the largest."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


def take_turns(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Call all functions in turn, `rounds` times after `warmup` rounds that do not count; the seconds of each call."""
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
    """How many times as fast as `base` it is, round by round."""
    ratios = [slow / fast for slow, fast in zip(times[base], times[name], strict=True)]
    return Spread(statistics.median(ratios), min(ratios), max(ratios))


def tokens_per_second(times: Times, name: str, tokens: int) -> str:
    return f"{tokens / statistics.median(times[name]):,.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def run_tinylm(words: Sequence[str]) -> str:
    """What the command prints on stdout."""
    done = subprocess.run([sys.executable, "-m", "tinylm", *words], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def describe_machine(packages: Sequence[str] = ("torch", "transformers")) -> str:
    """The processor, its cores, the threads that torch uses, the versions and the date."""
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{_cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; {versions}, "
        f"Python {platform.python_version()}; {datetime.date.today().isoformat()}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def add_options(parser: argparse.ArgumentParser, context: int) -> None:
    """The shape of the models and the number of rounds."""
    defaults = {"layers": 6, "heads": 6, "width": 384, "context": context, "vocab_size": 65, "rounds": 5, "warmup": 1}
    for name, default in defaults.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"default: {default}")


def chosen_shape(arguments: argparse.Namespace, preset: str) -> ModelConfig:
    """A preset of tinylm, everything else as it is by default, in the shape that the options give."""
    shape = {name: getattr(arguments, name) for name in ("vocab_size", "layers", "heads", "width", "context")}
    return make_model_config(preset=preset, size="small", **shape)
