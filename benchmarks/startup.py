"""Start-up time: tinylm --help and the first character of tinylm sample, beside `import torch` and llama-cpp-python.

    python benchmarks/startup.py --rounds 5
    python benchmarks/startup.py --rounds 5 --model SmolLM2-135M-Instruct.Q4_1.gguf    # a run directory or GGUF file

Whole processes take turns. The model has random weights, about ten million in its default shape, unless --model is
given. With llama-cpp-python, `tinylm sample` is measured by torch and from the file that an earlier command converted,
beside a program of a few lines that opens that file by llama-cpp-python; the second table has the parts of tinylm's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from measure import add_options, chosen_shape, describe_machine, speedup, table, take_turns

from tinylm.files import SETTLED_SECONDS
from tinylm.generation.llama_cpp import import_llama_cpp
from tinylm.model.build import build_model
from tinylm.run_config import RunConfig, TokenizerConfig
from tinylm.run_directory.directory import RunDirectory
from tinylm.text.tokenizer import train_char

LIMIT = 600.0  # seconds that one process may take
TORCH, HELP, FIRST, FIFTY = "import torch", "tinylm --help", "first character of a sample", "50 tokens, whole process"
PEER = """
import sys
from llama_cpp import Llama
for part in Llama(sys.argv[1], verbose=False, n_ctx=256)([1], max_tokens=1000, stream=True):
    print(part["choices"][0]["text"], end="", flush=True)
"""
PARTS = """
import json, sys, time
from pathlib import Path
laps = {"Python": time.time() - float(sys.argv[2])}
def lap(name):
    global begun
    laps[name], begun = time.time() - begun, time.time()
begun = time.time()
import tinylm.cli
lap("command line")
from tinylm.console import Console
from tinylm.open_generator import SpeedConfig, conversion_key, open_converted
lap("modules of generation")
from tinylm.generation.llama_cpp import import_llama_cpp
import_llama_cpp()
lap("llama.cpp's module")
path = Path(sys.argv[1])
model = open_converted(conversion_key(path, "auto", "auto", "none"), SpeedConfig(), [], Console())
lap("opening")
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.generation_config import GenerationConfig
model.continue_encoded(EncodedPrompt("", [], [1]), GenerationConfig(max_tokens=1)).run()
lap("first token")
print(json.dumps(laps))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=256)
    parser.add_argument("--model", type=Path, help="a run directory or GGUF file (default: random weights)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TINYLM_CACHE=f"{folder}/cache"):
        path = options.model or Path(folder) / "run"
        if options.model is None:
            write_run(path, options)
        command = [sys.executable, "-m", "tinylm"]
        sample = [*command, "sample", "--model", str(path), "--seed", "0", "--quiet"]
        by_torch = [*sample, "--engine", "torch"]
        functions = {
            TORCH: lambda: run([sys.executable, "-c", "import torch"]),
            HELP: lambda: run([*command, "--help"]),
            FIRST: lambda: first_byte([*by_torch, "--max-tokens", "1000"]),
            FIFTY: lambda: run([*by_torch, "--max-tokens", "50"]),
        }
        has_llama_cpp = import_llama_cpp() is not None
        if has_llama_cpp:
            time.sleep(SETTLED_SECONDS)  # a conversion is recorded only for files that have not changed for this long
            run([*sample, "--max-tokens", "1"])
            (converted,) = (Path(folder) / "cache").glob("gguf/*.gguf")
            functions[f"{FIRST}, llama.cpp"] = lambda: first_byte([*sample, "--max-tokens", "1000"])
            functions[f"{FIFTY}, llama.cpp"] = lambda: run([*sample, "--max-tokens", "50"])
            functions["llama-cpp-python, first character"] = lambda: first_byte(
                [sys.executable, "-c", PEER, str(converted)]
            )
        times = take_turns(functions, options.rounds, options.warmup)
        parts = [measure_parts(path) for _ in range(options.rounds)] if has_llama_cpp else []
    base = statistics.median(times[TORCH])
    rows = [
        [name, f"{statistics.median(times[name]):.2f}", f"{statistics.median(times[name]) - base:+.2f}", ratio]
        for name, ratio in ((name, f"{1 / speedup(times, name, TORCH).median:.2f}") for name in times)
    ]
    print(describe_machine(["torch"]))
    print(table(["process", "seconds", f"minus {TORCH}", f"times {TORCH}"], rows))
    if parts:
        medians = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
        print(table(["part", "seconds"], [[name, f"{seconds:.3f}"] for name, seconds in medians.items()]))


def write_run(path: Path, options: argparse.Namespace) -> None:
    """Write a run directory with random weights and a character tokenizer that fills the vocabulary."""
    tokenizer = train_char("\n" + "".join(map(chr, range(32, 32 + options.vocab_size - 2))))
    shape = chosen_shape(options, "modern")
    config = RunConfig.new(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256))
    directory = RunDirectory.create(path, config, tokenizer)
    directory.save_best(dict(build_model(shape).state_dict()), config, 0, None)
    directory.commit()


def run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)


def first_byte(command: Sequence[str]) -> None:
    """Run a command until its first byte on stdout, and kill it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        timer = threading.Timer(LIMIT, process.kill)
        timer.start()
        try:
            if not process.stdout.read(1):
                raise RuntimeError(f"{' '.join(command)} printed nothing")
        finally:
            timer.cancel()
            process.kill()


def measure_parts(path: Path) -> dict[str, float]:
    """The seconds of the parts of a start from a converted file, in a process of its own."""
    command = [sys.executable, "-c", PARTS, str(path), str(time.time())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    return dict(json.loads(done.stdout))


if __name__ == "__main__":
    main()
