"""Instability at the start of training (note 000): gradients by layer, LayerNorm's Jacobian, Adam's first updates.

    python benchmarks/gradients.py tinyshakespeare.txt

Prints three tables for untrained models. The size of a vector x is its root mean square, |x| / sqrt(D).
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from measure import describe_machine, table
from torch import Tensor, nn

from tinylm.model.build import build_model
from tinylm.model.norm import LayerNorm
from tinylm.model_config import ModelConfig
from tinylm.objectives.loss import next_token
from tinylm.presets import make_model_config
from tinylm.text.batches import Batch, Windows
from tinylm.text.tokenizer import train_char
from tinylm.training.gradient_norms import layer_gradient_norms

CONTEXT = 64


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--width", type=int, default=128, help="default: 128")
    parser.add_argument("--depths", type=int, nargs="+", default=[6, 24], help="numbers of layers (default: 6 24)")
    parser.add_argument("--streams", type=int, default=32, help="Adam runs with different batches (default: 32)")
    options = parser.parse_args(arguments)
    text = options.corpus.read_text(encoding="utf-8")
    tokenizer = train_char("".join(sorted(set(text))))
    tokens = tokenizer.encode(text)
    print(describe_machine(["torch"]))

    def shape(layers: int, placement: str) -> ModelConfig:
        choices = {"layers": layers, "width": options.width, "heads": 4, "context": CONTEXT}
        vocab_size = tokenizer.vocab_size
        return make_model_config(
            vocab_size=vocab_size, preset="original", size="micro", norm_placement=placement, **choices
        )

    batch = Windows(tokens, CONTEXT, 16, seed=0).batch(0)
    rows = [
        [f"{placement}-norm, {layers} layers", *by_layer(shape(layers, placement), batch)]
        for placement in ("pre", "post")
        for layers in options.depths
    ]
    header = ["at initialisation", "gradient of first layer", "middle", "last", "first / last", "RMS of x, last norm"]
    print("\n" + table(header, rows))
    print("\n" + table(["D", "RMS of x", "norm of the Jacobian", "1 / RMS"], list(jacobians())))
    first = shape(options.depths[0], "pre")
    header = ["step", "variance of updates", "relative deviation of 1/sqrt(v)"]
    print("\n" + table(header, adam(first, tokens, options.streams)))


def by_layer(config: ModelConfig, batch: Batch) -> list[str]:
    """Gradient norms of the first, middle and last layer, the ratio of first and last, and the size of the input of the
    last norm in the layers.
    """
    model = build_model(config, seed=0).train()
    input_norms: list[float] = []
    norms = [module for name, module in model.named_modules() if name.startswith("layers.") and "_norm" in name]
    norms[-1].register_forward_pre_hook(lambda _, inputs: input_norms.append(inputs[0].norm(dim=-1).mean().item()))
    loss = next_token(model, batch)
    (loss.total / loss.n_tokens).backward()
    gradients = layer_gradient_norms(model)
    first, middle, last = (gradients[f"layers.{i}"] or 0.0 for i in (0, config.layers // 2, config.layers - 1))
    size = input_norms[0] / math.sqrt(config.width)
    return [*(f"{norm:.4f}" for norm in (first, middle, last)), f"{first / last:.2f}", f"{size:.2f}"]


def jacobians() -> Iterator[list[str]]:
    """The spectral norm of d LayerNorm(x) / dx, without gain and bias, for vectors x of several sizes."""
    rng = torch.Generator().manual_seed(0)
    for width in (64, 512):
        norm = LayerNorm(width, gain=False, eps=0.0)
        direction = torch.randn(width, generator=rng, dtype=torch.float64)
        for size in (0.1, 1.0, 10.0):
            x = direction * (size * math.sqrt(width) / direction.norm())
            jacobian = torch.autograd.functional.jacobian(norm, x)
            largest = torch.linalg.matrix_norm(jacobian, ord=2).item()
            yield [str(width), f"{size:g}", f"{largest:.4f}", f"{1 / size:.4f}"]


def adam(config: ModelConfig, tokens: np.ndarray, streams: int) -> list[list[str]]:
    """Statistics of Adam's update of the first query matrix, over `streams` runs with different batches. No update is
    applied.

    By step: the variance of the update over the runs, in units of the learning rate, averaged over the entries; and the
    relative standard deviation of 1/sqrt(v), the median of the entries.
    """
    model = build_model(config, seed=0).train()
    weight = model.get_parameter("layers.0.attention.q_proj.weight")
    model.requires_grad_(False)
    weight.requires_grad_(True)
    beta1, beta2, shown = 0.9, 0.999, (1, 2, 4, 8, 16, 32, 64)
    updates: dict[int, list[Tensor]] = {step: [] for step in shown}
    sizes: dict[int, list[Tensor]] = {step: [] for step in shown}
    for stream in range(streams):
        windows = Windows(tokens, CONTEXT, 8, seed=stream)
        m, v = torch.zeros_like(weight), torch.zeros_like(weight)
        for step in range(1, shown[-1] + 1):
            gradient = _gradient(model, weight, windows.batch(step - 1))
            m = beta1 * m + (1 - beta1) * gradient
            v = beta2 * v + (1 - beta2) * gradient**2
            if step in shown:
                root = (v / (1 - beta2**step)).sqrt() + 1e-12
                updates[step].append(m / (1 - beta1**step) / root)
                sizes[step].append(1 / root)
    return [
        [
            str(step),
            f"{torch.stack(updates[step]).var(dim=0).mean().item():.3f}",
            f"{_relative_deviation(torch.stack(sizes[step])):.3f}",
        ]
        for step in shown
    ]


def _gradient(model: nn.Module, weight: nn.Parameter, batch: Batch) -> Tensor:
    loss = next_token(model, batch)
    (gradient,) = torch.autograd.grad(loss.total / loss.n_tokens, weight)
    return gradient


def _relative_deviation(values: Tensor) -> float:
    """The median over the entries of their standard deviation divided by their mean. values: (streams, ...)."""
    return (values.std(dim=0) / values.mean(dim=0)).median().item()


if __name__ == "__main__":
    main()
