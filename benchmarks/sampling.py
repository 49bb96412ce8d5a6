"""Sampling on the CPU by tinylm, llama.cpp, CTranslate2 and transformers: one table of tokens per second, the share of
the memory bandwidth, and milliseconds to the first token.

    python benchmarks/sampling.py                                                                  # 10 minutes
    python benchmarks/sampling.py --models 4x128 6x384 12x768 SmolLM2-135M-Instruct.Q4_1.gguf      # 19 minutes
    python benchmarks/sampling.py --models 6x384 --kinds f32 --rounds 5                            # 1 minute

The models of the first command have random weights of preset modern and a context of 1,024; those of 12x768 have 50,257
ids, the others 65. Other models are run directories, Hugging Face folders or GGUF files; of a GGUF file, the kind
`file` is the file with its own number formats. Each program runs in a process of its own, with the fastest of its
choices (one thread or all; for llama.cpp also a cache of 16 or 32 bits), found before the rounds. All take turns, and
generate as many tokens: for one stream and for 32 after a prompt of one token, and one token after a prompt of 500.
tinylm is `tinylm sample` without further options (q8_0: `--quantize int8`) on a model that was opened before, sampling
at its default temperature, opened for texts of its default length (256 tokens), by which it chooses its engine; the
others take the likeliest token.

`of the bandwidth`: the bytes of the weights that one stream reads per second, each weight once per token, relative to
the bytes that all threads read from memory per second.
`GOMP_SPINCOUNT` is what tinylm's command line chooses for tinylm, and 10,000 for the others, unless it is set. A
program that is not installed has no row, and is named on stderr. Needs the extra [bench], and for their rows
llama-cpp-python and CTranslate2.
"""

import argparse
import json
import math
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch
from measure import Times, describe_machine, run_tinylm, speedup, table, tokens_per_second
from sampling_programs import PROGRAMS, Job, Request, as_json

from tinylm.files import SETTLED_SECONDS
from tinylm.formats.gguf_reader import open_gguf
from tinylm.formats.gguf_writer import write_gguf
from tinylm.formats.huggingface import write_folder
from tinylm.formats.imported import ForeignModel
from tinylm.kernels.openmp_spin import SPIN_COUNT, SPIN_VARIABLES, choose_spin_count
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.open_model import open_model
from tinylm.presets import make_model_config
from tinylm.run_config import SpecialTokens
from tinylm.text.tokenizer import train_char

DTYPES = {"f32": torch.float32, "f16": torch.float16, "q8_0": torch.float32}  # of the Hugging Face folder
WEIGHT_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}
FILE = "file"  # the kind of a GGUF file that is used as it is
KINDS = (*DTYPES, FILE)
PROMPT, STREAMS = 500, 32
CONTEXT = 1024
ANSWER_LIMIT = 300.0  # seconds that a program may take for a request, or to open
BASE = "llama.cpp"


@dataclass(frozen=True)
class Shape:
    """A model with random weights. tokens, batch_tokens: tokens to generate with one stream, and with each of many."""

    layers: int
    width: int
    heads: int
    vocab_size: int
    tokens: int
    batch_tokens: int


MODELS = {
    "4x128": Shape(4, 128, 4, 65, 500, 100),
    "6x384": Shape(6, 384, 6, 65, 300, 50),
    "12x768": Shape(12, 768, 12, 50_257, 48, 16),
}
OPENED = (48, 16)  # tokens and batch_tokens of other models


@dataclass(frozen=True)
class Subject:
    """A model to sample from. tokens, batch_tokens: as in Shape. gguf: the file, if the model is from a GGUF file."""

    name: str
    exported: ForeignModel
    tokens: int
    batch_tokens: int
    gguf: Path | None = None

    def kinds(self, kinds: Sequence[str]) -> list[str]:
        """Those of the number formats in which the model exists."""
        return [kind for kind in kinds if kind != FILE or self.gguf]

    def bytes_per_token(self, kind: str) -> float:
        """Bytes of the weights that a step reads: of all but an input embedding that is not the output layer."""
        config = self.exported.config
        if kind == FILE:
            assert self.gguf
            sizes = {name: info.size for name, info in open_gguf(self.gguf).header.tensors.items()}
            return sum(sizes.values()) - (0 if config.tie else sizes["token_embd.weight"])
        lookup = 0 if config.tie else config.vocab_size * config.width
        weights = sum(tensor.numel() for tensor in self.exported.tensors.values()) - lookup
        return weights * WEIGHT_BYTES[kind]

    def requests(self) -> dict[str, Request]:
        """The measured requests, by name. Their choices are set later."""
        return {
            "one": Request("", 1, 1, self.tokens),
            "many": Request("", STREAMS, 1, self.batch_tokens),
            "first": Request("", 1, min(PROMPT, self.exported.config.context - 1), 1),
        }


class Program:
    """A running program of sampling_programs.py. choices: names of its settings. missing: why it cannot run, or ""."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        answer = self._answer()
        self.choices: list[str] = answer.get("choices", [])
        self.missing: str = answer.get("missing", "")

    def seconds(self, request: Request) -> float:
        """Run a request, and return the time that it took."""
        stdin = _pipe(self._process.stdin)
        stdin.write(as_json(request) + "\n")
        stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict:
        stdout = _pipe(self._process.stdout)
        if not select.select([stdout], [], [], ANSWER_LIMIT)[0]:
            raise RuntimeError(f"{self._process.args} took longer than {ANSWER_LIMIT:.0f} s")
        if not (line := stdout.readline()):
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait(60)}")
        return json.loads(line)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextmanager
def running(name: str, job: Job) -> Iterator[Program]:
    """Start a program; it is killed at the end of the block."""
    script = Path(__file__).with_name("sampling_programs.py")
    command = [sys.executable, str(script), name, as_json(job)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(name)
    ) as process:
        try:
            yield Program(process)
        finally:
            process.kill()


def environment(name: str) -> dict[str, str]:
    """The environment variables of a program, with its OpenMP spin count."""
    values = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if not any(variable in values for variable in SPIN_VARIABLES):
        values["GOMP_SPINCOUNT"] = str(choose_spin_count() if name.startswith("tinylm") else SPIN_COUNT)
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_option(parser)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="number formats of weights")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    options = parser.parse_args(arguments)
    begun, bandwidth = time.monotonic(), memory_bandwidth()
    print(describe_machine(["torch"]))
    print(f"All threads read {bandwidth / 1e9:.1f} GB/s; the load average was {os.getloadavg()[0]:.1f}.\n", flush=True)
    rows = []
    for subject, kind, job in prepared_models(options.models, options.kinds):
        times, chosen = compare(subject, job, options.programs, options.rounds)
        limit = bandwidth / subject.bytes_per_token(kind)
        rows += [[subject.name, kind, *cells] for cells in report(subject, times, chosen, limit)]
        print(f"{subject.name}, {kind}: done after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    header = ["model", "weights", "program", "tokens/s", f"times {BASE}", "of the bandwidth"]
    header += [f"{STREAMS} streams, tokens/s", f"times {BASE}", "first token, ms", f"times {BASE}", "chosen"]
    print(table(header, rows))


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --models: names of MODELS, or paths."""
    help = f"{', '.join(MODELS)}, or paths (default: {' '.join(MODELS)})"
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help=help)


def prepared_models(names: Sequence[str], kinds: Sequence[str]) -> Iterator[tuple[Subject, str, Job]]:
    """Yield each model in each number format. The files of its job exist until the next one is yielded."""
    for name in names:
        subject = make_subject(name)
        for kind in subject.kinds(kinds):
            with tempfile.TemporaryDirectory() as folder:
                yield subject, kind, prepare(subject, kind, Path(folder))


def make_subject(name: str) -> Subject:
    """A model of MODELS with random weights and a character tokenizer that fills its vocabulary, or one at a path."""
    if name not in MODELS:
        path = Path(name)
        network, config, tokenizer, weights = open_model(path)
        assert isinstance(network, Decoder)
        tensors = dict(weights.tensors)
        exported = ForeignModel(config.family, config.model, tensors, tokenizer.to_str(), SpecialTokens(), None)
        return Subject(path.stem, exported, *OPENED, gguf=path if path.suffix == ".gguf" else None)
    shape = MODELS[name]
    tokenizer = train_char("".join(map(chr, range(0x20000, 0x20000 + shape.vocab_size - 1))))  # and the end of text
    sizes = {"layers": shape.layers, "heads": shape.heads, "width": shape.width, "context": CONTEXT}
    config = make_model_config(preset="modern", size="small", vocab_size=tokenizer.vocab_size, **sizes)
    tensors = dict(build_model(config).state_dict())
    exported = ForeignModel(None, config, tensors, tokenizer.to_str(), SpecialTokens(), None)
    return Subject(name, exported, shape.tokens, shape.batch_tokens)


def prepare(subject: Subject, kind: str, folder: Path) -> Job:
    """Write the model for all programs, and let tinylm convert it, as its first command does."""
    exported, config = subject.exported, subject.exported.config
    job = Job(str(folder), kind, config.vocab_size, config.context, torch.get_num_threads())
    if kind == FILE:
        assert subject.gguf
        shutil.copyfile(subject.gguf, job.gguf)
    else:
        write_gguf(job.gguf, exported, kind)
        job.model.mkdir()
        write_folder(job.model, exported, DTYPES[kind])
    time.sleep(SETTLED_SECONDS)  # a conversion is recorded only for files that have not changed for this long
    quantize = ["--quantize", "int8"] if kind == "q8_0" else []
    run_tinylm(["sample", "-m", str(job.model), "-n", "1", "--device", "cpu", "--quiet", *quantize])
    return job


Run = Callable[[Request], float]


def compare(
    subject: Subject, job: Job, names: Sequence[str], rounds: int
) -> tuple[dict[str, Times], dict[str, list[str]]]:
    """The seconds of each round by request and program, and the choices of each program."""
    with ExitStack() as stack:
        programs = {name: stack.enter_context(running(name, job)) for name in names}
        for program in programs.values():
            if program.missing:
                print(f"{subject.name}, {job.kind}: {program.missing}.", file=sys.stderr, flush=True)
        programs = {name: program for name, program in programs.items() if not program.missing}
        times: dict[str, Times] = {}
        chosen: dict[str, list[str]] = {name: [] for name in programs}
        for work, request in subject.requests().items():
            best = {name: fastest(program, request) for name, program in programs.items()}
            times[work] = {name: [] for name in programs}
            for _ in range(rounds):
                for name, program in programs.items():
                    times[work][name].append(program.seconds(best[name]))
            for name, choice in best.items():
                chosen[name].append(choice.choice)
        return times, chosen


def fastest(program: Program, request: Request) -> Request:
    """The request with the program's fastest choice, by one timing each after a warm-up."""
    requests = [replace(request, choice=choice) for choice in program.choices]
    for warm_up in requests:
        program.seconds(replace(warm_up, tokens=1))
    return min(requests, key=program.seconds)


def report(
    subject: Subject, times: Mapping[str, Times], chosen: Mapping[str, Sequence[str]], limit: float
) -> Iterator[list[str]]:
    """Yield the cells of each program. limit: tokens per second at which the weights are read at the full bandwidth."""
    for name in times["one"]:
        rate = subject.tokens / statistics.median(times["one"][name])
        yield [
            name,
            tokens_per_second(times["one"], name, subject.tokens),
            _ratio(times["one"], name),
            f"{rate / limit:.0%}",
            tokens_per_second(times["many"], name, subject.batch_tokens * STREAMS),
            _ratio(times["many"], name),
            f"{statistics.median(times['first'][name]) * 1e3:.1f}",
            _ratio(times["first"], name),
            "; ".join(dict.fromkeys(filter(None, chosen[name]))),
        ]


def _ratio(times: Times, name: str) -> str:
    return str(speedup(times, name, BASE)) if BASE in times and name != BASE else ""


def memory_bandwidth(size: int = 1 << 28, rounds: int = 5) -> float:
    """Bytes per second that all threads read from memory: the fastest sum of a large tensor. size: of it in bytes."""
    numbers, best = torch.ones(size // 4), math.inf
    for _ in range(rounds):
        begun = time.perf_counter()
        numbers.sum()
        best = min(best, time.perf_counter() - begun)
    return size / best


if __name__ == "__main__":
    main()
