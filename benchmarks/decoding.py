"""Tokens per second of decoding on the CPU: tinylm with and without cache and in int8, and transformers' `generate`.

In the first two tables, all generate the same number of tokens with greedy decoding from a prompt of one token, in fp32
(int8: the weights of the linear layers in 8 bits). tinylm gpt2 and transformers' GPT-2 have the same random weights,
and their logits are compared before the measurement; transformers uses its cache, with its default GELU and with a
fused one. tinylm modern is tinylm's default preset. Times include the prefill. The implementations take turns.

The second table measures batches of several streams, which share each pass over the weights. With --run, a third table
measures speculative decoding of a trained model at a temperature of 0.8, with n-grams of its training text as drafts
and 200 tokens of its validation text as prompt; each round has its own seed. The last line compares the validation loss
of that model in fp32 and int8.
"""

import argparse
import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from measure import Times, add_options, chosen_shape, describe_machine, speedup, table, take_turns, tokens_per_second
from peer import FUSED_GELU, TOLERANCE, build_pair, build_peer
from transformers import GPT2LMHeadModel

from tinylm.evaluation.loop import default_batch_size, evaluate_loss
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


def tinylm_tokens(model: Decoder, tokens: int, streams: int = 1, use_cache: bool = True) -> list[list[int]]:
    """The tokens of `tinylm sample --engine torch --temperature 0`, one list per stream."""
    weight = model.embedding.weight
    sampler = Sampler(SamplingConfig(temperature=0.0), 0, streams, len(weight))
    model_for_steps = ThreadPolicyDecoder(model, measure_thread_latency())
    steps = generate(model_for_steps, [PROMPT] * streams, sampler, tokens, use_cache)
    return [list(stream) for stream in zip(*steps, strict=True)]


def fused_copy(model: Decoder, int8: bool = False) -> Decoder:
    """A copy with fused and prepacked weights, as in `tinylm sample`."""
    model = copy.deepcopy(model)
    fuse_model(model, int8)
    return model


def peer_tokens(peer: GPT2LMHeadModel, tokens: int, streams: int = 1) -> list[list[int]]:
    """The tokens of transformers' `generate`, one list per stream."""
    prompts = torch.tensor([PROMPT] * streams)
    generated = peer.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    return [row[len(PROMPT) :] for row in generated.tolist()]


def contestants(arguments: argparse.Namespace) -> dict[str, Callable[[], list[list[int]]]]:
    """The implementations of the first table, each decoding one stream."""
    config, tokens = chosen_shape(arguments, "gpt2"), arguments.tokens
    model, peer = build_pair(config)
    fused_peer = build_peer(config, model, FUSED_GELU)
    modern = build_model(chosen_shape(arguments, "modern")).eval()
    quantized = fused_copy(model, int8=True)
    model, modern = fused_copy(model), fused_copy(modern)
    return {
        PEER: lambda: peer_tokens(peer, tokens),
        f"{PEER}, fused GELU": lambda: peer_tokens(fused_peer, tokens),
        CACHED: lambda: tinylm_tokens(model, tokens),
        "tinylm gpt2, int8": lambda: tinylm_tokens(quantized, tokens),
        UNCACHED: lambda: tinylm_tokens(model, tokens, use_cache=False),
        "tinylm modern": lambda: tinylm_tokens(modern, tokens),
    }


def many_streams(arguments: argparse.Namespace) -> dict[str, Callable[[], list[list[int]]]]:
    """The implementations of the second table: one stream of tinylm, and a batch of streams of tinylm and the peer."""
    model, peer = build_pair(chosen_shape(arguments, "gpt2"))
    model = fused_copy(model)
    tokens, streams = arguments.tokens, arguments.streams
    return {
        CACHED: lambda: tinylm_tokens(model, tokens),
        f"{CACHED}, {streams} streams": lambda: tinylm_tokens(model, tokens, streams),
        f"{PEER}, {streams} streams": lambda: peer_tokens(peer, tokens, streams),
    }


def open_run(path: Path) -> tuple[Decoder, TokenFolder]:
    """The model of a run and its encoded corpus."""
    model, config, tokenizer, _ = load_model(path, "cpu")
    assert isinstance(model, Decoder) and config.data is not None
    return model, reopen_tokens(path, config.data, tokenizer)


def speculative_contestants(path: Path, tokens: int) -> dict[str, Callable[[], object]]:
    """Decoding with the model of a run in fp32 and int8, with and without speculative decoding."""
    model, text = open_run(path)
    prompt, draft = text.val[:200].tolist(), NGramDraft(text.train)
    quantized, model = fused_copy(model, int8=True), fused_copy(model)
    seeds = {name: itertools.count() for name in ("fp32", "fp32, draft", "int8", "int8, draft")}

    def decode(name: str, model: Decoder, speculative: bool) -> list[list[int]]:
        sampler = Sampler(SamplingConfig(), next(seeds[name]), 1, model.vocab_size)
        decoder = ThreadPolicyDecoder(model, measure_thread_latency())
        if speculative:
            return list(generate_speculatively(decoder, prompt, sampler, tokens, draft))
        return list(generate(decoder, [prompt], sampler, tokens))

    return {
        "fp32": lambda: decode("fp32", model, False),
        "fp32, draft": lambda: decode("fp32, draft", model, True),
        "int8": lambda: decode("int8", quantized, False),
        "int8, draft": lambda: decode("int8, draft", quantized, True),
    }


def int8_loss(path: Path) -> str:
    """A sentence that compares the loss (nats per token) of all validation text in fp32 and int8."""
    model, text = open_run(path)

    def loss(model: Decoder) -> float:
        batches = evaluation_batches(text.val, model.context, default_batch_size(model.context))
        return evaluate_loss(model, next_token, batches).loss

    exact, rounded = loss(model), loss(fused_copy(model, int8=True))
    return (
        f"int8 changes the loss of the validation text from {exact:.4f} to {rounded:.4f}: {rounded / exact - 1:+.2%}."
    )


def speed_table(times: Times, tokens: dict[str, int], base: str) -> str:
    """Tokens per second and their ratio to `base`. tokens: the number that each generated per round."""
    per_token: Times = {name: [s / tokens[name] for s in seconds] for name, seconds in times.items()}
    rows = [
        [name, tokens_per_second(per_token, name, 1), "1" if name == base else str(speedup(per_token, name, base))]
        for name in per_token
    ]
    return table(["model", "tokens/s", f"times {base}"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, context=1024)
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens to generate (default: 512)")
    parser.add_argument(
        "--streams", type=int, default=32, metavar="N", help="streams in the second table (default: 32)"
    )
    parser.add_argument("--run", type=Path, help="run directory of a decoder, for the third table")
    arguments = parser.parse_args(argv)
    if arguments.tokens + len(PROMPT) > arguments.context:
        parser.error("--tokens plus the prompt of one token must fit --context: transformers cannot exceed it")

    one = take_turns(contestants(arguments), arguments.rounds, arguments.warmup)
    functions = many_streams(arguments)
    many = take_turns(functions, arguments.rounds, arguments.warmup)
    generated = {name: arguments.tokens * (1 if name == CACHED else arguments.streams) for name in functions}

    print(f"{describe_machine()}\n")
    print(f"{arguments.layers}x{arguments.width}, {arguments.heads} heads, context {arguments.context}, ", end="")
    print(f"vocabulary {arguments.vocab_size}, {arguments.tokens} tokens, fp32; {arguments.rounds} rounds.")
    print(f"tinylm gpt2 and transformers gave the same logits within {TOLERANCE:g}.\n")
    print(speed_table(one, dict.fromkeys(one, arguments.tokens), PEER))
    print(f"\nThe cache makes tinylm {speedup(one, CACHED, UNCACHED)} times as fast.\n")
    print(speed_table(many, generated, CACHED))
    if arguments.run is not None:
        functions = speculative_contestants(arguments.run, arguments.tokens)
        times = take_turns(functions, arguments.rounds, arguments.warmup)
        print(f"\n{arguments.run}, at a temperature of 0.8\n")
        print(speed_table(times, dict.fromkeys(times, arguments.tokens), "fp32"))
        print(f"\n{int8_loss(arguments.run)}")


if __name__ == "__main__":
    main()
