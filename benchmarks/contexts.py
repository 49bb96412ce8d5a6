"""The cost of long contexts: the memory of training, and the time per generated token.

    python benchmarks/contexts.py --rounds 5

The first table measures `tinylm train` with one window per step, in one process per context length: the peak anonymous
memory, and its growth per token since the shorter length. The second measures one model with caches of several lengths:
generating a token reads the weights and the cache, so its time should not grow faster than their size. Linux only.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import add_options, chosen_shape, describe_machine, speedup, table, take_turns
from memory import run_and_measure_memory

from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.thread_policy import ThreadPolicyDecoder
from tinylm.kernels.thread_latency import measure_thread_latency
from tinylm.model.build import build_model
from tinylm.model.kv_cache import KVCache
from tinylm.model_config import ModelConfig

CONTEXTS = (1024, 2048, 4096, 8192, 16_384)
CACHED = (100, 1000, 8000)
TOKENS = 10  # generated per round
SHAPE = ("--layers", "4", "--heads", "4", "--width", "128")
SHORT = ("--batch-size", "1", "--steps", "2", "--compile", "off", "--quiet", "--val-fraction", "0.3")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=8192)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N", help="context lengths of training"
    )
    parser.add_argument("--cached", type=int, nargs="+", default=CACHED, metavar="N", help="tokens in the cache")
    options = parser.parse_args(arguments)
    if max(options.cached) + TOKENS > options.context:
        parser.error(f"--cached and the {TOKENS} generated tokens must fit --context")
    print(f"{describe_machine(['torch'])}\n")
    print(f"{training_memory(options.contexts)}\n")
    print(token_times(chosen_shape(options, "modern"), options.cached, options.rounds, options.warmup))


def training_memory(contexts: Sequence[int]) -> str:
    """The first table: the peak anonymous memory of training by context length."""
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("".join(random.Random(0).choices("abcdefgh \n", k=4 * max(contexts))))
        for context in contexts:
            out = str(Path(folder) / str(context))
            command = ["train", str(corpus), "--out", out, "--context", str(context), *SHAPE, *SHORT]
            _, peaks[context] = run_and_measure_memory([sys.executable, "-m", "tinylm", *command], Path(folder))
    rows, shorter = [], None
    for context, peak in peaks.items():
        growth = "" if shorter is None else f"{(peak - peaks[shorter]) / (context - shorter) / 1e3:.1f}"
        rows.append([f"{context:,}", f"{peak / 1e6:,.0f}", growth])
        shorter = context
    return table(["context", "MB", "KB per additional token"], rows)


def token_times(config: ModelConfig, cached: Sequence[int], rounds: int, warmup: int) -> str:
    """The second table: the time per generated token by the number of cached tokens."""
    model = build_model(config).eval()
    weights = sum(4 * p.numel() for p in model.parameters())
    fuse_model(model)
    names = {f"{tokens:,}": tokens for tokens in cached}
    functions = {
        name: generate_after(ThreadPolicyDecoder(model, measure_thread_latency()), tokens)
        for name, tokens in names.items()
    }
    times = take_turns(functions, rounds, warmup)
    first = next(iter(names))

    def size(tokens: int) -> int:
        return weights + 8 * config.layers * config.kv_heads * config.head_dim * tokens

    rows = []
    for name, tokens in names.items():
        longer, larger = 1 / speedup(times, name, first).median, size(tokens) / size(cached[0])
        milliseconds = statistics.median(times[name]) / TOKENS * 1e3
        rows.append([name, f"{milliseconds:.2f}", f"{longer:.2f}", f"{larger:.2f}", f"{longer / larger:.2f}"])
    return table(["tokens cached", "ms per token", "times the time", "times the bytes", "their ratio"], rows)


def generate_after(model: ThreadPolicyDecoder, tokens: int) -> Callable[[], None]:
    """A function that decodes TOKENS tokens with `tokens` tokens in the cache."""
    cache = model.make_cache(1, tokens + TOKENS)
    for layer in cache:
        assert isinstance(layer, KVCache)
        layer.keys.normal_()
        layer.values.normal_()
    ids = torch.zeros(1, 1, dtype=torch.long)

    @torch.inference_mode()
    def decode() -> None:
        for layer in cache:
            layer.offset = tokens
        for _ in range(TOKENS):
            model.last_logits(ids, cache, 1)

    return decode


if __name__ == "__main__":
    main()
