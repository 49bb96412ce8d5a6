"""Training in ranks on the CPU, with replicas and with shards, beside torch's DistributedDataParallel and one process.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/ranks.py

A step is a forward and backward pass, gradient clipping and AdamW on one batch, which the ranks share; each rank has
one thread. tinylm sums the gradients after the backward pass (`tinylm.training.parallel`), DistributedDataParallel
during it. With shards (`--parallel fsdp`), each block's weights are gathered for its forward and its backward pass. All
train copies of one model; their gradient norms of the first step are compared before the measurement. One process, with
as many threads as there are ranks, has the whole batch, and with one thread the part of one rank. All five take turns.
Efficiency is the speed of the ranks divided by the number of ranks and the speed of one thread.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
from measure import add_options, chosen_shape, describe_machine, speedup, table, take_turns, tokens_per_second
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_step import random_batch

from tinylm.device import autocast
from tinylm.launch import Launch
from tinylm.model.build import build_model
from tinylm.model_config import ModelConfig
from tinylm.objectives.loss import next_token
from tinylm.ranks import ONE_RANK, Ranks, join_ranks
from tinylm.text.batches import Batch
from tinylm.training.parallel import shard_model, sum_gradients
from tinylm.training.sharded_tensors import full

OURS, SHARDS, PEER = "ranks, tinylm", "ranks, tinylm, shards", "ranks, DistributedDataParallel"
WHOLE, PART = "one process, all threads", "one thread"
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of gradient norms, relative; bf16 rounds the loss of each part


class BatchLoss(nn.Module):
    """The loss of a batch as the forward pass of a module, which DistributedDataParallel needs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return next_token(self.model, batch).total


class Training:
    """A model that is trained on its part of a batch.

    rows: of the whole batch. parallel: OURS, SHARDS, PEER, or WHOLE for one process
    """

    def __init__(self, config: ModelConfig, rows: int, dtype: str, ranks: Ranks, parallel: str) -> None:
        model = build_model(config, 0)
        if parallel == SHARDS:
            shard_model(model, "cpu", dtype)
        self.parameters = list(model.parameters())
        self.loss: nn.Module = BatchLoss(model)
        if parallel == PEER:
            self.loss = DistributedDataParallel(self.loss, gradient_as_bucket_view=True)
        self.parallel, self.dtype, self.ranks = parallel, dtype, ranks
        batch = random_batch(config, rows)
        self.targets, self.part = batch.n_targets, ranks.part(batch)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=True)

    def step(self) -> float:
        """One step; returns the norm of the gradient of the whole batch."""
        self.optimizer.zero_grad(set_to_none=True)
        # DistributedDataParallel divides the sum of the gradients by the number of ranks.
        scale = self.ranks.size if self.parallel == PEER else 1
        with autocast("cpu", self.dtype):
            loss = self.loss(self.part) * scale / self.targets
        loss.backward()
        if self.parallel in (OURS, WHOLE):
            missing = [index for index, parameter in enumerate(self.parameters) if parameter.grad is None]
            sum_gradients(self.parameters, self.ranks.gather(missing), self.ranks)
        norm = full(nn.utils.clip_grad_norm_(self.parameters, 1.0)).item()
        self.optimizer.step()
        return norm


def on_all(threads: int, work: Callable[[], object]) -> None:
    """Call `work` on all ranks, with this number of threads each, until all have finished."""
    torch.set_num_threads(threads)
    work()
    torch.distributed.barrier()


def on_first(ranks: Ranks, threads: int, work: Callable[[], object]) -> None:
    """Call `work` on rank 0, with this number of threads, while the others wait."""
    torch.set_num_threads(threads)
    if ranks.is_first:
        work()
    torch.distributed.barrier()


def measure(config: ModelConfig, arguments: argparse.Namespace, dtype: str, ranks: Ranks) -> list[str]:
    """The row of the table for a number format."""
    torch.set_num_threads(1)
    rows, part = arguments.rows, -(-arguments.rows // ranks.size)
    ours, shards, peer = (Training(config, rows, dtype, ranks, parallel) for parallel in (OURS, SHARDS, PEER))
    whole, alone = (Training(config, number, dtype, ONE_RANK, WHOLE) for number in (rows, part))
    norms = [training.step() for training in (ours, shards, peer, whole)]
    if max(norms) - min(norms) > TOLERANCE[dtype] * min(norms):
        raise SystemExit(f"the gradient norms of the first step differ: {norms}")
    times = take_turns(
        {
            OURS: partial(on_all, 1, ours.step),
            SHARDS: partial(on_all, 1, shards.step),
            PEER: partial(on_all, 1, peer.step),
            WHOLE: partial(on_first, ranks, ranks.size, whole.step),
            PART: partial(on_first, ranks, 1, alone.step),
        },
        arguments.rounds,
        arguments.warmup,
    )
    tokens = rows * config.context
    speeds = [tokens_per_second(times, name, tokens) for name in (OURS, SHARDS, PEER, WHOLE)]
    # With perfect scaling, the ranks need as long for the batch as one thread for the part of one rank.
    return [
        dtype,
        *speeds,
        tokens_per_second(times, PART, part * config.context),
        str(speedup(times, OURS, PEER)),
        str(speedup(times, OURS, PART)),
        str(speedup(times, OURS, WHOLE)),
        str(speedup(times, SHARDS, OURS)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16, metavar="N", help="sequences per batch (default: 16)")
    parser.add_argument("--dtypes", default="fp32,bf16", metavar="LIST", help="number formats (default: fp32,bf16)")
    add_options(parser, context=256)
    arguments = parser.parse_args()
    config = chosen_shape(arguments, "modern")
    with join_ranks(Launch.of(os.environ)) as ranks:
        if ranks.size == 1:
            raise SystemExit(f"start this with torchrun: {__doc__.splitlines()[2].strip()}")
        rows = [measure(config, arguments, dtype, ranks) for dtype in arguments.dtypes.split(",")]
        if ranks.is_first:
            parameters = sum(parameter.numel() for parameter in build_model(config, 0).parameters())
            print(
                f"{parameters:,} parameters, {arguments.rows} sequences of {config.context} tokens, {ranks.size} ranks"
            )
            speeds = ["tok/s of " + name for name in (OURS, SHARDS, PEER, WHOLE, PART)]
            ratios = ["tinylm / DistributedDataParallel", "efficiency", "tinylm / one process", "shards / replicas"]
            print(table(["format", *speeds, *ratios], rows))
            torch.set_num_threads(1)
            print(describe_machine(["torch"]))


if __name__ == "__main__":
    main()
