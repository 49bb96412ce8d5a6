"""Sampling on the CPU by tinylm beside llama.cpp itself: tokens per second, and milliseconds to the first token.

    python benchmarks/sampling.py --programs tinylm llama.cpp                                      # 7 minutes
    python benchmarks/sampling.py --models 4x128 6x384 12x768 SmolLM2-135M-Instruct.Q4_1.gguf      # 15 minutes
    python benchmarks/sampling.py --models 6x384 --kinds f32 --rounds 5                            # 1 minute

The models of the first command have random weights of preset modern and a context of 1,024; those of 12x768 have 50,257
ids, the others 65. Other models are run directories, Hugging Face folders or GGUF files; of a GGUF file, the kind
`file` is the file with its own number formats. All programs read the same GGUF file, each in a process of its own,
since several OpenMP runtimes in one process slow each other down. They take turns, and generate as many tokens: for one
stream and for 32 after a prompt of one token, and one token after a prompt of 500. tinylm is `tinylm sample`, without
further options or with `--engine torch`, on a model that was opened before, sampling at its default temperature.
llama.cpp is the package that tinylm uses, called directly, taking the likeliest token, with the fastest of its choices
(one thread or all, a cache of 16 or 32 bits), found before the rounds. Needs Linux and the package xllamacpp.
"""

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import Times, ask, describe_machine, run_tinylm, running, speedup, table, tokens_per_second

FILE = "file"  # the kind of a GGUF file that is used as it is
KINDS = ("f32", "f16", "q8_0", FILE)
PROMPT, STREAMS = 500, 32
CONTEXT = 1024
ANSWER_LIMIT = 300.0  # seconds that a program may take for a request, or to open
BASE = "llama.cpp"
Generate = Callable[[int, list[int], int], object]  # rows, the prompt of each, and tokens to generate for each
Choices = dict[str, Generate]

MODELS = {  # layers, width, heads, size of the vocabulary, and tokens to generate with one stream and with each of many
    "4x128": (4, 128, 4, 65, 500, 100),
    "6x384": (6, 384, 6, 65, 300, 50),
    "12x768": (12, 768, 12, 50_257, 48, 16),
}
OPENED = (48, 16)  # tokens to generate with other models


@dataclass(frozen=True)
class Job:
    """A model in one number format. tokens, batch_tokens: to generate with one stream, and with each of many."""

    gguf: str
    vocab_size: int
    context: int
    threads: int
    tokens: int
    batch_tokens: int

    def requests(self) -> dict[str, "Request"]:
        """The measured requests, by name. Their choices are set later."""
        first = Request("", 1, min(PROMPT, self.context - 1), 1)
        return {
            "one": Request("", 1, 1, self.tokens),
            "many": Request("", STREAMS, 1, self.batch_tokens),
            "first": first,
        }


@dataclass(frozen=True)
class Request:
    """A request to generate `tokens` tokens for each of `rows` sequences after a prompt of `prompt` tokens."""

    choice: str
    rows: int
    prompt: int
    tokens: int


def main(arguments: Sequence[str] | None = None) -> None:
    from tinylm.kernels.process import set_spin_count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help = f"{', '.join(MODELS)}, or paths (default: {' '.join(MODELS)})"
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help=help)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="number formats of weights")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    set_spin_count()  # as tinylm's command line, for all programs
    if options.worker:
        serve(*options.worker)
        return
    begun, rows = time.monotonic(), []
    for name in options.models:
        for kind in (kind for kind in options.kinds if kind != FILE or name.endswith(".gguf")):
            with tempfile.TemporaryDirectory() as folder:
                job = prepare(name, kind, Path(folder) / "model.gguf")
                times, chosen = compare(job, options.programs, options.rounds)
            rows += [[Path(name).stem, kind, *cells] for cells in report(job, times, chosen)]
            print(f"{name}, {kind}: done after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(describe_machine(["torch"]))
    header = ["model", "weights", "program", "tokens/s", f"times {BASE}"]
    header += [f"{STREAMS} streams, tokens/s", f"times {BASE}", "first token, ms", f"times {BASE}", "chosen"]
    print(table(header, rows))


def prepare(name: str, kind: str, gguf: Path) -> Job:
    """Write the model as a GGUF file, and let tinylm convert it, as its first command does."""
    import torch

    from tinylm.config.presets import make_model_config
    from tinylm.config.run import SpecialTokens
    from tinylm.formats.family import ForeignModel
    from tinylm.formats.gguf_model import write_gguf
    from tinylm.models.open import open_model
    from tinylm.system.files import SETTLED_SECONDS
    from tinylm.text.tokenizer import train_char
    from tinylm.transformer.build import build_model

    if name in MODELS:
        layers, width, heads, vocab_size, *lengths = MODELS[name]
        letters = train_char("".join(map(chr, range(0x20000, 0x20000 + vocab_size - 1))))  # and the end of text
        sizes: dict[str, Any] = {"layers": layers, "heads": heads, "width": width, "context": CONTEXT}
        model = make_model_config(preset="modern", size="small", vocab_size=letters.vocab_size, **sizes)
        exported = ForeignModel(
            None, model, dict(build_model(model).state_dict()), letters.to_str(), SpecialTokens(), None
        )
    else:
        _, config, tokenizer, weights = open_model(Path(name))
        tensors = dict(weights.tensors)
        exported = ForeignModel(config.family, config.model, tensors, tokenizer.to_str(), SpecialTokens(), None)
        lengths = list(OPENED)
    if kind == FILE:
        shutil.copyfile(name, gguf)
    else:
        write_gguf(gguf, exported, kind)
    time.sleep(SETTLED_SECONDS)  # a conversion is recorded only for files that have not changed for this long
    run_tinylm(["sample", "-m", gguf, "-n", 1, "--device", "cpu", "--quiet"])
    return Job(str(gguf), exported.config.vocab_size, exported.config.context, torch.get_num_threads(), *lengths)


def compare(job: Job, names: Sequence[str], rounds: int) -> tuple[dict[str, Times], dict[str, list[str]]]:
    """The seconds of each round by request and program, and the choices of each program."""
    with ExitStack() as stack:
        programs, choices = {}, {}
        for name in names:
            command = [sys.executable, __file__, "--worker", name, json.dumps(asdict(job))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            programs[name] = stack.enter_context(running(command, **pipes))
            choices[name] = ask(programs[name], limit=ANSWER_LIMIT)["choices"]

        def seconds(name: str, request: Request) -> float:
            return float(ask(programs[name], json.dumps(asdict(request)), ANSWER_LIMIT)["seconds"])

        times: dict[str, Times] = {}
        chosen: dict[str, list[str]] = {name: [] for name in programs}
        for work, request in job.requests().items():
            best = {}
            for name in programs:
                requests = [replace(request, choice=choice) for choice in choices[name]]
                for warm_up in requests:
                    seconds(name, replace(warm_up, tokens=1))
                best[name] = min(requests, key=functools.partial(seconds, name))
                chosen[name].append(best[name].choice)
            times[work] = {name: [] for name in programs}
            for _ in range(rounds):
                for name in programs:
                    times[work][name].append(seconds(name, best[name]))
        return times, chosen


def report(job: Job, times: Mapping[str, Times], chosen: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """Yield the cells of each program."""
    for name in times["one"]:
        peers = name != BASE and BASE in times["one"]
        one, many, first = (str(speedup(times[work], name, BASE)) if peers else "" for work in ("one", "many", "first"))
        alone = tokens_per_second(times["one"], name, job.tokens)
        streams = tokens_per_second(times["many"], name, job.batch_tokens * STREAMS)
        milliseconds = f"{statistics.median(times['first'][name]) * 1e3:.1f}"
        choices = "; ".join(dict.fromkeys(filter(None, chosen[name])))
        yield [name, alone, one, streams, many, milliseconds, first, choices]


# The programs, each in a process of its own.


def tinylm(engine: str, job: Job) -> Choices:
    """`tinylm sample` from an open model, sampling at its default temperature; it chooses its threads itself."""
    from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
    from tinylm.generation.llama_cpp import LlamaCpp
    from tinylm.generation.prompts import EncodedPrompt
    from tinylm.models.load import open_generator
    from tinylm.reporter import SilentReporter

    model = open_generator(Path(job.gguf), SpeedConfig(engine=engine), device="cpu", reporter=SilentReporter())
    if isinstance(model.engine, LlamaCpp):  # all programs generate the same number of tokens
        model.engine.excluded.append(model.tokenizer.end_of_text_id)
    model.tokenizer.stop_ids = frozenset()

    def generate(rows: int, prompt: list[int], tokens: int) -> None:
        config = GenerationConfig(max_tokens=tokens, num_samples=rows, seed=0, engine=engine)
        samples = model.continue_encoded(EncodedPrompt("", prompt, prompt), config).run()
        assert [sample.tokens for sample in samples] == [tokens] * rows

    return {"": generate}


def llama_cpp(job: Job) -> Choices:
    """llama.cpp by the functions of the package xllamacpp, taking the likeliest token: with its default cache (16 bits,
    automatic flash attention) and with one of 32 bits without flash attention, which tinylm uses for f32 weights.
    """
    import xllamacpp as library

    folder = tempfile.mkdtemp()

    @functools.cache
    def server(threads: int, exact: bool, rows: int) -> Any:
        parameters = library.CommonParams()
        parameters.model.path, parameters.n_parallel = job.gguf, rows
        parameters.hostnames = [f"{folder}/{threads}-{exact}-{rows}.sock"]  # it always listens
        parameters.n_ctx = rows * min(job.context, 1024)
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.fit_params, parameters.verbosity = False, -1
        if exact:
            parameters.cache_type_k = parameters.cache_type_v = library.ggml_type.GGML_TYPE_F32
            parameters.flash_attn_type = library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return library.Server(parameters)

    def generate(threads: int, exact: bool, rows: int, prompt: list[int], tokens: int) -> None:
        request = {"prompt": prompt, "n": rows, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = server(threads, exact, rows).handle_completions(request | {"cache_prompt": False})
        assert len(answer["choices"]) == rows, answer

    return {
        f"{threads} threads, {'32' if exact else '16'}-bit cache": functools.partial(generate, threads, exact)
        for threads in sorted({1, job.threads})
        for exact in (False, True)
    }


PROGRAMS: dict[str, Callable[[Job], Choices]] = {
    "tinylm": functools.partial(tinylm, "auto"),
    "tinylm --engine torch": functools.partial(tinylm, "torch"),
    "llama.cpp": llama_cpp,
}


def serve(name: str, job_text: str) -> None:
    """Open the program, and write the names of its choices as a line of JSON. Then answer each line of stdin, a
    `Request`, with the seconds that it took.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    job = Job(**json.loads(job_text))
    choices = PROGRAMS[name](job)
    print(json.dumps({"choices": list(choices)}), file=answers, flush=True)
    for line in sys.stdin:
        request = Request(**json.loads(line))
        # Without the first 16 ids (or half of a small vocabulary), which are often special tokens
        low = min(16, job.vocab_size // 2)
        prompt = np.random.default_rng(0).integers(low, job.vocab_size, request.prompt).tolist()
        begun = time.perf_counter()
        choices[request.choice](request.rows, prompt, request.tokens)
        print(json.dumps({"seconds": time.perf_counter() - begun}), file=answers, flush=True)


if __name__ == "__main__":
    main()
