"""Decoding on the CPU, tokens a second: tinylm with its cache, without, and in int8, against transformers' `generate`.

All write the same number of tokens, greedily, from a prompt of one token, in fp32 (int8: the linear layers' weights in
eight bits). tinylm gpt2 and the peer have the same random weights and are first shown to give the same logits;
transformers decodes with its cache, as it is by default and with its GELU as one kernel. tinylm modern is the preset
that users get by default. What comes before the first token is part of the time for all. They take turns.

A second table is about many streams at once: reading the weights is most of the work, and one reading serves all.
With --run, a third is about a model that was trained, with its training text at hand: what a draft gains, for text that
is drawn at a temperature of 0.8 from a prompt of 200 tokens of the validation text. Each round has a seed of its own.
Last comes what eight bits change in the loss of that model.
"""

import argparse
import copy
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from measure import Times, add_options, chosen_shape, describe_machine, speedup, table, take_turns, tokens_per_second
from peer import FUSED_GELU, TOLERANCE, build_pair, build_peer
from transformers import GPT2LMHeadModel

from tinylm.device import can_compile
from tinylm.evaluation.loop import default_batch_size, evaluate_loss
from tinylm.generation.compiled_decoder import CompiledDecoder, compile_decoder, load_compiled
from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import generate
from tinylm.generation.sampler import Sampler
from tinylm.generation.speculative import NGramDraft, generate_speculatively
from tinylm.generation.thread_policy import ThreadPolicyDecoder
from tinylm.kernels.thread_latency import measure_thread_latency
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.objectives.loss import next_token
from tinylm.run_directory.loading import load_model
from tinylm.text.batches import evaluation_batches
from tinylm.text.run_tokens import reopen_tokens
from tinylm.text.token_files import TokenFolder

PROMPT = [0]

PEER = "transformers GPT-2"
CACHED = "tinylm gpt2"
UNCACHED = "tinylm gpt2, no cache"


def tinylm_tokens(
    model: Decoder, tokens: int, streams: int = 1, use_cache: bool = True, writer: CompiledDecoder | None = None
) -> list[list[int]]:
    """What `tinylm sample --temperature 0` generates, by compiled code if given: a list of tokens for each stream."""
    weight = model.embedding.weight
    sampler = Sampler(SamplingConfig(temperature=0.0), 0, streams, weight.device, len(weight))
    model_for_steps = ThreadPolicyDecoder(model, measure_thread_latency(), writer)
    steps = generate(model_for_steps, [PROMPT] * streams, sampler, tokens, use_cache)
    return [list(stream) for stream in zip(*steps, strict=True)]


def fused_copy(model: Decoder, int8: bool = False, prepack: bool = True) -> Decoder:
    """A copy as `tinylm sample` makes it ready."""
    model = copy.deepcopy(model)
    fuse_model(model, int8, prepack)
    return model


def peer_tokens(peer: GPT2LMHeadModel, tokens: int, streams: int = 1) -> list[list[int]]:
    """The same with transformers."""
    prompts = torch.tensor([PROMPT] * streams)
    written = peer.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    return [row[len(PROMPT) :] for row in written.tolist()]


def contestants(arguments: argparse.Namespace) -> dict[str, Callable[[], list[list[int]]]]:
    """One stream each."""
    config, tokens = chosen_shape(arguments, "gpt2"), arguments.tokens
    model, peer = build_pair(config)
    fused_peer = build_peer(config, model, FUSED_GELU)
    modern = build_model(chosen_shape(arguments, "modern")).eval()
    compiled = compiled_contestants({"gpt2": model, "modern": modern}, tokens) if can_compile("cpu") else {}
    quantized = fused_copy(model, int8=True)
    model, modern = fused_copy(model), fused_copy(modern)
    return {
        PEER: lambda: peer_tokens(peer, tokens),
        f"{PEER}, fused GELU": lambda: peer_tokens(fused_peer, tokens),
        CACHED: lambda: tinylm_tokens(model, tokens),
        "tinylm gpt2, int8": lambda: tinylm_tokens(quantized, tokens),
        UNCACHED: lambda: tinylm_tokens(model, tokens, use_cache=False),
        "tinylm modern": lambda: tinylm_tokens(modern, tokens),
        **compiled,
    }


def compiled_contestants(models: Mapping[str, Decoder], tokens: int) -> dict[str, Callable[[], list[list[int]]]]:
    """As `tinylm sample --compile on`, whose compiling is done before, and timed apart."""
    found: dict[str, Callable[[], list[list[int]]]] = {}
    for (name, original), int8 in itertools.product(models.items(), (False, True)):
        model = fused_copy(original, int8, prepack=False)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "code.pt2"
            begun = time.perf_counter()
            compile_decoder(model, file)
            seconds = time.perf_counter() - begun
            writer = load_compiled(model, file)
        kind = f"tinylm {name}{', int8' * int8}, compiled"
        print(f"{kind}: in {seconds:.0f} s")
        found[kind] = functools.partial(tinylm_tokens, model, tokens, writer=writer)
    return found


def many_streams(arguments: argparse.Namespace) -> dict[str, Callable[[], list[list[int]]]]:
    """One stream of tinylm, and many at once."""
    model, peer = build_pair(chosen_shape(arguments, "gpt2"))
    model = fused_copy(model)
    tokens, streams = arguments.tokens, arguments.streams
    return {
        CACHED: lambda: tinylm_tokens(model, tokens),
        f"{CACHED}, {streams} streams": lambda: tinylm_tokens(model, tokens, streams),
        f"{PEER}, {streams} streams": lambda: peer_tokens(peer, tokens, streams),
    }


def open_run(path: Path) -> tuple[Decoder, TokenFolder]:
    """Its model, and the text that it was trained on."""
    model, config, tokenizer, _ = load_model(path, "cpu")
    assert isinstance(model, Decoder) and config.data is not None
    return model, reopen_tokens(path, config.data, tokenizer)


def drafted(path: Path, tokens: int) -> dict[str, Callable[[], object]]:
    """The model of a run, in fp32 and int8, with a draft and without."""
    model, text = open_run(path)
    prompt, draft = text.val[:200].tolist(), NGramDraft(text.train)
    quantized, model = fused_copy(model, int8=True), fused_copy(model)
    seeds = {name: itertools.count() for name in ("fp32", "fp32, draft", "int8", "int8, draft")}

    def write(name: str, model: Decoder, drafting: bool) -> list[list[int]]:
        sampler = Sampler(SamplingConfig(), next(seeds[name]), 1, model.device, model.vocab_size)
        writer = ThreadPolicyDecoder(model, measure_thread_latency())
        if drafting:
            return list(generate_speculatively(writer, prompt, sampler, tokens, draft))
        return list(generate(writer, [prompt], sampler, tokens))

    return {
        "fp32": lambda: write("fp32", model, False),
        "fp32, draft": lambda: write("fp32, draft", model, True),
        "int8": lambda: write("int8", quantized, False),
        "int8, draft": lambda: write("int8, draft", quantized, True),
    }


def int8_loss(path: Path) -> str:
    """What eight bits cost in nats per token of the run's validation text, every token scored."""
    model, text = open_run(path)

    def loss(model: Decoder) -> float:
        batches = evaluation_batches(text.val, model.context, default_batch_size(model.context))
        return evaluate_loss(model, next_token, batches).loss

    exact, rounded = loss(model), loss(fused_copy(model, int8=True))
    return (
        f"int8 changes the loss of the validation text from {exact:.4f} to {rounded:.4f}: {rounded / exact - 1:+.2%}."
    )


def speed_table(times: Times, tokens: dict[str, int], base: str) -> str:
    """Tokens a second, and their ratio to `base`, where each wrote its own number of tokens."""
    paces: Times = {name: [s / tokens[name] for s in seconds] for name, seconds in times.items()}
    rows = [
        [name, tokens_per_second(paces, name, 1), "1" if name == base else str(speedup(paces, name, base))]
        for name in paces
    ]
    return table(["model", "tokens/s", f"times {base}"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=1024)
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="to generate (default: 512)")
    parser.add_argument("--streams", type=int, default=32, metavar="N", help="in the second table (default: 32)")
    parser.add_argument("--run", type=Path, help="a trained model, for a third table")
    arguments = parser.parse_args(argv)
    if arguments.tokens + len(PROMPT) > arguments.context:
        parser.error("--tokens and the prompt of one must fit --context, which transformers cannot go beyond")

    one = take_turns(contestants(arguments), arguments.rounds, arguments.warmup)
    functions = many_streams(arguments)
    many = take_turns(functions, arguments.rounds, arguments.warmup)
    written = {name: arguments.tokens * (1 if name == CACHED else arguments.streams) for name in functions}

    print(f"{describe_machine()}\n")
    print(f"{arguments.layers}x{arguments.width}, {arguments.heads} heads, context {arguments.context}, ", end="")
    print(f"vocabulary {arguments.vocab_size}, {arguments.tokens} tokens, fp32; {arguments.rounds} rounds.")
    print(f"tinylm gpt2 and transformers gave the same logits within {TOLERANCE:g}.\n")
    print(speed_table(one, dict.fromkeys(one, arguments.tokens), PEER))
    print(f"\nThe cache makes tinylm {speedup(one, CACHED, UNCACHED)} times as fast.\n")
    print(speed_table(many, written, CACHED))
    if arguments.run is not None:
        times = take_turns(drafted(arguments.run, arguments.tokens), arguments.rounds, arguments.warmup)
        print(f"\n{arguments.run}, at a temperature of 0.8\n")
        print(speed_table(times, dict.fromkeys(times, arguments.tokens), "fp32"))
        print(f"\n{int8_loss(arguments.run)}")


if __name__ == "__main__":
    main()
