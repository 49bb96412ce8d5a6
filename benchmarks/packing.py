"""Tokens per second of training on conversations: packed rows against one conversation per row.

    python benchmarks/packing.py

Both run one epoch, forward and backward, over the same random conversations, in batches of about the same number of
tokens. The lengths follow a log-normal distribution, which resembles instruction data. Conversations that are not
packed are sorted by length within pools, as in `tinylm train --no-pack`. Padding tokens are not counted.
"""

import argparse
import time
from collections.abc import Callable

import measure
import numpy as np
import torch

from tinylm.device import autocast
from tinylm.model.build import build_model
from tinylm.model.stack import Transformer
from tinylm.objectives.loss import next_token
from tinylm.presets import SIZES, make_model_config
from tinylm.text.chat_batches import ChatRows
from tinylm.text.chat_tokens import FIRST, SCORED, ChatTokens

TOKENS_PER_STEP = 2048
SIGMA = 0.7  # of the logarithm of the lengths
SCORED_SHARE = 0.4  # of the tokens of a conversation, at its end


def random_conversations(median: int, tokens: int, vocab_size: int) -> ChatTokens:
    """Conversations with about `tokens` tokens in total. The last tokens of each conversation are scored."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(max(4, int(median * np.exp(SIGMA * rng.standard_normal()))))
    parts = []
    for length in lengths:
        codes = 4 * rng.integers(0, vocab_size, length)
        codes[-max(1, int(SCORED_SHARE * length)) :] |= SCORED
        codes[0] |= FIRST
        parts.append(codes)
    return ChatTokens(np.concatenate(parts).astype(np.uint32))


def one_epoch(model: Transformer, rows: ChatRows, dtype: str) -> Callable[[], None]:
    """A function that runs forward and backward over all batches of an epoch."""
    size = max(1, round(TOKENS_PER_STEP * len(rows) / rows.n_tokens))
    batches = rows.training_batches(size, seed=0)

    def run() -> None:
        for number in range(batches.batches_per_epoch):
            batch = batches.batch(number).to(model.device)
            with autocast(model.device.type, dtype):
                loss = next_token(model, batch)
            (loss.total / batch.n_targets).backward()
            model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument(
        "--medians", type=int, nargs="+", default=[40, 120, 360], help="median lengths in tokens (default: 40 120 360)"
    )
    parser.add_argument("--tokens", type=int, default=30_000, help="tokens per epoch (default: 30000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--busy", action="store_true", help="measure CPU time on one thread, for a busy machine")
    arguments = parser.parse_args()
    if arguments.busy:
        torch.set_num_threads(1)
    config = make_model_config(
        vocab_size=arguments.vocab_size, preset="modern", size=arguments.size, context=arguments.context
    )
    model = build_model(config).to(arguments.device).train()
    lines = []
    for median in arguments.medians:
        tokens = random_conversations(median, arguments.tokens, arguments.vocab_size)
        rows = {name: ChatRows(tokens, arguments.context, name == "packed") for name in ("packed", "single")}
        epochs = {name: one_epoch(model, rows[name], arguments.dtype) for name in rows}
        clock = time.process_time if arguments.busy else time.perf_counter
        times = measure.take_turns(epochs, arguments.rounds, clock=clock)
        filled = rows["packed"].n_tokens / (len(rows["packed"]) * rows["packed"].width)
        lines.append(
            [
                f"{median}",
                f"{len(tokens)}",
                f"{rows['packed'].width}",
                f"{filled:.1%}",
                *(measure.tokens_per_second(times, name, rows[name].n_tokens) for name in ("single", "packed")),
                str(measure.speedup(times, "packed", "single")),
            ]
        )
    print(f"{measure.describe_machine(['torch'])}; {arguments.size}, {arguments.device}, {arguments.dtype}\n")
    header = ["median length", "conversations", "row", "filled", "single, tokens/s", "packed, tokens/s", "speedup"]
    print(measure.table(header, lines))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
