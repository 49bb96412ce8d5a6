"""Fine-tuning methods compared on a second text: loss, cost and stability, and the decoding speed with adapters.

    python benchmarks/finetuning.py tinyshakespeare.txt german.txt --steps 300

Trains a dense base model and one with experts on the first text, with byte-level BPE, which can encode any second text;
then fine-tunes them by each method on the second text for the same number of steps. Prints tables of the methods, of
their stability over seeds and learning rates, and of decoding. Linux only, because of the memory measurement.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ablation import format_losses
from measure import describe_machine, run_tinylm, speedup, table, take_turns, tokens_per_second
from memory import run_and_measure_memory

from tinylm.adapters.load import AdapterSpec, load_adapted_model
from tinylm.adapters.lora import merge_lora
from tinylm.errors import DivergedError
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import generate
from tinylm.generation.sampler import Sampler
from tinylm.model.decoder import Decoder
from tinylm.model.stack import Transformer
from tinylm.planning.schedule import choose_learning_rate
from tinylm.run_directory.loading import load_model, read_config, summarise
from tinylm.run_directory.metrics_log import read_metrics

RANKS = (1, 2, 4, 8, 16, 32)
LORA = "finetune-lora {second} -m {base}"
DENSE = {
    "full": "train {second} --init-from {base}",
    **{f"LoRA, rank {rank}": f"{LORA} --rank {rank}" for rank in RANKS},
    "LoRA, rank 8, shared B": f"{LORA} --rank 8 --share-b",
    "LoRA, rank 8, all matrices": f"{LORA} --rank 8 --target all",
    "bottleneck of 16": "finetune-adapter {second} -m {base} --bottleneck 16",
}
MIXED = {
    "full": "train {second} --init-from {base}",
    "LoRA on attention, rank 8": f"{LORA} --rank 8",
    "LoRA on every expert, rank 8": f"{LORA} --rank 8 --target experts",
    "LoRA on every expert, rank 8, shared B": f"{LORA} --rank 8 --target experts --share-b",
    "LoRA on the router, rank 4": f"{LORA} --rank 4 --target router",
    "LoRA on attention and router, rank 8": f"{LORA} --rank 8 --target attention,router",
}
TARGETS = ("attention", "mlp", "all")
RATES = (0.001, 0.01, 0.1)
SEEDS = (0, 1, 2)
RATE_FACTORS = (0.3, 1, 3)  # times the default rate
BASE_OPTIONS, EXPERT_OPTIONS = "--size micro --context 128 --batch-size 16", "--experts 4 --ffn-width 176"


@dataclass(frozen=True)
class Tuned:
    """The result of one run.

    parameters: number of trained parameters. memory: peak anonymous memory of the processes in bytes. milliseconds:
    median per step. loss: on the held-out end of the second text; None if training diverged.
    """

    parameters: int
    memory: int
    milliseconds: float
    loss: float | None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--base-steps", type=int, default=1500, help="default: 1500")
    parser.add_argument("--steps", type=int, default=300, help="steps of each method (default: 300)")
    parser.add_argument(
        "--options", default=BASE_OPTIONS, help=f"flags of tinylm train for both bases (default: {BASE_OPTIONS})"
    )
    parser.add_argument(
        "--experts", default=EXPERT_OPTIONS, help=f"more flags for the second base (default: {EXPERT_OPTIONS})"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs (default: a temporary one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        home = options.out or Path(temporary)
        bench = Bench(home, *split(options.second, home), options.steps)
        dense = bench.train("dense", f"train {options.first} {options.options} --steps {options.base_steps}")
        mixed = bench.train(
            "mixed", f"train {options.first} {options.options} {options.experts} --steps {options.base_steps}"
        )
        print(describe_machine(["torch", "tokenizers"]))
        for name, base, methods in (("dense base", dense, DENSE), ("base with experts", mixed, MIXED)):
            print("\n" + methods_table(bench, name, base, methods), flush=True)
        print("\n" + stability_table(bench, dense), flush=True)
        print("\n" + decoding_table(dense, bench.folder(dense, "LoRA, rank 8")))


def split(text: Path, home: Path) -> tuple[Path, Path]:
    """Write the first 90 % of a text's lines and the rest to two files."""
    lines = text.read_text(encoding="utf-8").splitlines(keepends=True)
    end = len(lines) * 9 // 10
    parts = (home / "second.txt", home / "held-out.txt")
    home.mkdir(parents=True, exist_ok=True)
    for path, part in zip(parts, (lines[:end], lines[end:]), strict=True):
        path.write_text("".join(part), encoding="utf-8")
    return parts


class Bench:
    """Trains and evaluates runs with the command line, each in a folder of its own in `home`."""

    def __init__(self, home: Path, second: Path, held_out: Path, steps: int) -> None:
        self.home = home
        self.second = second
        self.held_out = held_out
        self.steps = steps

    def train(self, name: str, command: str) -> Path:
        run = self.home / name
        words = [*command.split(), "--tokenizer", "bpe", "--vocab-size", "1024", "--out", str(run)]
        run_tinylm([*words, "--compile", "off", "--quiet", "--force"])
        return run

    def folder(self, base: Path, method: str) -> Path:
        return self.home / "".join(letter if letter.isalnum() else "-" for letter in f"{base.name} {method}")

    def tune(self, base: Path, method: str, command: str) -> Tuned:
        run = self.folder(base, method)
        words = command.format(second=self.second, base=base).split()
        words += ["--steps", str(self.steps), "--batch-size", "16", "--log-every", "10", "--out", str(run)]
        words += ["--val-data", str(self.held_out)]
        full = [sys.executable, "-m", "tinylm", *words, "--compile", "off", "--quiet", "--force"]
        try:
            _, memory = run_and_measure_memory(full, self.home)
        except subprocess.CalledProcessError as error:
            if error.returncode != DivergedError.exit_code:
                raise
            return Tuned(0, 0, 0.0, None)
        seconds = [record["seconds"] for record in read_metrics(run) if "loss" in record]
        steps = [(later - earlier) / 10 for earlier, later in itertools.pairwise(seconds)]
        adapter = words[0] != "train"
        which = ["--adapter", str(run), "--model", str(base)] if adapter else ["--model", str(run)]
        return Tuned(summarise(run)["parameters"], memory, 1000 * statistics.median(steps), self.score(*which))

    def score(self, *which: str) -> float:
        """The loss on the held-out part of the second text. which: flags that choose the model."""
        return json.loads(run_tinylm(["eval", str(self.held_out), *which, "--quiet", "--json"]))["loss"]


def methods_table(bench: Bench, name: str, base: Path, methods: Mapping[str, str]) -> str:
    """Costs at the default learning rate, and the loss at each rate."""
    rows = [["untuned", "0", "", "", *[f"{bench.score('--model', str(base)):.4f}"] * len(RATE_FACTORS)]]
    width = read_config(base).model.width
    for method, command in methods.items():
        tuned = bench.tune(base, method, command)
        adapter = read_config(bench.folder(base, method)).adapter
        rate = choose_learning_rate("modern" if adapter is None else adapter.kind, width, adapter)
        losses = [
            tuned.loss
            if factor == 1
            else bench.tune(base, f"{method} {factor}", f"{command} --lr {rate * factor:g}").loss
            for factor in RATE_FACTORS
        ]
        memory = f"{tuned.memory / 2**20:,.0f}"
        costs = [f"{tuned.parameters:,}", memory, f"{tuned.milliseconds:.0f}"]
        rows.append([method, *costs, *(format_losses([loss]) for loss in losses)])
    costs_header = ["trained parameters", "memory, MB", "ms per step"]
    header = [name, *costs_header, *(f"loss at {factor:g} x rate" for factor in RATE_FACTORS)]
    return table(header, rows)


def stability_table(bench: Bench, base: Path) -> str:
    rows = []
    for target in TARGETS:
        cells = []
        for rate in RATES:
            flags = f"{LORA} --rank 8 --target {target} --lr {rate}"
            losses = [bench.tune(base, f"{target} {rate} {seed}", f"{flags} --seed {seed}").loss for seed in SEEDS]
            cells.append(format_losses(losses))
        rows.append([target, *cells])
    return table(["LoRA of rank 8 on", *(f"three seeds at a rate of {rate:g}" for rate in RATES)], rows)


def decoding_table(base: Path, adapter: Path, tokens: int = 100, rounds: int = 5) -> str:
    """Decoding speed of one stream: the base model, with an adapter, and with the adapter merged."""
    adapted, merged = (load_adapted_model([AdapterSpec(adapter)], base, "cpu")[0] for _ in range(2))
    merge_lora(merged)
    models = {"base": load_model(base)[0], "base and adapter": adapted, "adapter merged": merged}

    def decode(model: Transformer) -> Callable[[], object]:
        assert isinstance(model, Decoder)

        def run() -> None:
            sampler = Sampler(SamplingConfig(0.0), 0, 1, model.vocab_size)
            for _, _ in zip(range(tokens), generate(model, [[0]], sampler, tokens), strict=True):
                pass

        return run

    times = take_turns({name: decode(model) for name, model in models.items()}, rounds)
    rows = [[name, tokens_per_second(times, name, tokens), str(speedup(times, name, base="base"))] for name in models]
    return table(["decoding", "tokens/s", "times the base"], rows)


if __name__ == "__main__":
    main()
