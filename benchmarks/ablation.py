"""Ablations: the effect of each part of a transformer, from variants trained on one text for the same number of steps.

    python benchmarks/ablation.py tinyshakespeare.txt --groups positions,norms --steps 1000 --out ablation

Every variant is a run of `tinylm train` with additional flags, once per seed. Writes ablation.md with one table per
group.
"""

import argparse
import json
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import LIMIT, describe_machine, run_tinylm, table, tinylm_command

from tinylm.errors import DivergedError
from tinylm.planning.plan_request import training_flops
from tinylm.run_directory.loading import read_config
from tinylm.transformer.build import count_parameters

# The original stack with its own optimizer; overrides --options. The published learning rate schedule depends on the
# number of warmup steps, a linear one does not.
PUBLISHED = "--preset original --optimizer adam --lr 0.001 --weight-decay 0 --schedule linear"
OPTIONS = (
    "--size micro --context 128 --sequence-growth 1 --mtp-weight 0 --batch-size 16 --optimizer adamw "
    "--schedule trapezoid --lr 0.003 --weight-decay 0.1 --tie"
)
MUON = "--optimizer muon --momentum 0.95"  # the momentum of the tables in docs/performance.md
PLACEMENTS = {
    "pre-norm": f"{PUBLISHED} --norm-placement pre",
    "post-norm": PUBLISHED,
    "pre-norm, no warmup": f"{PUBLISHED} --norm-placement pre --warmup-steps 0",
    "post-norm, no warmup": f"{PUBLISHED} --warmup-steps 0",
}
MORE_PLACEMENTS = {
    "post-norm, warmup of half the steps": f"{PUBLISHED} --warmup-steps {{steps/2}}",
    "post-norm, a tenth of the rate": f"{PUBLISHED} --lr 0.0001",
}
EXPERTS = {
    "dense": "",
    "4 experts, 2 per token, half as wide": "--experts 4 --ffn-width 176",
    "8 experts, 2 per token, half as wide": "--experts 8 --ffn-width 176",
}
GROUPS: dict[str, dict[str, str]] = {
    "placement in 6 layers": {name: f"{flags} --layers 6" for name, flags in PLACEMENTS.items()},
    "placement in 24 layers": {n: f"{flags} --layers 24" for n, flags in (PLACEMENTS | MORE_PLACEMENTS).items()},
    "norms": {
        "rmsnorm": "",
        "layernorm with gain and bias": "--norm layernorm --norm-bias",
        "layernorm with gain": "--norm layernorm",
        "bare layernorm": "--norm layernorm --no-norm-gain",
        "none": "--norm none --no-qk-norm",
    },
    "residuals": {"with": "", "without": "--no-residual"},
    "scale of attention": {"1/sqrt(d)": "--no-qk-norm", "none": "--no-qk-norm --no-attention-scale"},
    "heads": {str(n): f"--heads {n} --kv-heads {n}" for n in (1, 2, 4, 8)},
    "key/value heads": {
        name: f"--heads 4 --kv-heads {n}" for n, name in ((4, "multi-head"), (2, "grouped-query"), (1, "multi-query"))
    },
    "output": {"tied": "", "untied": "--no-tie"},
    "positions": {name: f"--position {name}" for name in ("rope", "relative", "sinusoidal", "learned", "none")},
    "local attention": {
        "full": "",
        "window of 16 in every second layer": "--local-window 16",
        "window of 16 in all layers": "--local-window 16 --local-layers 0,1,2,3",
    },
    "experts": {name: f"{MUON} {flags}" for name, flags in EXPERTS.items()},
    "experts by AdamW": {name: f"--optimizer adamw {flags}" for name, flags in EXPERTS.items()},
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

    losses: for each seed, that of the best weights on all validation text; None if training diverged. sizes: tokens/s,
    the share of the rate of large matrix products (see training.py), parameters, and bytes per further token in the
    fp32 key/value caches of a long text. loads: for each layer and seed, the fraction of the tokens of each expert.
    """

    losses: list[float | None]
    sizes: list[str]
    loads: list[list[float]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"some of: {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--steps", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each variant (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("ablation"), help="folder for the runs and the tables")
    parser.add_argument("--options", default=OPTIONS, help=f"flags of tinylm train for all (default: {OPTIONS})")
    options = parser.parse_args(arguments)
    wanted = [name.strip() for name in options.groups.split(",")]
    if unknown := [name for name in wanted if name not in GROUPS]:
        parser.error(f"unknown group {unknown[0]!r}; the groups are: {', '.join(GROUPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(["torch"])
    parts = [f"{options.corpus.name}, {options.steps} steps of `tinylm train {options.options}`; {machine}"]
    trained: dict[str, Trained] = {}  # by flags: the default is a variant of several groups and is trained once
    for group in wanted:
        rows = []
        for name, flags in GROUPS[group].items():
            if flags not in trained:
                folder = "".join(letter if letter.isalnum() else "-" for letter in f"{group} {name}")
                trained[flags] = train(options, options.out / folder, flags)
            one = trained[flags]
            rows.append([name, format_losses(one.losses), *one.sizes, relative_load(one.loads)])
        columns = ["validation loss", "tokens/s", "of the peak", "parameters", "cache bytes per token", "expert load"]
        parts.append(table([group, *columns], rows))
        (options.out / "ablation.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))


def train(options: argparse.Namespace, folder: Path, flags: str) -> Trained:
    """Train and evaluate once per seed. A run that diverges is a result too. Speed and sizes are those of the first."""
    filled = re.sub(r"\{steps/(\d+)\}", lambda match: str(max(1, options.steps // int(match[1]))), flags)
    fixed = "--tokenizer char --compile off --quiet --force --json --log-every 10"
    words = f"--steps {options.steps} {fixed} {options.options} {filled}"
    losses, loads, sizes = list[float | None](), list[list[float]](), list[str]()
    for seed in range(options.seeds):
        out = folder.with_name(f"{folder.name}-{seed}")
        command = tinylm_command("train", options.corpus, "--out", out, "--seed", seed, *words.split())
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
        if result.returncode not in (0, DivergedError.exit_code):
            raise RuntimeError(f"tinylm train {filled} failed")
        scores = () if result.returncode else run_tinylm(["eval", "--model", out, "--quiet", "--json"]).splitlines()
        losses.append(json.loads(scores[0])["loss"] if scores else None)
        records = [json.loads(line) for line in result.stdout.splitlines()]
        loads += next((record["expert_shares"] for record in reversed(records) if "expert_shares" in record), [])
        if not sizes:
            config = read_config(out)
            speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
            speed, peak = statistics.median(speeds or [0.0]), config.runtime.matmul_rate if config.runtime else None
            cache = 8 * (config.model.layers - len(config.model.local_layers)) * config.model.kv_heads
            share = f"{speed * training_flops(config.model) / peak:.2f}" if peak else "-"
            parameters = count_parameters(config.model)["total"]
            sizes = [f"{speed:,.0f}", share, f"{parameters:,}", f"{cache * config.model.head_dim}"]
    return Trained(losses, sizes, loads)


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
