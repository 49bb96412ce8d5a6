"""Tokens per second of training on the CPU: tinylm's presets gpt2 and modern, transformers' GPT-2, and nanoGPT.

A step is a forward and backward pass, gradient clipping and AdamW on one batch, the same for all: a step of tinylm's
Trainer, and a plain training loop for the peers. tinylm gpt2 and transformers' GPT-2 start with the same weights, and
their logits are compared before the measurement. All models run without dropout, transformers without its cache.

The settings start with the defaults and add one change each, to separate their effects: number format (no
bf16 on processors without instructions for it), optimizer, the peer's GELU, and with --compile compiled layers. (tinylm
compiles by default in long runs, except in fp32 where it uses oneDNN. Compiling happens in the warm-up, so --compile
needs --warmup of at least 1.)
Within a setting the models take turns; the last two columns are ratios of speeds, computed per round. nanoGPT is not a
package: --nanogpt names the model.py of a checkout; it is measured with its own random weights and the settings of the
peer.

The share of the product rate is the time that the FLOPs of a step (6 per matrix parameter and token, and causal
attention) take at the rate of large products in the same format, relative to the time of the step. The products take
turns with the models. --profile prints the operations of a step of tinylm modern by their time.

tinylm trains with freed memory kept (decision 036), and the peers with the thresholds that glibc's malloc reaches by
itself; with --same-allocator the peers keep freed memory as well.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import add_options, chosen_shape, describe_machine, speedup, table, take_turns, tokens_per_second
from peer import FUSED_GELU, PLAIN_GELU, TOLERANCE, build_pair, build_peer
from peer_step import build_nanogpt, peer_step
from torch import Tensor
from training_step import random_batch, tinylm_step
from transformers import GPT2LMHeadModel

from tinylm.console import Console
from tinylm.device import DTYPES
from tinylm.kernels import onednn
from tinylm.kernels.allocator import keep_freed_blocks, set_thresholds
from tinylm.kernels.cpu_features import computes_bf16
from tinylm.machine import choose_machine
from tinylm.model.build import build_model
from tinylm.model_config import ModelConfig
from tinylm.planning.cost import training_flops
from tinylm.text.batches import Batch

PEER = "transformers GPT-2"
NANOGPT = "nanoGPT"
MODERN = "tinylm modern"
PRODUCTS = {"fp32": "matrix products in fp32", "bf16": "matrix products in bf16"}
PRODUCT_ROWS, PRODUCT_WIDTH, PRODUCT_COUNT = 2048, 512, 100


@dataclass(frozen=True)
class Setting:
    """How tinylm and the peer train. dtype, peer_dtype: number formats by tinylm's names."""

    name: str
    dtype: str
    peer_dtype: str
    peer_fused_adamw: bool
    peer_gelu: str = PLAIN_GELU
    compiled: bool = False


def settings(compiled: bool) -> list[Setting]:
    """The settings in the order of the table. compiled: also with compiled layers."""
    auto = choose_machine("cpu", "auto", Console()).dtype
    rows = [
        Setting(f"defaults (tinylm: {auto}, fused AdamW; transformers: fp32, AdamW)", auto, "fp32", False),
        Setting("both fp32, fused AdamW", "fp32", "fp32", True),
    ]
    *wider, narrowest = number_formats()
    if wider:
        rows.append(Setting(f"both {narrowest}, fused AdamW", narrowest, narrowest, True))
    rows.append(Setting(f"both {narrowest}, fused AdamW and GELU", narrowest, narrowest, True, FUSED_GELU))
    if compiled:
        rows.append(Setting("the same, layers compiled", narrowest, narrowest, True, FUSED_GELU, compiled=True))
    return rows


def number_formats() -> list[str]:
    """The measured number formats. Processors without instructions for bf16 would take many minutes per step in it."""
    return ["fp32", "bf16"] if computes_bf16() else ["fp32"]


def peer_loss(peer: GPT2LMHeadModel, batch: Batch) -> Callable[[], Tensor]:
    """A function that computes the mean loss of a batch in nats per token."""
    return lambda: peer(batch.ids, labels=batch.targets, shift_labels=batch.targets, use_cache=False).loss


def after(prepare: Callable[[], object], step: Callable[[], object]) -> Callable[[], object]:
    """A step that calls `prepare` first."""

    def run() -> None:
        prepare()
        step()

    return run


def use_thresholds_of_glibc() -> None:
    """Set the thresholds that glibc reaches by itself after it has freed blocks of 32 MiB, its largest."""
    set_thresholds(map_from=32 << 20, trim_from=64 << 20)


def contestants(
    setting: Setting, gpt2: ModelConfig, modern: ModelConfig, batch: Batch, nanogpt: Path | None, same_allocator: bool
) -> dict[str, Callable[[], object]]:
    """The training steps by name. The models are new in each setting, so that all start untrained and uncompiled."""
    model, _ = build_pair(gpt2)
    peer = build_peer(gpt2, model, setting.peer_gelu)
    modern_model = build_model(modern)
    nano = None if nanogpt is None else build_nanogpt(nanogpt, gpt2)
    if setting.compiled:
        for layer in (*model.layers, *modern_model.layers, *peer.transformer.h, *(nano.transformer.h if nano else ())):
            layer.compile()
    options = setting.peer_dtype, setting.peer_fused_adamw
    of_peers = keep_freed_blocks if same_allocator else use_thresholds_of_glibc
    steps = {
        PEER: after(of_peers, peer_step(peer, peer_loss(peer, batch), *options)),
        "tinylm gpt2": after(keep_freed_blocks, tinylm_step(model, batch, setting.dtype)),
        MODERN: after(keep_freed_blocks, tinylm_step(modern_model, batch, setting.dtype)),
    }
    if nano is not None:
        steps[NANOGPT] = after(of_peers, peer_step(nano, lambda: nano(batch.ids, batch.targets)[1], *options))
    return steps


def products(dtype: str) -> Callable[[], object]:
    """A function that multiplies matrices of a size at which the processor reaches its rate."""
    x = torch.ones(PRODUCT_ROWS, PRODUCT_WIDTH, dtype=DTYPES[dtype])
    w = torch.ones(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype=DTYPES[dtype])

    @torch.no_grad()
    def multiply() -> None:
        for _ in range(PRODUCT_COUNT):
            onednn.linear(x, w)

    return multiply


def share_of_product_rate(config: ModelConfig, batch: Batch, step: Sequence[float], products: Sequence[float]) -> str:
    """The time that the FLOPs of a step take as large products, relative to that of the step: median over rounds.

    step, products: seconds of each round.
    """
    flops = training_flops(config) * batch.ids.numel()
    flops_of_products = PRODUCT_COUNT * 2 * PRODUCT_ROWS * PRODUCT_WIDTH**2
    shares = [flops / flops_of_products * alone / seconds for seconds, alone in zip(step, products, strict=True)]
    return f"{statistics.median(shares):.2f}"


def print_profile(step: Callable[[], object]) -> None:
    """Print the 25 operations of a step with the most time, without that of the operations that they call."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=256)
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument("--compile", action="store_true", help="also with compiled layers")
    parser.add_argument("--profile", action="store_true", help="only print the time of the operations of one step")
    parser.add_argument("--same-allocator", action="store_true", help="the peers keep freed memory, too")
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="the model.py of a copy of nanoGPT")
    arguments = parser.parse_args(argv)
    gpt2, modern = chosen_shape(arguments, "gpt2"), chosen_shape(arguments, "modern")
    batch = random_batch(gpt2, arguments.batch_size)
    if arguments.profile:
        keep_freed_blocks()
        print_profile(tinylm_step(build_model(modern), batch, choose_machine("cpu", "auto", Console()).dtype))
        return

    rows = []
    for setting in settings(arguments.compile):
        functions = contestants(setting, gpt2, modern, batch, arguments.nanogpt, arguments.same_allocator)
        alone = {PRODUCTS[dtype]: products(dtype) for dtype in number_formats()}
        times = take_turns({**functions, **alone}, arguments.rounds, arguments.warmup)
        for name in functions:
            seconds = times[name]
            dtype = setting.dtype if name.startswith("tinylm") else setting.peer_dtype
            config = modern if name == MODERN else gpt2
            rows.append(
                [
                    setting.name,
                    name,
                    f"{1000 * statistics.median(seconds):,.0f}",
                    tokens_per_second(times, name, batch.ids.numel()),
                    share_of_product_rate(config, batch, seconds, times[PRODUCTS[dtype]]),
                    "1" if name == PEER else str(speedup(times, name, PEER)),
                    str(speedup(times, name, NANOGPT)) if NANOGPT in times and name != NANOGPT else "",
                ]
            )
    print(f"{describe_machine()}\n")
    print(f"{arguments.layers}x{arguments.width}, {arguments.heads} heads, context {arguments.context}, ", end="")
    print(f"batch {arguments.batch_size}, vocabulary {arguments.vocab_size}; {arguments.rounds} rounds.")
    print(f"tinylm gpt2 and transformers gave the same logits within {TOLERANCE:g}.\n")
    columns = ["setting", "model", "ms per step", "tokens/s", "share of product rate", "times transformers"]
    print(table([*columns, "times nanoGPT"], rows))


if __name__ == "__main__":
    main()
