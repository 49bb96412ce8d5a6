"""The programs that benchmarks/sampling.py and thread_policy.py compare. Each runs in a process of its own, since
several OpenMP runtimes in one process slow each other down.

    python benchmarks/sampling_programs.py PROGRAM JOB      # JOB: a `Job` as JSON

A program offers choices, such as numbers of threads; sampling.py uses the fastest. The process writes their names as a
line of JSON, then answers each line of stdin, a `Request` as JSON, with the seconds that it took. A program that cannot
run writes the reason under `missing`, and ends.
"""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

Generate = Callable[[int, list[int], int], object]  # rows, the prompt of each, and tokens to generate for each
Choices = dict[str, Generate]

PRECISIONS = {"f32": "float32", "f16": "float16", "q8_0": "int8"}
CONVERT = """
import sys, ctranslate2
ctranslate2.converters.TransformersConverter(sys.argv[1]).convert(sys.argv[2], quantization=sys.argv[3])
"""


@dataclass(frozen=True)
class Job:
    """A model in one number format. folder: has the Hugging Face folder `model` and the file `model.gguf`.

    kind: f32, f16 or q8_0, or "file" for a GGUF file with its own number formats, which is the only file in the folder.
    """

    folder: str
    kind: str
    vocab_size: int
    context: int
    threads: int

    @property
    def gguf(self) -> Path:
        """The GGUF file."""
        return Path(self.folder) / "model.gguf"

    @property
    def model(self) -> Path:
        """What tinylm opens: the Hugging Face folder, whose weights are f32 for q8_0 (tinylm and CTranslate2 quantize
        them), or the GGUF file for "file"."""
        return self.gguf if self.kind == "file" else Path(self.folder) / "model"


@dataclass(frozen=True)
class Request:
    """A request to generate `tokens` tokens for each of `rows` sequences after a prompt of `prompt` tokens."""

    choice: str
    rows: int
    prompt: int
    tokens: int


class MissingError(Exception):
    """The program is not installed, or cannot run the job."""


def tinylm(engine: str, job: Job) -> Choices:
    """`tinylm sample` from an open model, sampling at its default temperature; it chooses its threads itself."""
    from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
    from tinylm.generation.prompts import EncodedPrompt
    from tinylm.generation.text_generator import TextGenerator
    from tinylm.open_generator import open_generator
    from tinylm.reporter import SilentReporter

    speed, quantize = SpeedConfig(engine=engine), "int8" if job.kind == "q8_0" else "none"

    @functools.cache
    def model(rows: int) -> TextGenerator:
        """The model as opened for texts of the default length."""
        requests = [GenerationConfig(num_samples=rows)]
        opened = open_generator(job.model, speed, requests, device="cpu", quantize=quantize, reporter=SilentReporter())
        opened.tokenizer.stop_ids = frozenset()  # all programs generate the same number of tokens
        return opened

    def generate(rows: int, prompt: list[int], tokens: int) -> None:
        config = GenerationConfig(max_tokens=tokens, num_samples=rows, seed=0)
        samples = model(rows).continue_encoded(EncodedPrompt("", prompt, prompt), config, speed).run()
        assert [sample.tokens for sample in samples] == [tokens] * rows

    model(1)  # so that a model that cannot be opened ends the program before it answers
    return {"": generate}


def policy_of_torch(job: Job) -> Choices:
    """tinylm's steps by torch, with its thread policy and with fixed numbers of threads."""
    import torch

    from tinylm.generation.fuse_layers import fuse_model
    from tinylm.generation.thread_policy import ThreadPolicyDecoder
    from tinylm.kernels.thread_latency import thread_latency
    from tinylm.open_model import open_model
    from tinylm.reporter import LogReporter

    network = open_model(job.model).network
    fuse_model(network, int8=job.kind == "q8_0")
    policy = ThreadPolicyDecoder(network, thread_latency(LogReporter()))

    def generate(threads: int, rows: int, prompt: list[int], tokens: int) -> None:
        torch.set_num_threads(threads or job.threads)
        _generate(network if threads else policy, job, rows, prompt, tokens)

    return _policies({threads: functools.partial(generate, threads) for threads in (0, *thread_choices(job))})


def policy_of_llama_cpp(job: Job) -> Choices:
    """tinylm's steps by llama.cpp, with its thread policy and with fixed numbers of threads."""
    from tinylm.generation import llama_cpp

    if llama_cpp.import_llama_cpp() is None:
        raise MissingError("llama-cpp-python is not installed")

    def decoder(threads: int) -> llama_cpp.LlamaCppDecoder:
        if not threads:
            return llama_cpp.LlamaCppDecoder(job.gguf, job.context, job.threads)
        with mock.patch.object(llama_cpp, "fastest_threads", _always):
            return llama_cpp.LlamaCppDecoder(job.gguf, job.context, threads)

    decoders = {threads: decoder(threads) for threads in (0, *thread_choices(job))}
    return _policies({threads: functools.partial(_generate, model, job) for threads, model in decoders.items()})


def _always(threads: int) -> Generator[int, float, None]:
    """Replaces `fastest_threads`: always yields the same number."""
    while True:
        yield threads


def _policies(functions: dict[int, Generate]) -> Choices:
    """The functions by number of threads, 0 for the default, under their names."""
    return {f"threads: {threads}" if threads else "default": function for threads, function in functions.items()}


def _generate(model: Any, job: Job, rows: int, prompt: list[int], tokens: int) -> None:
    """Generate tokens as `tinylm sample` does at its default temperature."""
    from tinylm.generation.generation_config import SamplingConfig
    from tinylm.generation.generator import generate
    from tinylm.generation.sampler import Sampler

    sampler = Sampler(SamplingConfig(temperature=0.8), 0, rows, job.vocab_size)
    assert len(list(generate(model, [prompt] * rows, sampler, tokens))) == tokens


def llama_cpp(job: Job) -> Choices:
    """llama.cpp through its C functions, taking the likeliest token: with its default cache (16 bits, automatic flash
    attention) and with one of 32 bits without flash attention, which tinylm uses for f32 weights.
    """
    from tinylm.generation.llama_cpp import import_llama_cpp

    library = import_llama_cpp()
    if library is None:
        raise MissingError("llama-cpp-python is not installed")
    options = library.llama_model_default_params()
    options.use_extra_bufts = job.kind in ("f32", "f16")  # with them, it crashes on processors with AMX (decision 025)
    model = library.llama_model_load_from_file(os.fsencode(job.gguf), options)
    assert model, job.gguf
    return {
        f"{threads} threads, {'32' if exact else '16'}-bit cache": functools.partial(
            _generate_by_llama_cpp, library, model, threads, exact
        )
        for threads in thread_choices(job)
        for exact in (False, True)
    }


def _generate_by_llama_cpp(
    library: Any, model: Any, threads: int, exact: bool, rows: int, prompt: list[int], tokens: int
) -> list[list[int]]:
    options = library.llama_context_default_params()
    options.n_ctx = options.n_batch = rows * (len(prompt) + tokens)
    options.n_ubatch = min(512, options.n_batch)  # its default
    options.n_seq_max = rows
    options.n_threads = options.n_threads_batch = threads
    options.no_perf = True
    if exact:
        options.type_k = options.type_v = 0  # F32
        options.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = library.llama_init_from_model(model, options)
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    first, step = _Batch(library, rows, len(prompt)), _Batch(library, rows, 1)
    try:
        first.set(np.tile(prompt, rows), np.tile(np.arange(len(prompt)), rows))
        assert library.llama_decode(context, first.batch) == 0
        texts = [_likeliest(library, context, rows, size)]
        for position in range(len(prompt), len(prompt) + tokens - 1):
            step.set(texts[-1], position)
            assert library.llama_decode(context, step.batch) == 0
            texts.append(_likeliest(library, context, rows, size))
        return [text.tolist() for text in texts]
    finally:
        library.llama_batch_free(first.batch)
        library.llama_batch_free(step.batch)
        library.llama_free(context)


class _Batch:
    """A batch of llama.cpp with `length` tokens of each of `rows` sequences, and logits after the last of each."""

    def __init__(self, library: Any, rows: int, length: int) -> None:
        count = rows * length
        self.batch = library.llama_batch_init(count, 0, 1)
        self.batch.n_tokens = count
        np.ctypeslib.as_array(self.batch.n_seq_id, (count,))[:] = 1
        np.ctypeslib.as_array(self.batch.logits, (count,))[:] = np.arange(count) % length == length - 1
        for index in range(count):
            self.batch.seq_id[index][0] = index // length
        self._tokens, self._positions = (
            np.ctypeslib.as_array(part, (count,)) for part in (self.batch.token, self.batch.pos)
        )

    def set(self, tokens: np.ndarray, positions: np.ndarray | int) -> None:
        """Set tokens (rows * length,) and their positions, of the same shape or one for all."""
        self._tokens[:], self._positions[:] = tokens, positions


def _likeliest(library: Any, context: Any, rows: int, size: int) -> np.ndarray:
    """The likeliest next token of each row: (rows,)."""
    return np.ctypeslib.as_array(library.llama_get_logits(context), (rows, size)).argmax(axis=1)


def ctranslate2(job: Job) -> Choices:
    """CTranslate2, taking the likeliest token. f16 is bfloat16 here, on processors for which it is supported."""
    if job.kind not in PRECISIONS:
        raise MissingError("CTranslate2 opens no GGUF files")
    sys.modules["torch"] = None  # not needed to generate; `None` makes its import fail
    try:
        import ctranslate2 as library
    except ImportError as error:
        raise MissingError(f"CTranslate2 is not installed ({error})") from None
    kind = "bfloat16" if job.kind == "f16" else PRECISIONS[job.kind]
    if kind not in library.get_supported_compute_types("cpu"):
        raise MissingError(f"CTranslate2 has no {kind} on this processor")
    converted = Path(job.folder) / "ctranslate2"
    if not converted.exists():
        words = [sys.executable, "-c", CONVERT, str(job.model), str(converted), kind]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, timeout=300)
        config = json.loads((converted / "config.json").read_text())
        names = {name: config.get(name) or "<|endoftext|>" for name in ("bos_token", "eos_token", "unk_token")}
        (converted / "config.json").write_text(json.dumps(config | names))  # a missing name prevents the opening
    vocabulary = json.loads((converted / "vocabulary.json").read_text())

    @functools.cache
    def generator(threads: int) -> Any:
        return library.Generator(str(converted), device="cpu", compute_type=kind, intra_threads=threads)

    def generate(threads: int, rows: int, prompt: list[int], tokens: int) -> None:
        generator(threads).generate_batch(
            [[vocabulary[token] for token in prompt]] * rows,
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )

    return {f"{threads} threads": functools.partial(generate, threads) for threads in thread_choices(job)}


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
    dtype = getattr(torch, PRECISIONS[job.kind])
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
    "CTranslate2": ctranslate2,
    "transformers": transformers,
}

POLICIES: dict[str, Callable[[Job], Choices]] = {  # of benchmarks/thread_policy.py
    "tinylm, torch": policy_of_torch,
    "tinylm, llama.cpp": policy_of_llama_cpp,
}


def prompt_ids(job: Job, length: int) -> list[int]:
    """Random ids of a prompt, without the first 16 (or half of a small vocabulary), which are often special tokens."""
    low = min(16, job.vocab_size // 2)
    return np.random.default_rng(0).integers(low, job.vocab_size, length).tolist()


def serve(name: str, job: Job, requests: Any, write: Callable[[object], object]) -> None:
    """Open the program, then answer the lines of `requests` until their end."""
    try:
        choices = (PROGRAMS | POLICIES)[name](job)
    except MissingError as error:
        write({"missing": str(error)})
        return
    write({"choices": list(choices)})
    for line in requests:
        request = Request(**json.loads(line))
        prompt = prompt_ids(job, request.prompt)
        begun = time.perf_counter()
        choices[request.choice](request.rows, prompt, request.tokens)
        write({"seconds": time.perf_counter() - begun})


def as_json(value: Job | Request) -> str:
    return json.dumps(asdict(value))


def main(arguments: Sequence[str]) -> None:
    name, job = arguments
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr

    def write(value: object) -> None:
        print(json.dumps(value), file=answers, flush=True)

    serve(name, Job(**json.loads(job)), sys.stdin, write)


if __name__ == "__main__":
    main(sys.argv[1:])
