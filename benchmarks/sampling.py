"""Sampling on the CPU beside llama.cpp, CTranslate2 and transformers: tokens a second, and time to the first token.

    python benchmarks/sampling.py                                       # 6x384 with 65 ids
    python benchmarks/sampling.py --layers 12 --width 768 --heads 12 --vocab-size 50257 --tokens 64
    python benchmarks/sampling.py --model SmolLM2-135M-Instruct         # a Hugging Face folder or GGUF file

All generate the same number of tokens from a prompt of one token, with random weights of preset modern unless --model
is given, and take turns. tinylm samples at a temperature of 0.8. llama.cpp is called through the C functions of
llama-cpp-python, takes the likeliest token, has keys and values of 32 bits as tinylm has, and appears with one thread
and with all. `of the bandwidth` is the share of the speed at which all threads read memory, counting
the bytes of all weights for each token. `first token` is for a prompt of 500 tokens.

Needs the extras [bench] and [llama-cpp]. --ctranslate2 adds CTranslate2, in fp32 and int8, which needs its package. It
is an option, since its threads make the others in the process several times slower.
"""

import argparse
import copy
import functools
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from measure import add_options, chosen_shape, describe_machine, speedup, table, take_turns, tokens_per_second

from tinylm.formats.gguf_writer import write_gguf
from tinylm.formats.huggingface import write_folder
from tinylm.formats.imported import ForeignModel
from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import NextTokenModel, generate
from tinylm.generation.llama_cpp import LlamaCppCache, LlamaCppDecoder, import_llama_cpp
from tinylm.generation.sampler import Sampler
from tinylm.generation.thread_policy import ThreadPolicyDecoder
from tinylm.kernels.thread_latency import measure_thread_latency
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.open_model import open_model
from tinylm.run_config import SpecialTokens
from tinylm.text.tokenizer import train_char

KINDS = {"f32": torch.float32, "f16": torch.float16, "q8_0": torch.float32}  # and torch's format for each
PROMPT = 500  # tokens before the first one
WEIGHT_BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32}  # of each number


@dataclass(frozen=True)
class Subject:
    """A decoder to sample from, in torch and as it is exported."""

    model: Decoder
    exported: ForeignModel

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=1024)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder or GGUF file (default: random weights)")
    parser.add_argument("--tokens", type=int, default=256, help="of each stream (default: 256)")
    parser.add_argument("--streams", type=int, default=32, help="generated at a time in the second table (default: 32)")
    parser.add_argument("--ctranslate2", action="store_true", help="also CTranslate2; see above")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="formats of the weights")
    options = parser.parse_args(arguments)
    if import_llama_cpp() is None:
        parser.error('llama-cpp-python is not installed: pip install -e ".[llama-cpp]"')
    subject = opened(options.model) if options.model else random_model(options)
    bandwidth = memory_bandwidth()
    print(describe_machine(["torch", "transformers", "llama-cpp-python"]))
    numbers = sum(parameter.numel() for parameter in subject.model.parameters())
    print(f"{numbers / 1e6:.1f} million weights; all threads read {bandwidth / 1e9:.1f} GB/s")
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            write_gguf(file, subject.exported, kind)
            single = contestants(subject, kind, file, Path(folder), options.tokens)
            generator = ctranslate2_generator(Path(folder), kind) if options.ctranslate2 else None
            if generator is not None:
                single["CTranslate2"] = functools.partial(ctranslate2_tokens, generator, 1, options.tokens)
            times = take_turns(single, options.rounds, options.warmup)
            limit = bandwidth / (numbers * WEIGHT_BYTES[kind])
            print(f"\n{kind}, one stream")
            print(rates(times, options.tokens, base="llama.cpp", limit=limit))
            many = {
                "tinylm, llama.cpp": functools.partial(
                    sampled, in_llama_cpp(subject, file), subject.vocab_size, options.streams, options.tokens
                ),
                "llama.cpp": functools.partial(peer_streams, file, options.streams, options.tokens),
            }
            if generator is not None:
                many["CTranslate2"] = functools.partial(ctranslate2_tokens, generator, options.streams, options.tokens)
            times = take_turns(many, options.rounds, options.warmup)
            print(f"\n{kind}, {options.streams} streams")
            print(rates(times, options.tokens * options.streams, base="llama.cpp"))
            first = first_token(subject, file, options.rounds)
            print(f"\n{kind}, first token after {PROMPT} of a prompt: {first}")


def rates(times: dict[str, list[float]], tokens: int, base: str, limit: float | None = None) -> str:
    """Tokens a second of each, and as a ratio to the faster of the base's rows."""
    base = min((name for name in times if name.startswith(base)), key=lambda name: statistics.median(times[name]))
    rows = []
    for name in times:
        share = [] if limit is None else [f"{tokens / statistics.median(times[name]) / limit:.0%}"]
        rows.append([name, tokens_per_second(times, name, tokens), str(speedup(times, name, base)), *share])
    return table(["", "tokens/s", f"times {base}", *([] if limit is None else ["of the bandwidth"])], rows)


def random_model(options: argparse.Namespace) -> Subject:
    """A model of preset modern with random weights, and a tokenizer of as many characters as it has ids."""
    characters = (chr(code) for code in range(0x20000, 0x20000 + options.vocab_size))
    tokenizer = train_char("".join(characters))
    config = replace(chosen_shape(options, "modern"), vocab_size=tokenizer.vocab_size)
    model = build_model(config).eval()
    assert isinstance(model, Decoder)
    tensors = dict(model.state_dict())
    return Subject(model, ForeignModel(None, config, tensors, tokenizer.to_str(), SpecialTokens(), None))


def opened(path: Path) -> Subject:
    network, config, tokenizer, weights = open_model(path)
    assert isinstance(network, Decoder)
    return Subject(
        network.float(),
        ForeignModel(config.family, config.model, weights.tensors, tokenizer.to_str(), tokenizer.special, None),
    )


def contestants(subject: Subject, kind: str, file: Path, folder: Path, tokens: int) -> dict[str, Callable[[], object]]:
    """Functions that generate the tokens of one stream, by name."""
    eager = copy.deepcopy(subject.model).to(KINDS[kind])
    fuse_model(eager, int8=kind == "q8_0")
    threads = torch.get_num_threads()
    functions: dict[str, Callable[[], object]] = {
        "tinylm, llama.cpp": functools.partial(sampled, in_llama_cpp(subject, file), subject.vocab_size, 1, tokens),
        "tinylm, torch": functools.partial(
            sampled, ThreadPolicyDecoder(eager, measure_thread_latency()), subject.vocab_size, 1, tokens
        ),
    }
    for count in sorted({1, threads}):
        functions[f"llama.cpp, threads: {count}"] = functools.partial(peer_tokens, file, count, tokens)
    write_folder(folder, subject.exported, KINDS[kind])
    if kind != "q8_0":
        transformers.logging.disable_progress_bar()
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=KINDS[kind]).eval()
        functions["transformers"] = functools.partial(peer_generate, peer, tokens)
    return functions


def sampled(model: NextTokenModel, vocab_size: int, rows: int, tokens: int) -> None:
    """As `tinylm sample` generates them."""
    sampler = Sampler(SamplingConfig(temperature=0.8), 0, rows, vocab_size)
    for _ in generate(model, [[1]] * rows, sampler, tokens):
        pass


def in_llama_cpp(subject: Subject, file: Path) -> LlamaCppDecoder:
    return LlamaCppDecoder(file, subject.model.context, torch.get_num_threads())


def peer_tokens(file: Path, threads: int, tokens: int) -> None:
    """The likeliest tokens by llama.cpp."""
    library, model, memory = peer_context(file, 1, tokens + 1, threads)
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    token = (library.llama_token * 1)(1)
    for _ in range(tokens):
        library.llama_decode(memory.context, library.llama_batch_get_one(token, 1))
        token[0] = int(np.ctypeslib.as_array(library.llama_get_logits(memory.context), (size,)).argmax())


def peer_streams(file: Path, rows: int, tokens: int) -> None:
    """The likeliest tokens of many streams by llama.cpp, all in one batch, with all threads."""
    library, model, memory = peer_context(file, rows, tokens + 1, torch.get_num_threads())
    size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
    batch = library.llama_batch_init(rows, 0, 1)
    batch.n_tokens = rows
    for row in range(rows):
        batch.token[row], batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 1, row, 1
    for position in range(tokens):
        for row in range(rows):
            batch.pos[row] = position
        library.llama_decode(memory.context, batch)
        chosen = np.ctypeslib.as_array(library.llama_get_logits(memory.context), (rows, size)).argmax(axis=1)
        for row, token in enumerate(chosen.tolist()):
            batch.token[row] = token
    library.llama_batch_free(batch)


@functools.cache
def peer_model(file: Path) -> object:
    library = import_llama_cpp()
    return library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())


def peer_context(file: Path, rows: int, length: int, threads: int) -> tuple[object, object, LlamaCppCache]:
    library, model = import_llama_cpp(), peer_model(file)
    return library, model, LlamaCppCache(library, model, rows, length, None, threads)


@torch.inference_mode()
def peer_generate(model: transformers.PreTrainedModel, tokens: int) -> None:
    """The likeliest tokens by transformers, with its cache."""
    ids = torch.tensor([[1]])
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )


def ctranslate2_generator(folder: Path, kind: str) -> Any | None:
    """CTranslate2 on the Hugging Face folder, or `None` for a format that it does not have on CPUs."""
    precision = {"f32": "float32", "q8_0": "int8"}.get(kind)
    if precision is None:
        return None
    library = importlib.import_module("ctranslate2")
    converted = folder / f"ctranslate2-{precision}"
    if not converted.exists():
        library.converters.TransformersConverter(str(folder)).convert(str(converted), quantization=precision)
        config = json.loads((converted / "config.json").read_text())
        tokens = {name: config.get(name) or "<|endoftext|>" for name in ("bos_token", "eos_token", "unk_token")}
        (converted / "config.json").write_text(json.dumps(config | tokens))  # without one it does not open
    threads = torch.get_num_threads()
    return library.Generator(str(converted), device="cpu", compute_type=precision, intra_threads=threads)


def ctranslate2_tokens(generator: Any, rows: int, tokens: int) -> None:
    """The likeliest tokens of CTranslate2."""
    start = [["<|endoftext|>"]] * rows
    generator.generate_batch(
        start, max_length=tokens, min_length=tokens, sampling_topk=1, include_prompt_in_result=False
    )


def first_token(subject: Subject, file: Path, rounds: int) -> str:
    """Milliseconds to the logits after a prompt, by llama.cpp in tinylm and by torch."""
    length = min(PROMPT, subject.model.context)
    ids = torch.randint(subject.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    fused = copy.deepcopy(subject.model)
    fuse_model(fused)
    models: dict[str, NextTokenModel] = {
        "llama.cpp": in_llama_cpp(subject, file),
        "torch, fp32": fused,
    }

    def run(model: NextTokenModel) -> None:
        with torch.inference_mode():
            model.last_logits(ids, model.make_cache(1, length), 1)

    times = take_turns({name: functools.partial(run, model) for name, model in models.items()}, rounds)
    return ", ".join(f"{name} {statistics.median(seconds) * 1e3:.0f} ms" for name, seconds in times.items())


def memory_bandwidth(size: int = 1 << 28, rounds: int = 5) -> float:
    """Bytes per second that all threads read from memory: the best of some sums of a large tensor."""
    numbers = torch.ones(size // 4)
    best = min(_seconds(numbers.sum) for _ in range(rounds))
    return size / best


def _seconds(function: Callable[[], object]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
