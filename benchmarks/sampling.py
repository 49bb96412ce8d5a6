"""Sampling on the CPU by tinylm, llama.cpp and transformers: tokens per second, and milliseconds to the first token.

    python benchmarks/sampling.py                                                                  # 10 minutes
    python benchmarks/sampling.py --models 4x128 6x384 12x768 SmolLM2-135M-Instruct.Q4_1.gguf      # 19 minutes
    python benchmarks/sampling.py --models 6x384 --kinds f32 --rounds 5                            # 1 minute

The models of the first command have random weights of preset modern and a context of 1,024; those of 12x768 have 50,257
ids, the others 65. Other models are run directories, Hugging Face folders or GGUF files; of a GGUF file, the kind
`file` is the file with its own number formats. Each program runs in a process of its own, since several OpenMP runtimes
in one process slow each other down, with the fastest of its choices (one thread or all; for llama.cpp also a cache of
16 or 32 bits), found before the rounds. All take turns, and generate as many tokens: for one stream and for 32 after a
prompt of one token, and one token after a prompt of 500. tinylm is `tinylm sample` without further options (q8_0:
`--quantize int8`) on a model that was opened before, sampling at its default temperature; the others take the
likeliest token. llama.cpp is the package that tinylm uses, called directly.


`of the bandwidth`: the bytes of the weights that one stream reads per second, each weight once per token, relative to
the bytes that all threads read from memory per second.
`GOMP_SPINCOUNT` is that of tinylm's command line for all programs, unless it is set. A program that is not installed
has no row, and is named on stderr. Needs the extra [bench].
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
from measure import (
    Times,
    ask,
    describe_machine,
    memory_bandwidth,
    run_tinylm,
    running,
    speedup,
    table,
    tokens_per_second,
)

WEIGHT_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}
FILE = "file"  # the kind of a GGUF file that is used as it is
KINDS = (*WEIGHT_BYTES, FILE)
PROMPT, STREAMS = 500, 32
CONTEXT = 1024
ANSWER_LIMIT = 300.0  # seconds that a program may take for a request, or to open
BASE = "llama.cpp"
Generate = Callable[[int, list[int], int], object]  # rows, the prompt of each, and tokens to generate for each
Choices = dict[str, Generate]
Array = np.ndarray[Any, Any]


# What is measured.


@dataclass(frozen=True)
class Job:
    """A model in one number format. folder: has a Hugging Face folder (not for the kind `file`) and a GGUF file."""

    folder: str
    kind: str
    vocab_size: int
    context: int
    threads: int

    @property
    def gguf(self) -> Path:
        return Path(self.folder) / "model.gguf"

    @property
    def model(self) -> Path:
        """What tinylm opens. The weights of the Hugging Face folder are f32 for q8_0: tinylm quantizes them."""
        return self.gguf if self.kind == "file" else Path(self.folder) / "model"


@dataclass(frozen=True)
class Request:
    """A request to generate `tokens` tokens for each of `rows` sequences after a prompt of `prompt` tokens."""

    choice: str
    rows: int
    prompt: int
    tokens: int


MODELS = {  # layers, width, heads, size of the vocabulary, and tokens to generate with one stream and with each of many
    "4x128": (4, 128, 4, 65, 500, 100),
    "6x384": (6, 384, 6, 65, 300, 50),
    "12x768": (12, 768, 12, 50_257, 48, 16),
}
OPENED = (48, 16)  # tokens to generate with other models


@dataclass(frozen=True)
class Subject:
    """A model to sample from. tokens, batch_tokens: to generate. gguf: the file, if the model is from a GGUF file."""

    name: str
    exported: Any
    tokens: int
    batch_tokens: int
    gguf: Path | None = None

    def bytes_per_token(self, kind: str) -> float:
        """Bytes of the weights that a step reads: of all but an input embedding that is not the output layer."""
        config = self.exported.config
        if kind == FILE:
            from tinylm.formats.gguf_reader import open_gguf

            assert self.gguf
            sizes = {name: info.size for name, info in open_gguf(self.gguf).tensors.items()}
            return sum(sizes.values()) - (0 if config.tie else sizes["token_embd.weight"])
        lookup = 0 if config.tie else config.vocab_size * config.width
        return WEIGHT_BYTES[kind] * (sum(tensor.numel() for tensor in self.exported.tensors.values()) - lookup)

    def requests(self) -> dict[str, Request]:
        """The measured requests, by name. Their choices are set later."""
        first = Request("", 1, min(PROMPT, self.exported.config.context - 1), 1)
        many = Request("", STREAMS, 1, self.batch_tokens)
        return {"one": Request("", 1, 1, self.tokens), "many": many, "first": first}


def environment() -> dict[str, str]:
    """The environment variables of a program, with the OpenMP spin count of tinylm's command line."""
    from tinylm.kernels.process import SPIN_COUNT, SPIN_VARIABLES

    values = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if not any(variable in values for variable in SPIN_VARIABLES):
        values["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help = f"{', '.join(MODELS)}, or paths (default: {' '.join(MODELS)})"
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL", help=help)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="number formats of weights")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        serve(*options.worker)
        return
    begun, bandwidth = time.monotonic(), memory_bandwidth()
    print(describe_machine(["torch"]))
    print(f"All threads read {bandwidth / 1e9:.1f} GB/s.\n", flush=True)
    rows = []
    subjects = map(make_subject, options.models)
    for subject, kind in ((s, kind) for s in subjects for kind in options.kinds if kind != FILE or s.gguf):
        with tempfile.TemporaryDirectory() as folder:
            job = prepare(subject, kind, Path(folder))
            times, chosen = compare(subject, job, options.programs, options.rounds)
        limit = bandwidth / subject.bytes_per_token(kind)
        rows += [[subject.name, kind, *cells] for cells in report(subject, times, chosen, limit)]
        print(f"{subject.name}, {kind}: done after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    header = ["model", "weights", "program", "tokens/s", f"times {BASE}", "of the bandwidth"]
    header += [f"{STREAMS} streams, tokens/s", f"times {BASE}", "first token, ms", f"times {BASE}", "chosen"]
    print(table(header, rows))


def make_subject(name: str) -> Subject:
    """A model of MODELS with random weights and a character tokenizer that fills its vocabulary, or one at a path."""
    from tinylm.config.presets import make_model_config
    from tinylm.config.run import SpecialTokens
    from tinylm.formats.family import ForeignModel
    from tinylm.models.open import open_model
    from tinylm.text.tokenizer import train_char
    from tinylm.transformer.build import build_model

    if name not in MODELS:
        path = Path(name)
        _, config, tokenizer, weights = open_model(path)
        tensors, text = dict(weights.tensors), tokenizer.to_str()
        exported = ForeignModel(config.family, config.model, tensors, text, SpecialTokens(), None)
        return Subject(path.stem, exported, *OPENED, gguf=path if path.suffix == ".gguf" else None)
    layers, width, heads, vocab_size, tokens, batch_tokens = MODELS[name]
    tokenizer = train_char("".join(map(chr, range(0x20000, 0x20000 + vocab_size - 1))))  # and the end of text
    sizes: dict[str, Any] = {"layers": layers, "heads": heads, "width": width, "context": CONTEXT}
    model = make_model_config(preset="modern", size="small", vocab_size=tokenizer.vocab_size, **sizes)
    tensors = dict(build_model(model).state_dict())
    return Subject(
        name, ForeignModel(None, model, tensors, tokenizer.to_str(), SpecialTokens(), None), tokens, batch_tokens
    )


def prepare(subject: Subject, kind: str, folder: Path) -> Job:
    """Write the model for all programs, and let tinylm convert it, as its first command does."""
    import torch

    from tinylm.formats.gguf_writer import write_gguf
    from tinylm.formats.huggingface import write_folder
    from tinylm.system.files import SETTLED_SECONDS

    config = subject.exported.config
    job = Job(str(folder), kind, config.vocab_size, config.context, torch.get_num_threads())
    if kind == FILE:
        assert subject.gguf
        shutil.copyfile(subject.gguf, job.gguf)
    else:
        write_gguf(job.gguf, subject.exported, kind)
        job.model.mkdir()
        write_folder(job.model, subject.exported, torch.float16 if kind == "f16" else torch.float32)
    time.sleep(SETTLED_SECONDS)  # a conversion is recorded only for files that have not changed for this long
    quantize = ["--quantize", "int8"] if kind == "q8_0" else []
    run_tinylm(["sample", "-m", job.model, "-n", 1, "--device", "cpu", "--quiet", *quantize])
    return job


def compare(
    subject: Subject, job: Job, names: Sequence[str], rounds: int
) -> tuple[dict[str, Times], dict[str, list[str]]]:
    """The seconds of each round by request and program, and the choices of each program."""
    with ExitStack() as stack:
        programs, choices = {}, {}
        for name in names:
            command = [sys.executable, __file__, "--worker", name, json.dumps(asdict(job))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(running(command, env=environment(), **pipes))
            opened = ask(process, limit=ANSWER_LIMIT)
            if "missing" in opened:
                print(f"{subject.name}, {job.kind}: {opened['missing']}.", file=sys.stderr, flush=True)
            else:
                programs[name], choices[name] = process, opened["choices"]

        def seconds(name: str, request: Request) -> float:
            return float(ask(programs[name], json.dumps(asdict(request)), ANSWER_LIMIT)["seconds"])

        times: dict[str, Times] = {}
        chosen: dict[str, list[str]] = {name: [] for name in programs}
        for work, request in subject.requests().items():
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


def report(
    subject: Subject, times: Mapping[str, Times], chosen: Mapping[str, Sequence[str]], limit: float
) -> Iterator[list[str]]:
    """Yield the cells of each program. limit: tokens per second at which the weights are read at the full bandwidth."""
    for name in times["one"]:
        rate = subject.tokens / statistics.median(times["one"][name])
        peers = name != BASE and BASE in times["one"]
        one, many, first = (str(speedup(times[work], name, BASE)) if peers else "" for work in ("one", "many", "first"))
        streams = tokens_per_second(times["many"], name, subject.batch_tokens * STREAMS)
        milliseconds = f"{statistics.median(times['first'][name]) * 1e3:.1f}"
        choices = "; ".join(dict.fromkeys(filter(None, chosen[name])))
        yield [name, f"{rate:,.0f}", one, f"{rate / limit:.0%}", streams, many, milliseconds, first, choices]


# The programs, each in a process of its own.


class MissingError(Exception):
    """The program is not installed, or cannot run the job."""


def tinylm(engine: str, job: Job) -> Choices:
    """`tinylm sample` from an open model, sampling at its default temperature; it chooses its threads itself."""
    from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
    from tinylm.generation.llama_cpp import LlamaCpp
    from tinylm.generation.prompts import EncodedPrompt
    from tinylm.generation.text_generator import TextGenerator
    from tinylm.models.load import open_generator
    from tinylm.reporter import SilentReporter

    quantize = "int8" if job.kind == "q8_0" else "none"

    @functools.cache
    def model() -> TextGenerator:
        opened = open_generator(
            job.model, SpeedConfig(engine=engine), device="cpu", quantize=quantize, reporter=SilentReporter()
        )
        if isinstance(opened.engine, LlamaCpp):  # all programs generate the same number of tokens
            opened.engine.excluded.append(opened.tokenizer.end_of_text_id)
        opened.tokenizer.stop_ids = frozenset()
        return opened

    def generate(rows: int, prompt: list[int], tokens: int) -> None:
        config = GenerationConfig(max_tokens=tokens, num_samples=rows, seed=0, engine=engine)
        samples = model().continue_encoded(EncodedPrompt("", prompt, prompt), config).run()
        assert [sample.tokens for sample in samples] == [tokens] * rows

    model()  # so that a model that cannot be opened ends the program before it answers
    return {"": generate}


def llama_cpp(job: Job) -> Choices:
    """llama.cpp by the functions of the package xllamacpp, taking the likeliest token: with its default cache (16 bits,
    automatic flash attention) and with one of 32 bits without flash attention, which tinylm uses for f32 weights.
    """
    try:
        import xllamacpp as library
    except ImportError as error:
        raise MissingError(f"xllamacpp is not installed ({error})") from None
    folder = tempfile.mkdtemp()

    @functools.cache
    def server(threads: int, exact: bool, rows: int) -> Any:
        parameters = library.CommonParams()
        parameters.model.path, parameters.n_parallel = str(job.gguf), rows
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

    choices = [(threads, exact) for threads in thread_choices(job) for exact in (False, True)]
    names = [f"{threads} threads, {'32' if exact else '16'}-bit cache" for threads, exact in choices]
    return {name: functools.partial(generate, *choice) for name, choice in zip(names, choices, strict=True)}


def transformers(job: Job) -> Choices:
    """transformers' `generate` with its cache, taking the likeliest token."""
    try:
        import torch
        import transformers as library
    except ImportError as error:
        raise MissingError(f"transformers is not installed ({error})") from None
    if job.kind not in ("f32", "f16"):
        raise MissingError("transformers has no quantized weights on CPUs without further packages")
    library.logging.disable_progress_bar()
    dtype = torch.float16 if job.kind == "f16" else torch.float32
    model = library.AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()

    @torch.inference_mode()
    def generate(threads: int, rows: int, prompt: list[int], tokens: int) -> None:
        torch.set_num_threads(threads)
        ids = torch.tensor([prompt] * rows)
        mask = torch.ones_like(ids)
        limits = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        found = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **limits)
        assert found.shape == (rows, len(prompt) + tokens)

    return {f"{threads} threads": functools.partial(generate, threads) for threads in thread_choices(job)}


def thread_choices(job: Job) -> list[int]:
    """One thread, and all."""
    return sorted({1, job.threads})


PROGRAMS: dict[str, Callable[[Job], Choices]] = {
    "tinylm": functools.partial(tinylm, "auto"),
    "tinylm --engine torch": functools.partial(tinylm, "torch"),
    "llama.cpp": llama_cpp,
    "transformers": transformers,
}


def serve(name: str, job_text: str) -> None:
    """Open the program, and write the names of its choices, or why it cannot run, as a line of JSON. Then answer each
    line of stdin, a `Request`, with the seconds that it took.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    job = Job(**json.loads(job_text))
    try:
        choices = PROGRAMS[name](job)
    except MissingError as error:
        print(json.dumps({"missing": str(error)}), file=answers, flush=True)
        return
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
