"""Start-up time: tinylm --help and the first character of tinylm sample, compared with importing torch.

    python benchmarks/startup.py --rounds 5

Whole processes take turns. The model has random weights, about ten million in its default shape.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure import add_options, chosen_shape, describe_machine, speedup, table, take_turns

from tinylm.model.build import build_model
from tinylm.run_config import RunConfig, TokenizerConfig
from tinylm.run_directory.directory import RunDirectory
from tinylm.text.tokenizer import train_char

TORCH, HELP, FIRST, FIFTY = "import torch", "tinylm --help", "first character of a sample", "50 tokens, whole process"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=256)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        write_run(path, options)
        command = [sys.executable, "-m", "tinylm"]
        sample = [*command, "sample", "--model", str(path), "--seed", "0", "--quiet"]
        times = take_turns(
            {
                TORCH: lambda: run([sys.executable, "-c", "import torch"]),
                HELP: lambda: run([*command, "--help"]),
                FIRST: lambda: first_byte([*sample, "--max-tokens", "1000"]),
                FIFTY: lambda: run([*sample, "--max-tokens", "50"]),
            },
            options.rounds,
            options.warmup,
        )
    base = statistics.median(times[TORCH])
    rows = [
        [name, f"{statistics.median(times[name]):.2f}", f"{statistics.median(times[name]) - base:+.2f}", ratio]
        for name, ratio in ((name, f"{1 / speedup(times, name, TORCH).median:.2f}") for name in times)
    ]
    print(describe_machine(["torch"]))
    print(table(["process", "seconds", f"after {TORCH}", f"times {TORCH}"], rows))


def write_run(path: Path, options: argparse.Namespace) -> None:
    """Write a run directory with random weights and a character tokenizer that fills the vocabulary."""
    tokenizer = train_char("\n" + "".join(map(chr, range(32, 32 + options.vocab_size - 2))))
    shape = chosen_shape(options, "modern")
    config = RunConfig.new(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256))
    directory = RunDirectory.create(path, config, tokenizer)
    directory.save_best(dict(build_model(shape).state_dict()), config, 0, None)
    directory.commit()


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def first_byte(command: Sequence[str]) -> None:
    """Run a command until its first byte on stdout, and kill it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.read(1):
            raise RuntimeError(f"{' '.join(command)} printed nothing")
        process.kill()


if __name__ == "__main__":
    main()
