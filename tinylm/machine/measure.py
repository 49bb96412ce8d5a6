"""The machine of a training run: device, number format, memory, and speed of matrix products and of layers.

Also how much of the processor other processes take, and what a training run says about it (decision 042).
"""

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from tinylm.config.model import ModelConfig
from tinylm.config.presets import make_model_config
from tinylm.config.run import RuntimeConfig
from tinylm.config.settings import format_duration
from tinylm.kernels.layers import PREFERS_ONEDNN, linear, max_unfused_keys
from tinylm.machine.device import (
    DTYPES,
    Choice,
    autocast,
    can_compile,
    choose_device,
    choose_generation_dtype,
    choose_training_dtype,
    computes,
    describe_device,
    free_memory,
    identify_device,
    must_compare_bf16,
)
from tinylm.reporter import Reporter, counted
from tinylm.system.machine_profile import Measurement, usable_cores
from tinylm.transformer.build import build_model

COMPARED_DTYPES = ("fp32", "bf16")
RATE_BOUNDS = (1e6, 1e18)  # FLOP/s
LAYER_BOUNDS = (1e-9, 1.0)  # seconds per token and layer
MEASURE_SECONDS, MIN_ROUNDS, MIN_LAYER_ROUNDS = 1.0, 50, 5  # of a measurement; all are minima
PROBE_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device and number format of a training run, and the properties of the machine that a plan depends on.

    threads: number of threads that torch uses on the CPU
    matmul_rate: FLOP/s of matrix multiplication in `dtype`; 0 if a run has not recorded it
    layer_seconds: seconds per token and layer of the forward and backward pass of the model of `probe_config` in
        `dtype`, in processor time of all threads together; `None` if not measured, as on a GPU
    free_memory: see `tinylm.machine.device.free_memory`
    compiled_is_faster: whether compiled layers train faster than eager layers
    max_unfused_keys: largest number of keys at which attention is unfused and stores its weights for the backward pass;
        0 if it is always fused
    reasons: the device and the format, and why they were chosen, as text for the user
    """

    device: str
    dtype: str
    threads: int
    matmul_rate: float
    layer_seconds: float | None
    free_memory: int | None
    compiled_is_faster: bool
    max_unfused_keys: int
    reasons: str

    @classmethod
    def recorded(cls, runtime: RuntimeConfig, free_memory: int | None) -> Self:
        """The machine that a run has recorded. free_memory: the bytes that are free now."""
        return cls(
            device=runtime.device,
            dtype=runtime.dtype,
            threads=runtime.threads,
            matmul_rate=runtime.matmul_rate or 0.0,
            layer_seconds=runtime.layer_seconds,
            free_memory=free_memory,
            compiled_is_faster=runtime.compile,
            max_unfused_keys=max_unfused_keys(runtime.device, runtime.dtype),
            reasons="recorded",
        )

    def runtime(self, *, compile: bool) -> RuntimeConfig:
        """The properties that a run records; `compile`: whether its layers are compiled."""
        return RuntimeConfig(
            device=self.device,
            dtype=self.dtype,
            compile=compile,
            threads=self.threads,
            matmul_rate=self.matmul_rate,
            layer_seconds=self.layer_seconds,
        )


def choose_machine(device: str, dtype: str, reporter: Reporter) -> Machine:
    """Choose device and number format (`auto` or a name), and take the speeds from the machine profile.

    Speeds that the profile lacks are measured, for at least MEASURE_SECONDS each, with a note to the reporter.

    Raises UsageError for a device or format that is unknown or not available.
    """
    chosen_device = choose_device(device)
    rate = _matmul_rate(chosen_device.value, reporter)
    chosen_dtype = choose_training_dtype(dtype, chosen_device.value, rate)
    matmul_rate, layer_seconds = round_measured(rate(chosen_dtype.value)), None
    if chosen_device.value == "cpu":  # the note for the matmul rate covers both
        entry = layer_seconds_entry("cpu", chosen_dtype.value)
        seconds = entry.get(lambda: measure_layer_seconds(chosen_dtype.value))
        layer_seconds = round_measured(seconds[chosen_dtype.value])
    return Machine(
        device=chosen_device.value,
        dtype=chosen_dtype.value,
        threads=torch.get_num_threads(),
        matmul_rate=matmul_rate,
        layer_seconds=layer_seconds,
        free_memory=free_memory(chosen_device.value),
        compiled_is_faster=compiled_is_faster(chosen_device.value, chosen_dtype.value),
        max_unfused_keys=max_unfused_keys(chosen_device.value, chosen_dtype.value),
        reasons=f"{describe_device(chosen_device.value)}: {chosen_device.reason}; "
        f"{chosen_dtype.value}: {chosen_dtype.reason}",
    )


def choose_loss_dtype(
    wanted: str, device: str, weights: torch.dtype, recorded: str | None, reporter: Reporter
) -> Choice:
    """The number format of the losses, logits and labels of a model: fp32, bf16 or fp16 (decision 046).

    `auto` is the format of its training, if the device computes in it; otherwise that of 16-bit weights; otherwise the
    one that training here would have.

    weights: as from `weights_dtype`. recorded: the format of its training; `None` if not known. reporter: as in
        `choose_machine`

    Raises UsageError for an unknown format.
    """
    if wanted == "auto" and recorded is not None and computes(device, recorded):
        return Choice(recorded, "as in training")
    if wanted == "auto" and weights == torch.float32:
        return choose_training_dtype("auto", device, _matmul_rate(device, reporter))
    return choose_generation_dtype(wanted, device, weights)


def _matmul_rate(device: str, reporter: Reporter) -> Callable[[str], float]:
    """The FLOP/s of matrix multiplication in a format, recorded or measured. Formats that `auto` compares are measured
    together.
    """

    @functools.cache
    def rates(dtypes: tuple[str, ...]) -> dict[str, float]:
        return matmul_rates_entry(device, dtypes).get(lambda: measure_matmul_rates(device, dtypes), reporter)

    def rate(dtype: str) -> float:
        compared = dtype in COMPARED_DTYPES and must_compare_bf16(device)
        return rates(COMPARED_DTYPES if compared else (dtype,))[dtype]

    return rate


def compiled_is_faster(device: str, dtype: str, onednn: bool = PREFERS_ONEDNN) -> bool:
    """Whether torch.compile is available and makes a training step faster.

    In fp32 on a CPU, compiled code uses MKL, which is slower than oneDNN on some processors (decision 013).
    onednn: whether it is on this one
    """
    return can_compile(device) and not ((device, dtype) == ("cpu", "fp32") and onednn)


def round_measured(number: float) -> float:
    """The nearest power of 2^(1/4), to four digits, so that repeated measurements usually give the same number."""
    return float(f"{2 ** (round(4 * math.log2(number)) / 4):.4g}")


def matmul_rates_entry(device: str, dtypes: tuple[str, ...]) -> Measurement:
    """The machine profile's entry for matrix multiplication: FLOP/s by number format."""
    return Measurement("matmul", identify_device(device), dict.fromkeys(dtypes, RATE_BOUNDS))


def processor_time() -> float:
    """Processor time of this thread in seconds. On Windows wall-clock time: processor time has steps of 16 ms there."""
    return time.perf_counter() if sys.platform == "win32" else time.thread_time()


def processor_time_of_all() -> float:
    """Processor time of all threads of this process in seconds; on Windows an estimate of it by wall-clock time."""
    return time.perf_counter() * torch.get_num_threads() if sys.platform == "win32" else time.process_time()


def measure_matmul_rates(
    device: str, dtypes: tuple[str, ...], clock: Callable[[], float] = processor_time
) -> dict[str, float]:
    """FLOP/s by number format: the best of many timings, which alternate between the formats.

    On a CPU, the rate of one thread in processor time is multiplied by the number of threads: on a busy machine,
    several threads take up to ten times as much wall-clock time, but one thread takes about the same processor time
    (decision 020).
    """
    threads = torch.get_num_threads() if device == "cpu" else 1
    best = dict.fromkeys(dtypes, 0.0)
    start, rounds = time.perf_counter(), 0
    while rounds < MIN_ROUNDS or time.perf_counter() - start < MEASURE_SECONDS:
        for dtype in dtypes:
            best[dtype] = max(best[dtype], threads * _measure_matmul_rate(device, dtype, clock))
        rounds += 1
    return best


@torch.no_grad()
def _measure_matmul_rate(device: str, dtype: str, clock: Callable[[], float]) -> float:
    """FLOP/s of a matrix multiplication, timed once; on a CPU, of one thread by this clock."""
    rows, width = 2048, 512
    x = torch.ones(rows, width, device=device, dtype=DTYPES[dtype])
    w = torch.ones(width, width, device=device, dtype=DTYPES[dtype])
    times, threads = 1, torch.get_num_threads()
    if device != "cpu":
        times, clock = 4, time.perf_counter
    torch.set_num_threads(1)
    try:
        linear(x, w)[0, 0].item()  # `item` waits for the device
        start = clock()
        for _ in range(times):
            y = linear(x, w)
        y[0, 0].item()
        return times * 2 * rows * width * width / max(clock() - start, 1e-9)
    finally:
        torch.set_num_threads(threads)


def probe_config() -> ModelConfig:
    """The configuration of the decoder whose layers are timed."""
    return make_model_config(vocab_size=64, preset="modern", size="tiny", layers=2, context=256)


def layer_seconds_entry(device: str, dtype: str) -> Measurement:
    """The machine profile's entry for the time per token and layer in a number format."""
    return Measurement("layers", identify_device(device), {dtype: LAYER_BOUNDS})


def measure_layer_seconds(dtype: str, clock: Callable[[], float] = processor_time_of_all) -> dict[str, float]:
    """Seconds per token and layer, by number format, of a forward and backward pass of the probe model.

    The shortest of many timings, in processor time of all threads, which share memory and perhaps cores (decision 053).
    Embedding, output layer and loss are counted as part of the layers.
    """
    config = probe_config()
    with torch.random.fork_rng(devices=()):
        model = build_model(config)
    ids = torch.arange(PROBE_ROWS * config.context).view(PROBE_ROWS, config.context) % config.vocab_size  # (B, T)
    start, best, rounds = time.perf_counter(), math.inf, 0
    while rounds < MIN_LAYER_ROUNDS or time.perf_counter() - start < MEASURE_SECONDS:
        begun = clock()
        with autocast("cpu", dtype):
            logits = model.logits(model(ids).hidden)  # (B, T, V)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        best = min(best, clock() - begun)
        rounds += 1
    return {dtype: best / (ids.numel() * config.layers)}


PROC_STAT = Path("/proc/stat")
LOAD_AVERAGES = getattr(os, "getloadavg", None)  # Windows has none
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; user includes the time of guests
MIN_LOAD = 0.25  # cores; measured on two idle cores: up to 0.06, beside a process at nice 19: 0.3 and more
FIRST_SECONDS, LATER_SECONDS = 10.0, 60.0  # between readings during training, before and after the first note
MIN_CHANGE = 0.5  # cores, or this fraction of the last load: a smaller change is not worth another note


class LoadMeter:
    """Measures how many cores other processes use, from one reading to the next.

    On Linux, it compares the busy time of the cores that this process may use, steal included, with the processor time
    of this process. On other systems, it takes the load average, which lags by a minute, in place of the busy time.

    cores: number of cores that this process might use at the beginning; training may keep its threads on some of them
    """

    def __init__(
        self,
        processes: int = 1,
        stat: Path = PROC_STAT,
        now: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = time.process_time,
        average: Callable[[], tuple[float, float, float]] | None = LOAD_AVERAGES,
    ) -> None:
        """Begin to measure. processes: number of processes on this machine that work like this one. stat: the file with
        the busy times. now, own: clocks of the time and of the processor time of this process. average: the load
        averages of the system; `None` if it has none
        """
        self._processes, self._stat, self._now, self._own, self._average = processes, stat, now, own, average
        self.cores = usable_cores()
        self._core_ids = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._last = self._times()

    def read(self) -> float | None:
        """The cores that other processes used on average since the last reading; `None` if the system does not tell.

        Busy time is counted in steps of 10 ms per core: after a second, the result is right to a few hundredths.
        """
        (begun, busy_before, own_before), self._last = self._last, self._times()
        now, busy, own = self._last
        seconds = max(now - begun, 1e-3)
        if busy is not None and busy_before is not None:
            used = (busy - busy_before) / seconds
        elif self._average is not None:
            used = self._average()[0]
        else:
            return None
        return min(max(used - self._processes * (own - own_before) / seconds, 0.0), float(self.cores))

    def _times(self) -> tuple[float, float | None, float]:
        """Three times in seconds: now, busy time of the cores, and processor time of this process."""
        return self._now(), _busy_seconds(self._core_ids, self._stat), self._own()


def _busy_seconds(cores: Iterable[int], stat: Path) -> float | None:
    """The time that the cores have been busy, for any process; `None` if `stat`, as /proc/stat, cannot be read."""
    try:
        rows = (line.split() for line in stat.read_text(encoding="ascii").splitlines() if line[:3] == "cpu")
        times = {name.removeprefix("cpu"): fields for name, *fields in rows}
        ticks = sum(int(times[str(core)][field]) for core in cores for field in BUSY_FIELDS)
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, LookupError, AttributeError):
        return None


def slows_training(others: float, threads: int, cores: int) -> bool:
    """Whether other processes that use `others` of the cores slow training with `threads` threads.

    They do if they need cores that the threads need. A core may be half of a physical one, whose other half then slows.
    """
    return others >= max(MIN_LOAD, 0.75 * cores - threads)


class LoadNotes:
    """Says during training that other processes slow it, with the time or steps to expect, and says when that changes.

    note: receives the messages. threads: of training. timed: whether the budget is a time.
    planned_steps: of an idle machine, for a time budget; `None` if not known
    """

    def __init__(
        self,
        note: Callable[[str], None],
        meter: LoadMeter,
        *,
        threads: int,
        timed: bool,
        planned_steps: int | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note, self._meter, self._now = note, meter, now
        self._threads, self._timed, self._planned_steps = threads, timed, planned_steps
        self._said = 0.0  # cores, of the last note
        self._last: tuple[float, int, float] | None = None  # time, step and progress at the last reading

    def step(self, step: int, progress: float) -> None:
        """Take the step and the used fraction of the budget, after each step."""
        now = self._now()
        if self._last is None:
            self._meter.read()
            self._last = now, step, progress
        begun, first_step, first_progress = self._last
        seconds, used = now - begun, progress - first_progress
        if seconds < (LATER_SECONDS if self._said else FIRST_SECONDS) or used <= 0:
            return
        others, self._last = self._meter.read(), (now, step, progress)
        if others is None:
            return
        ended = self._said > 0 and others < MIN_LOAD / 2
        if self._said and not ended:
            is_news = abs(others - self._said) >= MIN_CHANGE * max(1.0, self._said)
        else:
            is_news = ended or slows_training(others, self._threads, self._meter.cores)
        if not is_news:
            return
        self._said = 0.0 if ended else others
        speed = f"at the speed of the last {format_duration(seconds)}"
        if self._timed:
            steps = step + math.floor((step - first_step) / used * (1 - progress))
            planned = f"; {self._planned_steps:,} were planned" if self._planned_steps else ""
            expected = f"{speed}, about {counted(steps, 'step')} fit into the time{planned}."
        else:
            expected = f"{speed}, it ends in about {format_duration(seconds / used * (1 - progress))}."
        if ended:
            self._note(f"Other processes no longer slow training: {expected}")
        else:
            self._note(
                f"Other processes take {others:.1f} of the {counted(self._meter.cores, 'core')}, which slows training: "
                f"{expected} The plan is for an idle machine. The command top shows those processes."
            )
