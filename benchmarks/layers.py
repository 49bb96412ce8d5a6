"""Cost of layers: self-attention and a recurrent layer by length (note 004), position schemes, and experts (002).

    python benchmarks/layers.py

Forward and backward pass on a CPU; for experts the forward pass only, whose cost should not grow with their number. The
layers that are compared take turns.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from measure import describe_machine, speedup, table, take_turns, tokens_per_second
from torch import Tensor, nn

from tinylm.device import DTYPES
from tinylm.model.attention import DotProduct, Heads, SelfAttention
from tinylm.model.build import build_model
from tinylm.presets import make_model_config

BATCH = 4
SCHEMES = ("none", "learned", "sinusoidal", "rope", "relative")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[64, 256], help="widths d of a layer (default: 64 256)"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[64, 256, 1024], help="of positions (default: 64 256 1024)"
    )
    parser.add_argument("--experts", type=int, nargs="+", default=[4, 16, 64], help="default: 4 16 64")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per pass of the experts (default: 2048)")
    options = parser.parse_args(arguments)
    print(describe_machine(["torch"]))
    rows = [against_recurrence(d, n, options.rounds) for d in options.widths for n in (d // 4, d, 4 * d, 16 * d)]
    print("\n" + table(["width d", "length n", "n/d", "attention, tokens/s", "GRU, tokens/s", "attention / GRU"], rows))
    rows = [of_positions(length, options.rounds) for length in options.lengths]
    print("\n" + table(["context", "none, tokens/s", *(f"{name} / none" for name in SCHEMES[1:])], rows))
    print(f"\n{options.tokens} tokens per pass\n")
    units = ("tokens/s", f"times {options.experts[0]} experts")
    header = ["experts", "parameters", *(f"{dtype}, {unit}" for dtype in ("fp32", "bf16") for unit in units)]
    print(table(header, experts(options.experts, options.rounds, options.tokens)))


def against_recurrence(width: int, length: int, rounds: int) -> list[str]:
    """The row of the first table for one width and length: self-attention with four heads, and a GRU."""
    torch.manual_seed(0)
    identity = nn.Identity()
    attention = SelfAttention(width, Heads(4, 4, width // 4), DotProduct(), identity, identity, causal=False)
    recurrent = nn.GRU(width, width, batch_first=True)
    x = torch.randn(BATCH, length, width)
    pair = {"attention": _pass(attention, x), "GRU": _pass(lambda x: recurrent(x)[0], x)}
    times = take_turns(pair, rounds)
    speeds = [tokens_per_second(times, name, BATCH * length) for name in pair]
    return [str(width), str(length), f"{length / width:g}", *speeds, str(speedup(times, "attention", base="GRU"))]


def _pass(layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    """A forward and a backward pass, which computes the gradient of the input as well."""

    def step() -> None:
        layer(x.clone().requires_grad_()).sum().backward()

    return step


def of_positions(length: int, rounds: int) -> list[str]:
    """A model of four layers of width 128 with each position scheme, in passes of about 4,096 tokens."""
    ids = torch.randint(65, (max(1, 4096 // length), length), generator=torch.Generator().manual_seed(0))
    steps = {}
    for name in SCHEMES:
        config = make_model_config(vocab_size=65, preset="modern", size="micro", context=length, position=name)
        model = build_model(config)
        steps[name] = lambda model=model: model(ids).hidden.sum().backward()
    times = take_turns(steps, rounds)
    ratios = [str(speedup(times, name, base="none")) for name in SCHEMES[1:]]
    return [str(length), tokens_per_second(times, "none", ids.numel()), *ratios]


def experts(numbers: Sequence[int], rounds: int, tokens: int) -> list[list[str]]:
    """A model of four layers with two experts per token. For bf16 the weights are converted, as in tinylm sample."""
    models = {}
    for number in numbers:
        config = make_model_config(vocab_size=65, preset="modern", size="micro", experts=number, ffn_width=352)
        models[str(number)] = build_model(config).eval()
    ids = torch.randint(65, (tokens // 128, 128), generator=torch.Generator().manual_seed(0))

    def forward(model: nn.Module) -> Callable[[], object]:
        def run() -> None:
            with torch.inference_mode():
                model(ids)

        return run

    speeds = {}
    for dtype in ("fp32", "bf16"):
        times = take_turns({name: forward(model.to(DTYPES[dtype])) for name, model in models.items()}, rounds)
        fewest = str(numbers[0])
        speeds[dtype] = {
            name: [tokens_per_second(times, name, tokens), str(speedup(times, name, base=fewest))] for name in models
        }
    return [
        [name, f"{sum(p.numel() for p in model.parameters()):,}", *speeds["fp32"][name], *speeds["bf16"][name]]
        for name, model in models.items()
    ]


if __name__ == "__main__":
    main()
