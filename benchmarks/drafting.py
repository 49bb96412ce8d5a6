"""Speculative decoding by how well the draft predicts the model: its speed relative to decoding without a draft.

    python benchmarks/drafting.py                          # 4x128, 6x384, 12x768: 5 minutes
    python benchmarks/drafting.py --models SmolLM2-135M-Instruct.Q4_1.gguf --tokens 128    # 4 minutes

In place of n-grams of a training text, the draft proposes each sampled token with a given probability: with 0, it is
always wrong, with 1 always right. The tokens are those of the same seed without a draft, so that all decode the same
text, by torch (with llama.cpp, `tinylm sample` uses a draft only with `--draft ngram`). `ratio` is the speed relative
to no draft, per round.
"""

import argparse
import functools
import random
from collections.abc import Callable, Sequence

from measure import print_machine, speedup, table, take_turns, tokens_per_second
from sampling import Subject, add_model_option, make_subject

from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import NextTokenModel, generate
from tinylm.generation.sampler import Sampler
from tinylm.generation.speculative import generate_speculatively
from tinylm.generation.thread_policy import ThreadPolicyDecoder
from tinylm.kernels.thread_latency import thread_latency
from tinylm.model.build import build_empty_model
from tinylm.model.decoder import Decoder
from tinylm.reporter import LogReporter

PROMPT = [1]


class OracleDraft:
    """Proposes the tokens of a known text, each with the probability `accuracy`, and otherwise another token."""

    def __init__(self, text: Sequence[int], accuracy: float, vocab_size: int) -> None:
        self._text, self._accuracy, self._vocab_size = text, accuracy, vocab_size
        self._random = random.Random(0)

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        """See `DraftModel.propose`."""
        known = self._text[len(text) : len(text) + limit]
        wrong = (self._random.random() >= self._accuracy for _ in known)
        return [(token + miss) % self._vocab_size for token, miss in zip(known, wrong, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_option(parser)
    parser.add_argument(
        "--accuracies", nargs="+", type=float, default=[0, 0.5, 0.8, 1], metavar="P", help="default: 0 0.5 0.8 1"
    )
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="default: 512, the least with a draft")
    parser.add_argument("--int8", action="store_true", help="quantize the weights (default: fp32)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    options = parser.parse_args(arguments)
    print_machine()
    rows = []
    for name in options.models:
        subject = make_subject(name)
        model = prepared(subject, options.int8)
        functions = contestants(model, options.accuracies, options.tokens)
        times = take_turns(functions, options.rounds, warmup=0)
        for draft in times:
            rate = tokens_per_second(times, draft, options.tokens)
            rows.append([subject.name, draft, rate, str(speedup(times, draft, "none"))])
    print(table(["model", "draft is right", "tokens/s", "ratio"], rows))


def prepared(subject: Subject, int8: bool) -> Decoder:
    """The model, prepared as for `tinylm sample --engine torch`."""
    exported = subject.exported
    model = build_empty_model(exported.config)
    model.load_state_dict({key: tensor.float() for key, tensor in exported.tensors.items()}, assign=True)
    assert isinstance(model, Decoder)
    fuse_model(model.eval(), int8)
    return model


def contestants(model: Decoder, accuracies: Sequence[float], tokens: int) -> dict[str, Callable[[], object]]:
    """Functions that decode without a draft, and with one of each accuracy."""
    decoder = ThreadPolicyDecoder(model, thread_latency(LogReporter()))
    text = [*PROMPT, *decode(decoder, model.vocab_size, tokens, None)]
    functions: dict[str, Callable[[], object]] = {
        "none": functools.partial(decode, decoder, model.vocab_size, tokens, None)
    }
    for accuracy in accuracies:
        draft = OracleDraft(text, accuracy, model.vocab_size)
        functions[f"{accuracy:.0%}"] = functools.partial(decode, decoder, model.vocab_size, tokens, draft)
    return functions


def decode(model: NextTokenModel, vocab_size: int, tokens: int, draft: OracleDraft | None) -> list[int]:
    """The tokens after PROMPT, which do not depend on the draft except for rounding."""
    sampler = Sampler(SamplingConfig(temperature=0.8), 0, 1, vocab_size)
    if draft is None:
        return [token for (token,) in generate(model, [PROMPT], sampler, tokens)]
    return [token for (token,) in generate_speculatively(model, PROMPT, sampler, tokens, draft)]


if __name__ == "__main__":
    main()
