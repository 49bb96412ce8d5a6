"""What a GPU reaches: utilisation, decoding bandwidth, time to a loss, the largest batch, and equality with the CPU.

    python benchmarks/gpu.py --text tinyshakespeare.txt
    python benchmarks/gpu.py --parts training,decoding

Each part runs in a process with a time limit, and all of them end in 9 minutes:

- training: a step of a model of 124 M parameters at a context of 1,024, and of one of 3 M at a context of 512, with and
  without CUDA graphs and compiled layers, as a share of the rate of a large matrix product and of the rate that the
  vendor specifies (gpu_rates.py). FLOPs are counted as in Kaplan et al. 2020, but half for attention, since it is
  causal. With --nanogpt, nanoGPT's model.py as well, compiled as a whole, with fused AdamW.
- decoding: one stream of a model of 1.3 billion parameters, all of which are read once per token, as a share of the
  rate of a memory copy and of the specified rate.
- learning: `tinylm train TEXT --time T`, with increasing T, until a validation loss of the run is at most --loss, and
  the time from the start of the command to that evaluation. The default loss is nanoGPT's on tinyshakespeare, in nats
  per character. Without --text, data/corpus.txt is trained on for the shortest time, with no loss to reach.
- batch: the number of rows is doubled until memory runs out in a training step of the model of 124 M parameters.
- correctness: logits and gradients in fp32 and bf16, against those of the same model and batch on the CPU in fp32.

The number format is the one that tinylm chooses for the device: bf16 on most GPUs. Runs on any device; --small uses
tiny models, for a machine without a GPU.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_correctness import BOUNDS, differences
from gpu_rates import peak_bandwidth, peak_flops, seconds_of
from measure import describe_machine, run_tinylm, table
from peer_step import build_nanogpt, peer_step
from training_step import random_batch, tinylm_step

from tinylm.console import Console
from tinylm.device import DTYPES, choose_device, describe_device
from tinylm.duration import parse_duration
from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import generate
from tinylm.generation.sampler import Sampler
from tinylm.generation.thread_policy import ThreadPolicyDecoder
from tinylm.kernels.thread_latency import measure_thread_latency
from tinylm.machine import choose_machine
from tinylm.model.build import build_model
from tinylm.model_config import ModelConfig
from tinylm.objectives.loss import next_token
from tinylm.planning.cost import training_flops
from tinylm.presets import make_model_config
from tinylm.text.batches import Batch
from tinylm.training.compile_layers import compile_layers
from tinylm.training.graphed_model import capture_graphs

CORPUS = Path(__file__).parent.parent / "data" / "corpus.txt"
STEPS = 10  # of training, per measured time


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured workloads.

    square: rows and columns of the multiplied matrices. bytes: copied. most_rows: of the largest batch that is tried.
    tokens: decoded. trained: models with the rows of a batch. decoding, compared: models; `compared` is for
    `correctness`.
    """

    square: int
    bytes: int
    most_rows: int
    tokens: int
    trained: tuple[tuple[ModelConfig, int], ...]
    decoding: ModelConfig
    compared: ModelConfig


def sizes(small: bool) -> Sizes:
    """The sizes with or without --small."""

    def shape(preset: str, layers: int, width: int, context: int, vocabulary: int = 50_304) -> ModelConfig:
        choices = {"layers": layers, "width": width, "heads": max(1, width // 64), "context": context}
        return make_model_config(preset=preset, size="small", **choices, vocab_size=128 if small else vocabulary)

    if small:
        gpt2, modern = shape("gpt2", 1, 64, 32), shape("modern", 1, 64, 32)
        return Sizes(256, 2**24, 8, 8, ((gpt2, 2),), gpt2, modern)
    trained = (shape("gpt2", 12, 768, 1024), 16), (shape("gpt2", 4, 256, 512, 65), 4)
    return Sizes(8192, 2**32, 4096, 256, trained, shape("gpt2", 24, 2048, 1024), shape("modern", 12, 768, 256))


def training(options: argparse.Namespace, device: str, dtype: str) -> str:
    """The table of `training`."""
    chosen = sizes(options.small)
    peak = peak_flops(device, dtype, chosen.square, options.rounds)
    rows = [[f"product of matrices, {dtype}", "", *peak.shares(peak.measured)]]
    for config, batch_rows in chosen.trained:
        batch = random_batch(config, batch_rows)
        for name, steps in training_variants(options, config, batch, device, dtype):
            speed = STEPS * batch.ids.numel() / seconds_of(steps, device, options.rounds)
            shares = peak.shares(speed * training_flops(config))
            rows.append([f"{config.layers}x{config.width}, {dtype}: {name}", f"{speed:,.0f}", *shares])
    return table(["work", "tokens/s", *peak.header()], rows)


def training_variants(
    options: argparse.Namespace, config: ModelConfig, batch: Batch, device: str, dtype: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name, and a function that trains a model for STEPS steps."""

    def tinylm(compiled: bool, graphs: bool) -> Callable[[], object]:
        model = build_model(config).to(device).train()
        if compiled and not compile_layers(model, [batch], next_token, dtype, print):
            raise SystemExit("The layers were not compiled.")
        graphed = capture_graphs(model, [batch], dtype, print) if graphs else None
        if graphs and graphed is None:
            raise SystemExit("No CUDA graphs were captured.")
        return tinylm_step(model, batch, dtype, STEPS, graphed)

    yield "tinylm", tinylm(compiled=False, graphs=False)
    if device == "cuda" and not options.small:
        yield "tinylm, CUDA graphs", tinylm(compiled=False, graphs=True)
        yield "tinylm, CUDA graphs, compiled", tinylm(compiled=True, graphs=True)
    if options.nanogpt is not None:
        nano = build_nanogpt(options.nanogpt, config).to(device)
        on_device = batch.to(torch.device(device))
        if not options.small:
            nano.compile()
        step = peer_step(nano, lambda: nano(on_device.ids, on_device.targets)[1], dtype, fused=True, device=device)
        yield f"nanoGPT{'' if options.small else ', compiled'}", lambda: [step() for _ in range(STEPS)]


def decoding(options: argparse.Namespace, device: str, dtype: str) -> str:
    """The table of `decoding`."""
    chosen = sizes(options.small)
    peak = peak_bandwidth(device, chosen.bytes, options.rounds)
    model = build_model(chosen.decoding).eval().to(device, DTYPES[dtype])
    # Only one row of the position embedding is read; the tied embedding is read in full as the output layer.
    bytes_read = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "position" not in name)
    fuse_model(model)

    def decode() -> None:
        sampler = Sampler(SamplingConfig(temperature=0.0), 0, 1, chosen.decoding.vocab_size)
        for _ in generate(ThreadPolicyDecoder(model, measure_thread_latency()), [[0]], sampler, chosen.tokens):
            pass

    speed = chosen.tokens / seconds_of(decode, device, options.rounds)
    copied = ["memory copy", "", *peak.shares(peak.measured), ""]
    decoded = [f"decoding one stream, {dtype}", f"{speed:,.1f}", *peak.shares(speed * bytes_read), "70 %"]
    return table(["work", "tokens/s", *peak.header(), "goal"], [copied, decoded])


def learning(options: argparse.Namespace, device: str, dtype: str) -> str:
    """The table of `learning`. Each time is a new run, since the learning-rate schedule ends with the budget."""
    goal = None if options.text is None else options.loss
    text = options.text or CORPUS
    ends = time.monotonic() + PARTS["learning"].limit - 10  # the command is killed before the part is
    rows = []
    for budget in sorted(options.times, key=parse_duration)[: None if goal is not None else 1]:
        if rows and parse_duration(budget) + 10 > ends - time.monotonic():
            break
        with tempfile.TemporaryDirectory() as home:
            words = ["train", str(text), "--tokenizer", "char", "--time", budget, "--device", device]
            words += ["--out", f"{home}/run", "--quiet", "--json"]
            records = [json.loads(line) for line in run_tinylm(words, limit=ends - time.monotonic()).splitlines()]
        best = min(record["val_loss"] for record in evaluations(records))
        reached = seconds_to(records, goal)
        found = "-" if goal is None else "not reached" if reached is None else f"{reached:.1f}"
        rows.append([f"{text.name}, {budget}", f"{best:.4f}", "-" if goal is None else f"{goal:g}", found])
        if reached is not None:
            break
    return table(["text, time of the command", "smallest validation loss", "goal", "seconds to the goal"], rows)


def evaluations(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of `tinylm train --json` that are evaluations."""
    return [record for record in records if "val_loss" in record and "run" not in record]


def seconds_to(records: Sequence[Mapping[str, Any]], goal: float | None) -> float | None:
    """The time of the first evaluation whose loss is at most `goal`; `None` without one or without a goal."""
    found = (record["seconds"] for record in evaluations(records) if goal is not None and record["val_loss"] <= goal)
    return next(found, None)


def batch(options: argparse.Namespace, device: str, dtype: str) -> str:
    """The table of `batch`."""
    chosen = sizes(options.small)
    if device == "cpu" and not options.small:
        return "batch: not measured on a CPU, where other processes are killed when memory runs out"
    trained, _ = chosen.trained[0]
    rows, most = largest_batch(trained, device, dtype, chosen.most_rows), chosen.most_rows
    more = f"{2 * rows} were not tried" if rows == most else f"{2 * rows} do not fit"
    cells = [f"training, {dtype}", f"{rows:,}", more, f"{rows * trained.context:,}"]
    return table(["largest batch", "rows", "more rows", "tokens"], [cells])


def largest_batch(config: ModelConfig, device: str, dtype: str, most: int) -> int:
    """The largest power of two, up to `most`, of rows with which a step is not repeated in smaller micro-batches."""
    model = build_model(config).to(device)
    rows = 1
    while rows <= most and tinylm_step(model, random_batch(config, rows), dtype)() == rows:
        rows *= 2
    return rows // 2


def correctness(options: argparse.Namespace, device: str, dtype: str) -> str:
    """The table of `correctness`. Raises SystemExit if a difference exceeds its bound."""
    rows, wrong = [], []
    for number_format, bound in BOUNDS.items():
        found = differences(sizes(options.small).compared, 2, device, number_format)
        cells = [f"{found.logits:.1e}", f"{found.gradient:.1e}", found.parameter, f"{bound:g}"]
        rows.append([number_format, *cells])
        if not (found.logits <= bound and found.gradient <= bound):
            wrong.append(number_format)
    found_table = table(["correctness", "logits", "largest of a gradient", "its parameter", "bound"], rows)
    if wrong:
        raise SystemExit(f"{found_table}\nThe results in {' and '.join(wrong)} differ from those of the CPU.")
    return found_table


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: a function that returns its table, and its time limit in seconds."""

    measure: Callable[[argparse.Namespace, str, str], str]
    limit: float


PARTS = {
    "training": Part(training, 180),
    "decoding": Part(decoding, 60),
    "learning": Part(learning, 150),
    "batch": Part(batch, 60),
    "correctness": Part(correctness, 60),
}


def run(part: str, options: argparse.Namespace) -> None:
    """Measure a part and print its table."""
    device = choose_device(options.device).value
    dtype = choose_machine(device, "auto", Console()).dtype
    print(f"{describe_device(device)}\n\n{PARTS[part].measure(options, device, dtype)}\n", flush=True)


def run_in_time(part: str, options: argparse.Namespace) -> bool:
    """Run a part in a process of its own, which is killed at its time limit. Returns whether it succeeded."""
    process = multiprocessing.get_context("spawn").Process(target=run, args=(part, options))
    process.start()
    process.join(PARTS[part].limit)
    process.kill()
    process.join()
    return process.exitcode == 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="LIST", help=f"default: {','.join(PARTS)}")
    parser.add_argument("--text", type=Path, help="tinyshakespeare, for `learning`")
    parser.add_argument("--times", nargs="+", default=["15s", "30s", "60s"], help="default: 15s 30s 60s")
    parser.add_argument("--loss", type=float, default=1.4697, help="in nats per character (default: 1.4697)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--device", default="auto", help="default: auto")
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="the model.py of a copy of nanoGPT")
    parser.add_argument("--small", action="store_true", help="tiny models, without compiled layers")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    print(f"{describe_machine(['torch'])}\n", flush=True)
    if failed := [part for part in parts if not run_in_time(part, options)]:
        raise SystemExit(f"failed, or not finished in time: {', '.join(failed)}")


if __name__ == "__main__":
    main()
