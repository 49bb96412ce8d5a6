"""The machine of a training run: device, number format, memory, and speed of matrix products and of layers."""

import functools
import math
import sys
import time
from dataclasses import dataclass
from typing import Self

import torch

from tinylm.config.model import ModelConfig
from tinylm.config.presets import make_model_config
from tinylm.config.run import RuntimeConfig
from tinylm.kernels import onednn
from tinylm.kernels.short_attention import max_unfused_keys
from tinylm.machine.device import (
    DTYPES,
    autocast,
    can_compile,
    choose_device,
    choose_training_dtype,
    describe_device,
    free_memory,
    identify_device,
    must_compare_bf16,
)
from tinylm.reporter import Reporter
from tinylm.system.machine_profile import Measurement
from tinylm.transformer.build import build_model

COMPARED_DTYPES = ("fp32", "bf16")
RATE_BOUNDS = (1e6, 1e18)  # FLOP/s
LAYER_BOUNDS = (1e-9, 1.0)  # seconds per token and layer
MEASURE_SECONDS, MIN_ROUNDS = 1.0, 5  # of a measurement; both are minima
PROBE_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device and number format of a training run, and the properties of the machine that a plan depends on.

    threads: number of threads that torch uses on the CPU
    matmul_rate: FLOP/s of matrix multiplication in `dtype`; 0 if a run has not recorded it
    layer_seconds: seconds per token and layer of the forward and backward pass of the model of `probe_config` in
        `dtype`, in processor time of one thread; `None` if not measured, as on a GPU
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

    @functools.cache
    def rates(dtypes: tuple[str, ...]) -> dict[str, float]:
        entry = matmul_rates_entry(chosen_device.value, dtypes)
        return entry.get(lambda: measure_matmul_rates(chosen_device.value, dtypes), reporter)

    def rate(dtype: str) -> float:
        compared = dtype in COMPARED_DTYPES and must_compare_bf16(chosen_device.value)
        return rates(COMPARED_DTYPES if compared else (dtype,))[dtype]

    chosen_dtype = choose_training_dtype(dtype, chosen_device.value, rate)
    return Machine(
        device=chosen_device.value,
        dtype=chosen_dtype.value,
        threads=torch.get_num_threads(),
        matmul_rate=round_measured(rate(chosen_dtype.value)),
        layer_seconds=_layer_seconds(chosen_device.value, chosen_dtype.value),
        free_memory=free_memory(chosen_device.value),
        compiled_is_faster=compiled_is_faster(chosen_device.value, chosen_dtype.value),
        max_unfused_keys=max_unfused_keys(chosen_device.value, chosen_dtype.value),
        reasons=f"{describe_device(chosen_device.value)}: {chosen_device.reason}; "
        f"{chosen_dtype.value}: {chosen_dtype.reason}",
    )


def compiled_is_faster(device: str, dtype: str) -> bool:
    """Whether torch.compile is available and makes a training step faster.

    In fp32 on a CPU, compiled code uses MKL, which is slower than oneDNN on some processors (decision 013).
    """
    return can_compile(device) and not ((device, dtype) == ("cpu", "fp32") and onednn.is_preferred())


def round_measured(number: float) -> float:
    """The nearest power of 2^(1/4), to four digits, so that repeated measurements usually give the same number."""
    return float(f"{2 ** (round(4 * math.log2(number)) / 4):.4g}")


def matmul_rates_entry(device: str, dtypes: tuple[str, ...]) -> Measurement:
    """The machine profile's entry for matrix multiplication: FLOP/s by number format."""
    return Measurement("matmul", identify_device(device), dict.fromkeys(dtypes, RATE_BOUNDS))


def measure_matmul_rates(device: str, dtypes: tuple[str, ...]) -> dict[str, float]:
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
            best[dtype] = max(best[dtype], threads * _measure_matmul_rate(device, dtype))
        rounds += 1
    return best


def _clock() -> float:
    """Processor time of this thread in seconds. On Windows wall-clock time: processor time has steps of 16 ms there."""
    return time.perf_counter() if sys.platform == "win32" else time.thread_time()


@torch.no_grad()
def _measure_matmul_rate(device: str, dtype: str) -> float:
    """FLOP/s of a matrix multiplication, timed once; on a CPU, of one thread."""
    rows, width = 2048, 512
    x = torch.ones(rows, width, device=device, dtype=DTYPES[dtype])
    w = torch.ones(width, width, device=device, dtype=DTYPES[dtype])
    on_cpu = device == "cpu"
    clock = _clock if on_cpu else time.perf_counter
    times, threads = 1 if on_cpu else 4, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        onednn.linear(x, w)[0, 0].item()  # `item` waits for the device
        start = clock()
        for _ in range(times):
            y = onednn.linear(x, w)
        y[0, 0].item()
        return times * 2 * rows * width * width / max(clock() - start, 1e-9)
    finally:
        torch.set_num_threads(threads)


def probe_config() -> ModelConfig:
    """The configuration of the decoder whose layers are timed."""
    return make_model_config(vocab_size=64, preset="modern", size="tiny", layers=2, context=256)


def layer_seconds_entry(device: str, dtype: str) -> Measurement:
    """The machine profile's entry for the time per token and layer in a number format."""
    return Measurement("layer", identify_device(device), {dtype: LAYER_BOUNDS})


def _layer_seconds(device: str, dtype: str) -> float | None:
    """Recorded or measured seconds per token and layer; `None` on a GPU. The note for the matmul rate covers both."""
    if device != "cpu":
        return None
    return round_measured(layer_seconds_entry(device, dtype).get(lambda: measure_layer_seconds(dtype))[dtype])


def measure_layer_seconds(dtype: str) -> dict[str, float]:
    """Seconds per token and layer, by number format, of a forward and backward pass of the probe model.

    The shortest of many timings, in processor time of one thread. Embedding, output layer and loss are counted as part
    of the layers.
    """
    config = probe_config()
    with torch.random.fork_rng(devices=()):
        model = build_model(config)
    ids = torch.arange(PROBE_ROWS * config.context).view(PROBE_ROWS, config.context) % config.vocab_size  # (B, T)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start, best, rounds = time.perf_counter(), math.inf, 0
        while rounds < MIN_ROUNDS or time.perf_counter() - start < MEASURE_SECONDS:
            begun = _clock()
            with autocast("cpu", dtype):
                logits = model.logits(model(ids).hidden)  # (B, T, V)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
            loss.backward()
            best = min(best, _clock() - begun)
            rounds += 1
    finally:
        torch.set_num_threads(threads)
    return {dtype: best / (ids.numel() * config.layers)}
