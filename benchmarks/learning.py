"""Validation loss after `tinylm train TEXT --time T`, by default without other options.

    python benchmarks/learning.py tinyshakespeare.txt --times 15s 80s 3m 6m --seeds 3
    python benchmarks/learning.py a.txt b.txt --times 80s --presets modern gpt2

The command splits each text. Models are evaluated on all of the validation part, in windows of their own context that
do not overlap. Bits per byte are comparable between tokenizers.

To compare machines: `TFLOP` is what the training computed (6 FLOPs per matrix parameter and token, causal attention,
and the products of Muon), and `of the peak` its share of what large matrix products in the number format of the run
would have computed in the time of the command. With --times, the results depend on the speed of the machine.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ablation import format_losses
from measure import describe_machine, run_tinylm, table

from tinylm.config.training import MUON_OPTIMIZERS, mean_share
from tinylm.planning.plan_request import muon_flops, training_flops
from tinylm.run_directory.loading import read_config, summarise


def learn(text: Path, words: Sequence[str], seed: int, run: Path) -> dict[str, float]:
    """Train and evaluate a run. Returns the seconds of the whole command, parameters, passes over the training text,
    loss on all validation text (nats per token), bits per byte, the FLOPs of all training steps, and their share of
    those that large matrix products would have computed in that time.
    """
    started = time.monotonic()
    run_tinylm(["train", text, *words, "--seed", seed, "--out", run, "--quiet", "--force"])
    seconds = time.monotonic() - started
    score = json.loads(run_tinylm(["eval", "--model", run, "--quiet", "--json"]))
    config, summary = read_config(run), summarise(run)
    assert config.training is not None and config.data is not None
    trained = summary["step"] * config.training.batch_size * config.model.context
    length = config.model.context * mean_share(config.training.sequence_growth)
    flops = trained * training_flops(config.model, length)
    if config.training.optimizer in MUON_OPTIMIZERS:
        flops += summary["step"] * muon_flops(config.model)
    assert config.runtime is not None and config.runtime.matmul_rate is not None
    found = {"seconds": seconds, "parameters": summary["parameters"], "passes": trained / config.data.train_tokens}
    share = flops / seconds / config.runtime.matmul_rate
    return {**found, "loss": score["loss"], "bits": score["bits_per_byte"], "flops": flops, "share": share}


def row(text: Path, preset: str, length: str, learned: Sequence[Mapping[str, float]]) -> list[str]:
    """The row of the table for the runs of all seeds."""
    median = {name: statistics.median(one[name] for one in learned) for name in learned[0]}
    cells = [f"{median['seconds']:.1f}", f"{median['parameters'] / 1e6:.2f}", f"{median['passes']:.2g}"]
    cells += [f"{median['flops'] / 1e12:.3g}", f"{median['share']:.2f}"]
    return [
        text.name,
        preset,
        length,
        *cells,
        *(format_losses([one[name] for one in learned]) for name in ("loss", "bits")),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+")
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument("--times", nargs="+", default=["80s"], help="of the whole command (default: 80s)")
    budgets.add_argument("--steps", nargs="+", metavar="N", help="optimizer steps of a run, instead of its time")
    parser.add_argument("--presets", nargs="+", default=["modern"], help="default: modern")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="the others follow (default: 0)")
    parser.add_argument("--options", default="", help="more flags of tinylm train")
    options = parser.parse_args(arguments)
    flag, lengths = ("--time", options.times) if options.steps is None else ("--steps", options.steps)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows = []
    with tempfile.TemporaryDirectory() as home:
        for text in options.texts:
            for preset, length in itertools.product(options.presets, lengths):
                words = ["--preset", preset, flag, length, *options.options.split()]
                learned = [learn(text, words, seed, Path(home) / f"{seed}") for seed in seeds]
                rows.append(row(text, preset, length, learned))
                print(f"{text.name}, {preset}, {length}: {rows[-1][-2]}", file=sys.stderr)
    print(f"{describe_machine(['torch'])}\n")
    names = ["text", "preset", "time or steps", "seconds", "million parameters", "passes", "TFLOP", "of the peak"]
    print(table([*names, "nats per token", "bits per byte"], rows))


if __name__ == "__main__":
    main()
