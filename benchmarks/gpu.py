"""GPU utilisation: training and decoding as fractions of the device's peak rates, and the loss after 30 seconds.

    python benchmarks/gpu.py --text tinyshakespeare.txt

The peak rates are measured first: FLOP/s of a product of large matrices, and bytes per second of a memory copy. A
training step is that of a model of 124 M parameters at a context of 1,024, with and without compiled layers; its FLOPs
are counted as in Kaplan et al. 2020, but half for attention, since it is causal. Decoding is one stream of a model of
1.3 billion parameters, all of which are read once per token. With --text, the second table shows the result of
`tinylm train TEXT --time 30s`.

The number format is the one that tinylm chooses for the device: bf16 on most GPUs. Runs on any device; --small uses
tiny models, for a machine without a GPU.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from learning import learn
from measure import describe_machine, table
from training_step import random_batch, tinylm_step

from tinylm.console import Console
from tinylm.device import DTYPES, choose_device, describe_device
from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import generate
from tinylm.generation.sampler import Sampler
from tinylm.generation.thread_policy import ThreadPolicyDecoder
from tinylm.kernels.thread_latency import measure_thread_latency
from tinylm.machine import choose_machine
from tinylm.model.build import build_model
from tinylm.model_config import ModelConfig
from tinylm.planning.cost import training_flops
from tinylm.presets import make_model_config


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured workloads.

    square: rows and columns of the multiplied matrices. bytes: copied. training, decoding: models. rows: of a batch.
    tokens: decoded.
    """

    square: int
    bytes: int
    training: ModelConfig
    rows: int
    decoding: ModelConfig
    tokens: int


def sizes(small: bool) -> Sizes:
    def shape(layers: int, width: int, context: int) -> ModelConfig:
        heads, vocabulary = max(1, width // 64), 128 if small else 50_304
        choices = {"layers": layers, "width": width, "heads": heads, "context": context, "vocab_size": vocabulary}
        return make_model_config(preset="gpt2", size="small", **choices)

    if small:
        return Sizes(256, 2**24, shape(1, 64, 32), 2, shape(1, 64, 32), 8)
    return Sizes(8192, 2**32, shape(12, 768, 1024), 16, shape(24, 2048, 1024), 256)


def seconds_of(work: Callable[[], object], device: str, rounds: int) -> float:
    """The median time of `rounds` calls after two warm-up calls, each with the device synchronised."""

    def timed() -> float:
        started = time.perf_counter()
        work()
        if device != "cpu":
            getattr(torch, device).synchronize()
        return time.perf_counter() - started

    return statistics.median([timed() for _ in range(2 + rounds)][2:])


def device_rates(device: str, dtype: str, chosen: Sizes, rounds: int) -> tuple[float, float]:
    """FLOP/s of a matrix product, and bytes per second, read and written, of a memory copy."""
    a, b = (torch.randn(chosen.square, chosen.square, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    flops = 2 * chosen.square**3 / seconds_of(lambda: a @ b, device, rounds)
    source = torch.zeros(chosen.bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return flops, 2 * chosen.bytes / seconds_of(lambda: target.copy_(source), device, rounds)


def training_row(device: str, dtype: str, chosen: Sizes, compiled: bool, flops: float, rounds: int) -> list[str]:
    model = build_model(chosen.training).to(device)
    if compiled:
        for layer in model.layers:
            layer.compile()
    batch = random_batch(chosen.training, chosen.rows).to(torch.device(device))
    speed = batch.ids.numel() / seconds_of(tinylm_step(model, batch, dtype), device, rounds)
    used = speed * training_flops(chosen.training)
    return [f"training, {dtype}{', compiled' if compiled else ''}", f"{speed:,.0f}", f"{used / flops:.1%}", "50 %"]


def decoding_row(device: str, dtype: str, chosen: Sizes, bandwidth: float, rounds: int) -> list[str]:
    model = build_model(chosen.decoding).eval().to(device, DTYPES[dtype])
    # Only one row of the position embedding is read; the tied embedding is read in full as the output layer.
    bytes_read = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "position" not in name)
    fuse_model(model)

    def decode() -> None:
        sampler = Sampler(SamplingConfig(temperature=0.0), 0, 1, chosen.decoding.vocab_size)
        for _ in generate(ThreadPolicyDecoder(model, measure_thread_latency()), [[0]], sampler, chosen.tokens):
            pass

    speed = chosen.tokens / seconds_of(decode, device, rounds)
    return [f"decoding one stream, {dtype}", f"{speed:,.1f}", f"{speed * bytes_read / bandwidth:.1%}", "70 %"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="corpus to train on for --time")
    parser.add_argument("--time", default="30s", help="time of the whole command (default: 30s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--device", default="auto", help="default: auto")
    parser.add_argument("--small", action="store_true", help="tiny models, without compiled layers")
    options = parser.parse_args(arguments)
    device = choose_device(options.device).value
    dtype = choose_machine(device, "auto", Console()).dtype
    chosen = sizes(options.small)
    flops, bandwidth = device_rates(device, dtype, chosen, options.rounds)
    print(f"{describe_machine(['torch'])}; {describe_device(device)}")
    print(f"{flops / 1e12:.3g} TFLOP/s in {dtype}, {bandwidth / 1e9:,.0f} GB/s\n")
    variants = (False,) if options.small else (False, True)
    rows = [training_row(device, dtype, chosen, compiled, flops, options.rounds) for compiled in variants]
    rows.append(decoding_row(device, dtype, chosen, bandwidth, options.rounds))
    print(table(["work", "tokens/s", "of the device's peak rate", "goal"], rows))
    if options.text is not None:
        with tempfile.TemporaryDirectory() as home:
            learned = learn(options.text, ["--time", options.time, "--device", device], 0, Path(home) / "run")
        row = [options.time, f"{learned.seconds:.1f}", f"{learned.loss:.4f}", "1.4697"]
        print(f"\n{table(['--time', 'seconds of the whole command', 'nats per token', 'goal'], [row])}")


if __name__ == "__main__":
    main()
