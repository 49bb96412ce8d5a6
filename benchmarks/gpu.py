"""What a GPU reaches: utilisation in training, and bandwidth in decoding.

    python benchmarks/gpu.py --nanogpt nanoGPT/model.py
    python benchmarks/gpu.py --parts decoding

Each part runs in a process with a time limit, and both end in five minutes:

- training: a step of a model of 124 M parameters at a context of 1,024, and of one of 3 M at a context of 512, with and
  without CUDA graphs, compiled blocks and a compiled model, as a share of the rate of a large matrix product and of the
  rate that the vendor specifies. FLOPs are counted as in Kaplan et al. 2020, but half for causal attention. With
  --nanogpt, nanoGPT's model.py as well, compiled as a whole, with fused AdamW.
- decoding: one stream and eight of a model of 1.3 billion parameters and of one of 10 million, one operation at a time,
  with CUDA graphs, which is what `tinylm sample` does, and with these and compiled blocks. All parameters are read once
  per token, as a share of the rate of a memory copy and of the specified rate.

The number format is the one that tinylm chooses for the device: bf16 on most GPUs. Runs on any device; --small uses
tiny models, for a machine without a GPU. Fine-tuning and learning on a GPU are measured by `finetuning.py --shape 1b
--batch-size 8 --context 1024` and by `learning.py`.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from measure import describe_machine, process_tree, table
from training import build_nanogpt, peer_step, random_batch, tinylm_step

from tinylm.commands.console import Console
from tinylm.config.model import ModelConfig
from tinylm.config.presets import make_model_config
from tinylm.generation.engine import Engine
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.graph_engine import GraphEngine
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.torch_engine import TorchEngine
from tinylm.kernels.graphs import capture
from tinylm.machine.device import DTYPES, choose_device, describe_device
from tinylm.machine.measure import choose_machine
from tinylm.objectives.loss import next_token
from tinylm.planning.plan_request import training_flops
from tinylm.text.batches import Batch
from tinylm.training.execution import capture_graphs, compile_layers
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

STEPS = 10  # of training, per measured time
# FLOP/s of matrix products in bf16 and bytes per second of the memory, by the name that torch gives the device, as its
# vendor specifies them. H100 80GB HBM3 is from NVIDIA's data sheet, which prints twice these FLOP/s, for sparse
# matrices. The other rows were not compared with a data sheet: check them before quoting shares.
SPECIFIED = {
    "NVIDIA A100-SXM4-40GB": (312e12, 1.555e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
    "NVIDIA H100 PCIe": (756e12, 2.0e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H200": (989e12, 4.8e12),
}
Row = list[str]  # work, result, limit and share of the limit that was measured, and of the specified one


class Sizes(NamedTuple):
    """Sizes: rows of square matrices, bytes copied, tokens decoded, models with rows of their batches, and the models
    that decode.
    """

    square: int
    bytes: int
    tokens: int
    trained: tuple[tuple[ModelConfig, int], ...]
    decoding: tuple[ModelConfig, ...]


def sizes(small: bool) -> Sizes:
    """The sizes with or without --small."""

    def shape(preset: str, layers: int, width: int, context: int, vocabulary: int = 50_304) -> ModelConfig:
        choices = {"layers": layers, "width": width, "heads": max(1, width // 64), "context": context}
        return make_model_config(preset=preset, size="small", **choices, vocab_size=128 if small else vocabulary)

    if small:
        gpt2 = shape("gpt2", 1, 64, 32)
        return Sizes(256, 2**24, 8, ((gpt2, 2),), (gpt2,))
    trained = (shape("gpt2", 12, 768, 1024), 16), (shape("gpt2", 4, 256, 512, 65), 4)
    decoding = shape("modern", 6, 320, 1024, 8192), shape("gpt2", 24, 2048, 1024)
    return Sizes(8192, 2**32, 256, trained, decoding)


def seconds_of(work: Callable[[], object], device: str, rounds: int) -> float:
    """The median time of `rounds` calls after two warm-up calls, each with the device synchronised."""

    def timed() -> float:
        started = time.perf_counter()
        work()
        if device != "cpu":
            getattr(torch, device).synchronize()
        return time.perf_counter() - started

    return statistics.median([timed() for _ in range(2 + rounds)][2:])


def against(work: str, result: str, rate: float, limits: Sequence[float | None], unit: str) -> Row:
    """A row. rate: per second. limits: what a large operation reached, and what the vendor specifies, if known."""
    shares = ["-" if limit is None else f"{rate / limit:.1%} of {limit / 1e12:.3g} T{unit}/s" for limit in limits]
    return [work, result, *shares]


def specified(device: str, which: int) -> float | None:
    rates = SPECIFIED.get(torch.cuda.get_device_name()) if device == "cuda" else None
    return None if rates is None else rates[which]


def training(options: argparse.Namespace, device: str, dtype: str) -> Iterator[Row]:
    """The rows of `training`."""
    chosen = sizes(options.small)
    a, b = (torch.randn(chosen.square, chosen.square, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    measured = 2 * chosen.square**3 / seconds_of(lambda: a @ b, device, options.rounds)
    limits = (measured, specified(device, 0) if dtype != "fp32" else None)
    yield against(f"product of matrices, {dtype}", "", measured, limits, "FLOP")
    for config, batch_rows in chosen.trained:
        batch = random_batch(config, batch_rows)
        for name, steps in training_variants(options, config, batch, device, dtype):
            speed = STEPS * batch.ids.numel() / seconds_of(steps, device, options.rounds)
            work = f"training {config.layers}x{config.width}, {dtype}: {name}"
            yield against(work, f"{speed:,.0f} tokens/s", speed * training_flops(config), limits, "FLOP")


def training_variants(
    options: argparse.Namespace, config: ModelConfig, batch: Batch, device: str, dtype: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name, and a function that trains a model for STEPS steps."""

    def tinylm(graphs: bool, compiled: str = "") -> Callable[[], object]:
        torch.compiler.reset()  # after a second shape, code would be compiled for any size
        model = build_model(config).to(device).train()
        if compiled and not compile_layers(model, [batch], next_token, dtype, print, whole=compiled == "whole"):
            raise SystemExit("The model was not compiled.")
        graphed = capture_graphs(model, [batch], dtype, print) if graphs else None
        if graphs and graphed is None:
            raise SystemExit("No CUDA graphs were captured.")
        return tinylm_step(model, batch, dtype, STEPS, graphed)

    yield "tinylm", tinylm(graphs=False)
    if device == "cuda" and not options.small:
        yield "tinylm, CUDA graphs", tinylm(graphs=True)
        yield "tinylm, CUDA graphs, compiled blocks", tinylm(graphs=True, compiled="blocks")
        yield "tinylm, CUDA graphs, compiled as a whole", tinylm(graphs=True, compiled="whole")
    if options.nanogpt is not None:
        nano = build_nanogpt(options.nanogpt, config).to(device)
        on_device = batch.to(torch.device(device))
        torch.compiler.reset()
        if not options.small:
            nano.compile()
        step = peer_step(nano, lambda: nano(on_device.ids, on_device.targets)[1], dtype, fused=True, device=device)
        yield f"nanoGPT{'' if options.small else ', compiled'}", lambda: [step() for _ in range(STEPS)]


def decoding(options: argparse.Namespace, device: str, dtype: str) -> Iterator[Row]:
    """The rows of `decoding`."""
    chosen = sizes(options.small)
    source = torch.zeros(chosen.bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    measured = 2 * chosen.bytes / seconds_of(lambda: target.copy_(source), device, options.rounds)
    limits = (measured, specified(device, 1))
    yield against("memory copy", "", measured, limits, "B")
    for config in chosen.decoding:
        with torch.device(device):
            model = cast(Decoder, build_model(config)).eval().to(device, DTYPES[dtype])
        # Only one row of the position embedding is read; the tied embedding is read in full as the output layer.
        bytes_read = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "position" not in name)
        for name, engine, streams in decoding_variants(model, config, device):
            wanted = GenerationConfig(max_tokens=chosen.tokens, temperature=0.8, top_k=50, num_samples=streams)

            def decode(engine: Engine = engine, wanted: GenerationConfig = wanted) -> None:
                for _ in engine.generate([EncodedPrompt("", [0], [0])] * wanted.num_samples, wanted, 0):
                    pass

            steps = chosen.tokens / seconds_of(decode, device, 1 if name == "plain" else options.rounds)
            work = f"decoding {config.layers}x{config.width}, {streams} at a time: {name}"
            yield against(work, f"{streams * steps:,.1f} tokens/s", steps * bytes_read, limits, "B")


def decoding_variants(model: Decoder, config: ModelConfig, device: str) -> Iterator[tuple[str, Engine, int]]:
    """Name, engine, and number of streams."""
    tokenizer: Any = SimpleNamespace(vocab_size=config.vocab_size, start_id=None)  # what engines use of a tokenizer
    yield "plain", TorchEngine(model, tokenizer), 1
    graph = "CUDA graph" if device == "cuda" else "the step without a graph"
    for streams in (1, 8):
        yield graph, GraphEngine(model, tokenizer, capture if device == "cuda" else lambda step: step), streams
    if device == "cuda":
        for layer in model.layers:
            layer.compile(dynamic=False)
        yield "CUDA graph, compiled blocks", GraphEngine(model, tokenizer, capture), 1


# Each part: a function that yields its rows, and its time limit in seconds
PARTS: dict[str, tuple[Callable[[argparse.Namespace, str, str], Iterator[Row]], int]] = {
    "training": (training, 180),
    "decoding": (decoding, 90),
}


def run(part: str, options: argparse.Namespace, device: str, rows: Any) -> None:
    """In a process of its own: measure a part, and send each row when it is known."""
    for row in PARTS[part][0](options, device, choose_machine(device, "auto", Console()).dtype):
        rows.put(row)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), metavar="LIST", help=f"default: {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--device", default="auto", help="default: auto")
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="the model.py of a copy of nanoGPT")
    parser.add_argument("--small", action="store_true", help="tiny models, without compiled layers")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    device = choose_device(options.device).value
    context, rows, failed = multiprocessing.get_context("spawn"), [], []
    with tempfile.TemporaryDirectory() as home:
        os.environ["TMPDIR"] = home  # of all parts, some of which are killed
        for part in parts:
            answers = context.SimpleQueue()
            process = context.Process(target=run, args=(part, options, device, answers))
            process.start()
            process.join(PARTS[part][1])
            for pid in list(process_tree(cast(int, process.pid))) if process.is_alive() else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.join()
            while not answers.empty():
                rows.append(answers.get())
            if process.exitcode != 0:
                failed.append(part)
    print(f"{describe_machine(['torch'])}\n{describe_device(device)}\n")
    print(table(["work", "result", "of the measured limit", "of the specified limit"], rows))
    if failed:
        raise SystemExit(f"failed, or not finished in time: {', '.join(failed)}")


if __name__ == "__main__":
    main()
