"""Ablations: the effect of each part of a transformer, from variants trained on one text for the same number of steps.

    python benchmarks/ablation.py tinyshakespeare.txt --groups positions,norms --steps 1000 --out ablation

Every variant is a run of `tinylm train` with additional flags, once per seed. Writes ablation.md with one table per
group.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from measure import LIMIT, describe_machine, run_tinylm, table

from tinylm.errors import DivergedError
from tinylm.model.build import build_empty_model, count_parameters
from tinylm.model_config import ModelConfig
from tinylm.run_directory.loading import read_config

# The original stack with its own optimizer; overrides --options. The published learning rate schedule depends on the
# number of warmup steps, a linear one does not.
PUBLISHED = "--preset original --optimizer adam --lr 0.001 --weight-decay 0 --schedule linear"
OPTIONS = (
    "--size micro --context 128 --sequence-growth 1 --mtp-weight 0 --batch-size 16 --optimizer adamw "
    "--schedule trapezoid --lr 0.003 --weight-decay 0.1 --tie"
)
MUON = "--optimizer muon --momentum 0.95"  # the momentum of the tables in docs/experiments.md
GROUPS: dict[str, dict[str, str]] = {
    "placement in 6 layers": {
        "pre-norm": f"{PUBLISHED} --layers 6 --norm-placement pre",
        "post-norm": f"{PUBLISHED} --layers 6",
        "pre-norm, no warmup": f"{PUBLISHED} --layers 6 --norm-placement pre --warmup-steps 0",
        "post-norm, no warmup": f"{PUBLISHED} --layers 6 --warmup-steps 0",
    },
    "placement in 24 layers": {
        "pre-norm": f"{PUBLISHED} --layers 24 --norm-placement pre",
        "post-norm": f"{PUBLISHED} --layers 24",
        "pre-norm, no warmup": f"{PUBLISHED} --layers 24 --norm-placement pre --warmup-steps 0",
        "post-norm, no warmup": f"{PUBLISHED} --layers 24 --warmup-steps 0",
        "post-norm, warmup of half the steps": f"{PUBLISHED} --layers 24 --warmup-steps {{steps/2}}",
        "post-norm, a tenth of the rate": f"{PUBLISHED} --layers 24 --lr 0.0001",
    },
    "norms": {
        "rmsnorm": "",
        "layernorm with gain and bias": "--norm layernorm --norm-bias",
        "layernorm with gain": "--norm layernorm",
        "bare layernorm": "--norm layernorm --no-norm-gain",
        "none": "--norm none --no-qk-norm",
    },
    "residuals": {"with": "", "without": "--no-residual"},
    "scale of attention": {"1/sqrt(d)": "--no-qk-norm", "none": "--no-qk-norm --no-attention-scale"},
    "heads": {
        "1": "--heads 1 --kv-heads 1",
        "2": "--heads 2 --kv-heads 2",
        "4": "--heads 4 --kv-heads 4",
        "8": "--heads 8 --kv-heads 8",
    },
    "key/value heads": {
        "multi-head": "--heads 4 --kv-heads 4",
        "grouped-query": "--heads 4 --kv-heads 2",
        "multi-query": "--heads 4 --kv-heads 1",
    },
    "output": {"tied": "", "untied": "--no-tie"},
    "positions": {name: f"--position {name}" for name in ("rope", "relative", "sinusoidal", "learned", "none")},
    "local attention": {
        "full": "",
        "window of 16 in every second layer": "--local-window 16",
        "window of 16 in all layers": "--local-window 16 --local-layers 0,1,2,3",
    },
    "experts": {
        "dense": MUON,
        "4 experts, 2 per token, half as wide": f"{MUON} --experts 4 --ffn-width 176",
        "8 experts, 2 per token, half as wide": f"{MUON} --experts 8 --ffn-width 176",
    },
    "experts by AdamW": {
        "dense": "--optimizer adamw",
        "4 experts, 2 per token, half as wide": "--optimizer adamw --experts 4 --ffn-width 176",
        "8 experts, 2 per token, half as wide": "--optimizer adamw --experts 8 --ffn-width 176",
    },
    "merging of experts": {
        "outputs mixed": f"{MUON} --experts 4 --ffn-width 176",
        "matrices mixed": f"{MUON} --experts 4 --ffn-width 176 --expert-mode merge",
    },
    "warmup of Adam": {
        "with": f"{PUBLISHED} --norm-placement pre",
        "without": f"{PUBLISHED} --norm-placement pre --warmup-steps 0",
        "with, at ten times the rate": f"{PUBLISHED} --norm-placement pre --lr 0.01",
        "without, at ten times the rate": f"{PUBLISHED} --norm-placement pre --lr 0.01 --warmup-steps 0",
    },
    "batch": {  # the same number of tokens: 1/64 of the steps
        "16 sequences": "",
        "1,024 sequences": "--batch-size 1024 --micro-batch 64 --steps {steps/64}",
        "1,024 sequences, at four times the rate": "--batch-size 1024 --micro-batch 64 --steps {steps/64} --lr 0.012",
    },
    "averages": {"last weights": "", "share 0.05": "--average 0.05", "share 0.2": "--average 0.2"},
}


@dataclass(frozen=True)
class Trained:
    """The results of one variant.

    val_losses: for each seed, the loss of the best weights on all validation text; None if training diverged
    tokens_per_second: median over the log lines of the first seed
    cache_bytes: growth of the key/value caches per token
    shares: for each layer and seed, the fraction of the tokens routed to each expert in the last steps
    """

    name: str
    val_losses: list[float | None]
    tokens_per_second: float
    parameters: int
    cache_bytes: int
    shares: list[list[float]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"some of: {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--steps", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each variant (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("ablation"), help="folder for the runs and the tables")
    parser.add_argument(
        "--options", default=OPTIONS, help=f"flags of tinylm train for all variants (default: {OPTIONS})"
    )
    options = parser.parse_args(arguments)
    wanted = [name.strip() for name in options.groups.split(",")]
    if unknown := [name for name in wanted if name not in GROUPS]:
        parser.error(f"unknown group {unknown[0]!r}; the groups are: {', '.join(GROUPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Trained]] = {}
    trained: dict[str, Trained] = {}  # by flags: the default is a variant of several groups and is trained once
    for group in wanted:
        results[group] = []
        for name, flags in GROUPS[group].items():
            if flags not in trained:
                trained[flags] = train_seeds(
                    name,
                    options.corpus,
                    options.out / folder_name(group, name),
                    f"--steps {options.steps} {options.options} {fill_in_steps(flags, options.steps)}",
                    options.seeds,
                )
            results[group].append(replace(trained[flags], name=name))
        report = write_table(results, options.corpus, options.steps, options.options)
        (options.out / "ablation.md").write_text(report)
    print(report)


def fill_in_steps(flags: str, steps: int) -> str:
    """Replace each {steps/N} by its value."""
    return re.sub(r"\{steps/(\d+)\}", lambda match: str(max(1, steps // int(match[1]))), flags)


def folder_name(group: str, name: str) -> str:
    """The folder of a variant, without its seed."""
    return "".join(letter if letter.isalnum() else "-" for letter in f"{group} {name}")


def train_seeds(name: str, corpus: Path, out: Path, flags: str, seeds: int) -> Trained:
    """Train once per seed. Losses and shares are those of all runs; speed and size are those of the first."""
    runs = [train(name, corpus, out.with_name(f"{out.name}-{seed}"), flags, seed) for seed in range(seeds)]
    return replace(
        runs[0],
        val_losses=[loss for run in runs for loss in run.val_losses],
        shares=[layer for run in runs for layer in run.shares],
    )


def train(name: str, corpus: Path, out: Path, flags: str, seed: int) -> Trained:
    """Train and evaluate one run. A run that diverges is a result too, with the loss None."""
    common = ["--seed", str(seed), "--compile", "off", "--quiet", "--force", "--json", "--log-every", "10"]
    training = [sys.executable, "-m", "tinylm", "train", str(corpus), "--out", str(out), *flags.split(), *common]
    result = subprocess.run(training, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    if result.returncode not in (0, DivergedError.exit_code):
        raise RuntimeError(f"tinylm train {flags} failed")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    val_loss = None
    if result.returncode == 0:
        val_loss = json.loads(run_tinylm(["eval", "--model", str(out), "--quiet", "--json"]))["loss"]
    speeds = sorted(record["tokens_per_second"] for record in records if "tokens_per_second" in record)
    model = read_config(out).model
    return Trained(
        name,
        [val_loss],
        speeds[len(speeds) // 2] if speeds else 0.0,
        count_parameters(build_empty_model(model))["total"],
        cache_bytes(model),
        next((record["expert_shares"] for record in reversed(records) if "expert_shares" in record), []),
    )


def cache_bytes(model: ModelConfig) -> int:
    """Bytes per further token in the fp32 key/value caches of a long text; those of local attention do not grow."""
    growing = model.layers - len(model.local_layers)
    return 2 * 4 * growing * model.kv_heads * model.head_dim


def write_table(results: Mapping[str, list[Trained]], corpus: Path, steps: int, options: str) -> str:
    """The content of ablation.md: a table per group."""
    parts = [f"{corpus.name}, {steps} steps of `tinylm train {options}`; {describe_machine(['torch'])}"]
    for group, variants in results.items():
        has_experts = any(one.shares for one in variants)
        rows = [
            [
                one.name,
                format_losses(one.val_losses),
                f"{one.tokens_per_second:,.0f}" if one.tokens_per_second else "-",
                f"{one.parameters:,}",
                str(one.cache_bytes),
                *([relative_load(one.shares)] if has_experts else []),
            ]
            for one in variants
        ]
        columns = ["validation loss", "tokens/s", "parameters", "cache bytes per token"]
        parts.append(table([group, *columns, *(["expert load, relative to uniform"] if has_experts else [])], rows))
    return "\n\n".join(parts) + "\n"


def format_losses(losses: Sequence[float | None]) -> str:
    """The mean and the range of the losses that are not None, and the number of runs that diverged (None)."""
    finite = [loss for loss in losses if loss is not None]
    diverged = len(losses) - len(finite)
    parts = [f"{sum(finite) / len(finite):.4f}"] if finite else []
    parts += [f"({min(finite):.4f} to {max(finite):.4f})"] if len(finite) > 1 else []
    parts += ["diverged" if len(losses) == 1 else f"{diverged} of {len(losses)} diverged"] if diverged else []
    return " ".join(parts)


def relative_load(layers: Sequence[Sequence[float]]) -> str:
    """The smallest and the largest load of an expert; 1 is an equal share of its layer's tokens."""
    loads = [share * len(layer) for layer in layers for share in layer]
    return f"{min(loads):.2f} to {max(loads):.2f}" if loads else ""


if __name__ == "__main__":
    main()
