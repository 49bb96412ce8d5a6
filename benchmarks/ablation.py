"""What each part of a transformer is worth: variants trained on one text for equally many steps, side by side.

    python benchmarks/ablation.py tinyshakespeare.txt --groups positions,norms --steps 1000 --out ablation

Every variant is a run of `tinylm train` with a few flags of its own. Writes ablation.md, a table for each group, and
ablation.png, the curves of validation loss. Needs the extra [bench].
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import describe_machine, table

from tinylm.checkpoint import read_config
from tinylm.config import ModelConfig

GROUPS: dict[str, dict[str, str]] = {
    "placement in 6 layers": {
        "pre-norm": "--layers 6",
        "post-norm": "--layers 6 --norm-placement post",
        "pre-norm, no warmup": "--layers 6 --warmup-steps 0",
        "post-norm, no warmup": "--layers 6 --norm-placement post --warmup-steps 0",
    },
    "placement in 24 layers": {
        "pre-norm": "--layers 24",
        "post-norm": "--layers 24 --norm-placement post",
        "pre-norm, no warmup": "--layers 24 --warmup-steps 0",
        "post-norm, no warmup": "--layers 24 --norm-placement post --warmup-steps 0",
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
        "every second layer sees 16": "--local-window 16",
        "all layers see 16": "--local-window 16 --local-layers 0,1,2,3",
    },
    "experts": {
        "dense": "",
        "4 experts, 2 at a time, half as wide": "--experts 4 --ffn-width 176",
        "8 experts, 2 at a time, half as wide": "--experts 8 --ffn-width 176",
        "4 experts, merged": "--experts 4 --ffn-width 176 --expert-mode merge",
    },
    "warmup of Adam": {
        "with": "--optimizer adam --weight-decay 0",
        "without": "--optimizer adam --weight-decay 0 --warmup-steps 0",
    },
}


@dataclass(frozen=True)
class Trained:
    """One variant: `curve` has (step, validation loss), and `val_loss` is the full one of its best weights."""

    name: str
    val_loss: float | None
    tokens_per_second: float
    parameters: int
    cache_bytes: int
    curve: list[tuple[int, float]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"some of: {', '.join(GROUPS)} (default: all)")
    parser.add_argument("--steps", type=int, default=1000, help="default: 1000")
    parser.add_argument("--out", type=Path, default=Path("ablation"), help="a folder for runs, table and picture")
    parser.add_argument("--options", default="--size micro --batch-size 16", help="of tinylm train, for every variant")
    options = parser.parse_args(arguments)
    wanted = [name.strip() for name in options.groups.split(",")]
    if unknown := [name for name in wanted if name not in GROUPS]:
        parser.error(f"there is no group {unknown[0]!r}; there are: {', '.join(GROUPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[Trained]] = {}
    for group in wanted:
        results[group] = [
            train(name, options.corpus, options.out / _folder(group, name), f"{options.options} {flags}", options.steps)
            for name, flags in GROUPS[group].items()
        ]
        report = write_table(results, options.corpus, options.steps, options.options)
        (options.out / "ablation.md").write_text(report)
    draw(results, options.out / "ablation.png")
    print(report)


def _folder(group: str, name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in f"{group} {name}")


def train(name: str, corpus: Path, out: Path, flags: str, steps: int) -> Trained:
    """A run that diverges has no loss to show, and is a result too."""
    command = [sys.executable, "-m", "tinylm"]
    budget = ["--steps", str(steps), "--compile", "off", "--quiet", "--force", "--json", "--log-every", "10"]
    done = subprocess.run(
        [*command, "train", str(corpus), "--out", str(out), *flags.split(), *budget], stdout=subprocess.PIPE, text=True
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    val_loss = None
    if done.returncode == 0:
        scored = subprocess.run(
            [*command, "eval", "--model", str(out), "--quiet", "--json"], stdout=subprocess.PIPE, text=True, check=True
        )
        val_loss = json.loads(scored.stdout)["loss"]
    speeds = sorted(record["tokens_per_second"] for record in records if "tokens_per_second" in record)
    model = read_config(out).model
    return Trained(
        name,
        val_loss,
        speeds[len(speeds) // 2] if speeds else 0.0,
        records[-1].get("parameters", 0) if records else 0,
        cache_bytes(model),
        [(record["step"], record["val_loss"]) for record in records if "val_loss" in record and "run" not in record],
    )


def cache_bytes(model: ModelConfig) -> int:
    """What one more token adds to the keys and values that a long text needs; a rolling cache no longer grows."""
    growing = model.layers - len(model.local_layers)
    return 2 * 4 * growing * model.kv_heads * model.head_width


def write_table(results: Mapping[str, list[Trained]], corpus: Path, steps: int, options: str) -> str:
    parts = [f"{corpus.name}, {steps} steps of `tinylm train {options}`; {describe_machine(['torch'])}"]
    for group, variants in results.items():
        rows = [
            [
                one.name,
                "diverged" if one.val_loss is None else f"{one.val_loss:.4f}",
                f"{one.tokens_per_second:,.0f}",
                f"{one.parameters:,}",
                str(one.cache_bytes),
            ]
            for one in variants
        ]
        parts.append(table([group, "validation loss", "tokens/s", "parameters", "cache bytes a token"], rows))
    return "\n\n".join(parts) + "\n"


def draw(results: Mapping[str, list[Trained]], file: Path) -> None:
    """A panel for each group with the validation loss of its variants by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False)
    for panel in panels.flat[len(results) :]:
        panel.axis("off")
    for panel, (group, variants) in zip(panels.flat, results.items(), strict=False):
        for one in variants:
            panel.plot(*zip(*one.curve, strict=True), label=one.name)
        panel.set(title=group, xlabel="step", ylabel="validation loss, nats a token")
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    main()
