"""Tokens per second of training on the CPU: tinylm's presets gpt2 and modern, transformers' GPT-2, and nanoGPT.

    python benchmarks/training.py --nanogpt nanoGPT/model.py

A step is a forward and backward pass, gradient clipping and AdamW on one batch, the same for all: a step of tinylm's
Trainer, and a plain training loop for the peers. tinylm gpt2 and transformers' GPT-2 start with the same weights, and
their logits are compared before the measurement. All models run without dropout, transformers without its cache.

The settings start with the defaults and add one change each, to separate their effects: number format (no bf16 on
processors without instructions for it), optimizer, and the peer's GELU. Within a setting the models take turns; the
last two columns are ratios of speeds, computed per round. nanoGPT is not a package: --nanogpt names the model.py of a
checkout; it is measured with its own random weights and the settings of the peer.

The share of the product rate is the time that the FLOPs of a step (6 per matrix parameter and token, and causal
attention) take at the rate of large products in the same format, relative to the time of the step. The products take
turns with the models.

tinylm trains with freed memory kept (decision 036), and the peers with the thresholds that glibc's malloc reaches by
itself; with --same-allocator the peers keep freed memory as well.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from measure import add_options, chosen_shape, describe_machine, speedup, table, take_turns, tokens_per_second
from torch import Tensor, nn

from tinylm.commands.console import Console
from tinylm.config.model import ModelConfig
from tinylm.config.run import SpecialTokens
from tinylm.config.training import Budget, TrainingConfig
from tinylm.formats.family import ForeignModel
from tinylm.formats.huggingface import write_folder
from tinylm.kernels.cpu import computes_bf16
from tinylm.kernels.layers import linear
from tinylm.kernels.process import keep_freed_blocks, set_thresholds
from tinylm.machine.device import DTYPES, autocast
from tinylm.machine.measure import choose_machine
from tinylm.objectives.loss import next_token
from tinylm.planning.plan_request import training_flops
from tinylm.text.batches import Batch
from tinylm.text.tokenizer import train_char
from tinylm.training.execution import GraphedModel
from tinylm.training.optimizer import build_optimizer
from tinylm.training.state import TrainerState
from tinylm.training.trainer import Trainer
from tinylm.transformer.architectures import Decoder, Transformer
from tinylm.transformer.build import build_model

PEER, NANOGPT, MODERN = "transformers GPT-2", "nanoGPT", "tinylm modern"
PRODUCTS = {"fp32": "matrix products in fp32", "bf16": "matrix products in bf16"}
PRODUCT_ROWS, PRODUCT_WIDTH, PRODUCT_COUNT = 2048, 512, 100
TOLERANCE = 1e-4  # of logits
# GPT-2's GELU with the tanh approximation: as separate operations (transformers' default), and as one kernel.
PLAIN_GELU, FUSED_GELU = "gelu_new", "gelu_pytorch_tanh"
NEVER = 10**9  # steps

Step = Callable[[], object]


# Steps of training.


class StepsDone(Exception):
    """Ends a run of the Trainer as an error would: it does not save, for which it would test the weights."""


class NoStore:
    """A trainer's Store that saves nothing."""

    saved_step = -1

    def save_for_inference(self, model: Transformer, step: int, val_loss: float | None) -> None: ...

    def save_for_resuming(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> float:
        return 0.0


def tinylm_step(
    model: Transformer, batch: Batch, dtype: str, steps: int = 1, graphed: GraphedModel | None = None
) -> Callable[[], int]:
    """A function that runs steps of the Trainer, without evaluation, saves, logging and the end of a run.

    It returns the rows of the micro-batches, which are fewer than those of the batch after memory ran out.
    """
    never: dict[str, Any] = dict.fromkeys(("eval_every", "save_every", "log_every"), NEVER)
    rates: dict[str, Any] = {"lr": 1e-3, "min_lr": 1e-3, "warmup": 0.0, "schedule": "constant"}
    rows: dict[str, Any] = {"batch_size": len(batch), "micro_batch": len(batch)}
    config = TrainingConfig(budget=Budget(steps=NEVER), **rows, **rates, **never)
    task: Any = SimpleNamespace(objective=lambda progress: next_token, batch=lambda number: batch, steps_per_epoch=1)
    optimizer = build_optimizer(model, config, dtype)

    def step() -> int:
        checks = iter(range(steps + 1))

        def stop_after_steps() -> None:
            if next(checks) == steps:
                raise StepsDone

        state = TrainerState(step=1, micro_batch=len(batch))
        trainer = Trainer(
            model=model,
            task=task,
            optimizer=optimizer,
            config=config,
            state=state,
            store=NoStore(),
            started=0.0,
            dtype=dtype,
            graphed=graphed,
            check_stop=stop_after_steps,
        )
        with suppress(StepsDone):
            trainer.run()
        return state.micro_batch

    return step


def random_batch(config: ModelConfig, rows: int) -> Batch:
    """Random ids and targets, (rows, context) each, always the same."""
    tokens = torch.randint(config.vocab_size, (rows, config.context + 1), generator=torch.Generator().manual_seed(0))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def peer_step(peer: nn.Module, loss: Callable[[], Tensor], dtype: str, fused: bool, device: str = "cpu") -> Step:
    """A training step of a peer in training mode. loss: computes the loss. fused: use fused AdamW."""
    peer.train()
    optimizer = torch.optim.AdamW(peer.parameters(), fused=True if fused else None)

    def step() -> None:
        with autocast(device, dtype):
            nats = loss()
        nats.backward()
        nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# Peers.


def build_nanogpt(path: Path, config: ModelConfig) -> Any:
    """The GPT class of nanoGPT's model.py without dropout, and with biases, which are its default."""
    spec = spec_from_file_location("nanogpt", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "dropout": 0.0}
    return module.GPT(module.GPTConfig(block_size=config.context, vocab_size=config.vocab_size, **shape))


def build_pair(config: ModelConfig, gelu: str = PLAIN_GELU) -> tuple[Decoder, Any]:
    """A model of preset gpt2, and transformers' GPT-2 with its weights, which both have no dropout.

    Every weight is perturbed, so that biases (initialised with 0) and gains (with 1) affect the compared logits. Raises
    AssertionError if a logit differs by more than TOLERANCE.
    """
    from transformers import GPT2LMHeadModel

    model, generator = cast(Decoder, build_model(config, 0)).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    letters = train_char("".join(map(chr, range(0x20000, 0x20000 + config.vocab_size - 1)))).to_str()
    exported = ForeignModel(None, config, dict(model.state_dict()), letters, SpecialTokens(), None)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), exported, torch.float32)
        dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        peer: Any = GPT2LMHeadModel.from_pretrained(folder, activation_function=gelu, **dropout)
    ids = torch.randint(config.vocab_size, (2, config.context), generator=generator)
    with torch.inference_mode():
        torch.testing.assert_close(model.logits(model(ids).hidden), peer.eval()(ids).logits, rtol=0, atol=TOLERANCE)
    return model, peer


def peer_loss(peer: Any, batch: Batch) -> Callable[[], Tensor]:
    """A function that computes the mean loss of a batch in nats per token."""
    return lambda: cast(Tensor, peer(batch.ids, labels=batch.targets, shift_labels=batch.targets, use_cache=False).loss)


# The settings and what takes turns in them.


@dataclass(frozen=True)
class Setting:
    """How tinylm and the peer train. dtype, peer_dtype: number formats by tinylm's names."""

    name: str
    dtype: str
    peer_dtype: str
    peer_fused_adamw: bool
    peer_gelu: str = PLAIN_GELU


def settings() -> list[Setting]:
    """The settings in the order of the table."""
    auto = choose_machine("cpu", "auto", Console()).dtype
    narrowest = number_formats()[-1]
    return [
        Setting(f"defaults (tinylm: {auto}, fused AdamW; transformers: fp32, AdamW)", auto, "fp32", False),
        *(Setting(f"both {dtype}, fused AdamW", dtype, dtype, True) for dtype in number_formats()),
        Setting(f"both {narrowest}, fused AdamW and GELU", narrowest, narrowest, True, FUSED_GELU),
    ]


def number_formats() -> list[str]:
    """The measured number formats. Processors without instructions for bf16 would take many minutes per step in it."""
    return ["fp32", "bf16"] if computes_bf16() else ["fp32"]


def after(keeps_memory: bool, step: Step) -> Step:
    """A step that first makes malloc keep freed memory, or sets the thresholds that glibc reaches by itself after it
    has freed blocks of 32 MiB, its largest.
    """

    def run() -> None:
        keep_freed_blocks() if keeps_memory else set_thresholds(map_from=32 << 20, trim_from=64 << 20)
        step()

    return run


def contestants(
    setting: Setting, gpt2: ModelConfig, modern: ModelConfig, batch: Batch, nanogpt: Path | None, same_allocator: bool
) -> dict[str, Step]:
    """The training steps by name. The models are new in each setting, so that all start untrained and uncompiled."""
    model, peer = build_pair(gpt2, setting.peer_gelu)
    modern_model = build_model(modern)
    nano = None if nanogpt is None else build_nanogpt(nanogpt, gpt2)
    options = setting.peer_dtype, setting.peer_fused_adamw
    steps = {
        PEER: after(same_allocator, peer_step(peer, peer_loss(peer, batch), *options)),
        "tinylm gpt2": after(True, tinylm_step(model, batch, setting.dtype)),
        MODERN: after(True, tinylm_step(modern_model, batch, setting.dtype)),
    }
    if nano is not None:
        steps[NANOGPT] = after(same_allocator, peer_step(nano, lambda: nano(batch.ids, batch.targets)[1], *options))
    return steps


def products(dtype: str) -> Step:
    """A function that multiplies matrices of a size at which the processor reaches its rate."""
    x = torch.ones(PRODUCT_ROWS, PRODUCT_WIDTH, dtype=DTYPES[dtype])
    w = torch.ones(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype=DTYPES[dtype])

    def multiply() -> None:
        with torch.no_grad():
            for _ in range(PRODUCT_COUNT):
                linear(x, w)

    return multiply


def share_of_product_rate(config: ModelConfig, tokens: int, step: Sequence[float], products: Sequence[float]) -> float:
    """The time that the FLOPs of a step take as large products, relative to that of the step: median over rounds.

    tokens: of a step. step, products: seconds of each round.
    """
    flops = training_flops(config) * tokens / (PRODUCT_COUNT * 2 * PRODUCT_ROWS * PRODUCT_WIDTH**2)
    return statistics.median(flops * alone / seconds for seconds, alone in zip(step, products, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=256)
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="default: 16")
    parser.add_argument("--same-allocator", action="store_true", help="the peers keep freed memory, too")
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="the model.py of a copy of nanoGPT")
    options = parser.parse_args(argv)
    gpt2, modern = chosen_shape(options, "gpt2"), chosen_shape(options, "modern")
    batch = random_batch(gpt2, options.batch_size)
    rows = []
    for setting in settings():
        steps = contestants(setting, gpt2, modern, batch, options.nanogpt, options.same_allocator)
        alone = {PRODUCTS[dtype]: products(dtype) for dtype in number_formats()}
        times = take_turns({**steps, **alone}, options.rounds, options.warmup)
        for name in steps:
            dtype = setting.dtype if name.startswith("tinylm") else setting.peer_dtype
            config, tokens = modern if name == MODERN else gpt2, batch.ids.numel()
            share = share_of_product_rate(config, tokens, times[name], times[PRODUCTS[dtype]])
            row = [setting.name, name, f"{1000 * statistics.median(times[name]):,.0f}"]
            row += [tokens_per_second(times, name, tokens), f"{share:.2f}"]
            row += ["1" if name == PEER else str(speedup(times, name, PEER))]
            rows.append([*row, str(speedup(times, name, NANOGPT)) if NANOGPT in times and name != NANOGPT else ""])
    print(f"{describe_machine()}\n")
    print(f"{options.layers}x{options.width}, {options.heads} heads, context {options.context}, ", end="")
    print(f"batch {options.batch_size}, vocabulary {options.vocab_size}; {options.rounds} rounds.")
    print(f"tinylm gpt2 and transformers gave the same logits within {TOLERANCE:g}.\n")
    columns = ["setting", "model", "ms per step", "tokens/s", "share of product rate", "times transformers"]
    print(table([*columns, "times nanoGPT"], rows))


if __name__ == "__main__":
    main()
