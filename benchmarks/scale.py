"""Memory of training, training in ranks, and large corpora, each a command. Linux only.

    python benchmarks/scale.py memory --models 4x128 6x384 12x768
    python benchmarks/scale.py memory --models 8x1024 --kinds adamw --ranks 2 --parallel fsdp
    python benchmarks/scale.py ranks
    python benchmarks/scale.py corpora --gigabytes 10

memory: trains each model for three steps with each kind of training, and prints the estimate of `--dry-run`, the peak
resident memory of the process and their ratio. A model is LAYERSxWIDTH with a context of 256 and 4 sequences per step;
from a width of 768, its vocabulary has 50,000 ids. A LoRA adapter is trained on the model of the row before. With
--ranks, torchrun starts N processes, and each has a row, whose estimate is that of rank 0. 20x2048 has a billion
parameters: with AdamW it needs 20 GB of memory, and 16 GB of disk to save it.

ranks: a training step on one batch, which the ranks share; each rank has one thread. tinylm sums the gradients after
the backward pass, torch's DistributedDataParallel during it; with shards (`--parallel fsdp`), each block's weights are
gathered for both passes. All train copies of one model; the gradient norms of their first steps are compared. One
process, with as many threads as there are ranks, has the whole batch, and with one thread the part of one rank. All
take turns. Efficiency is the speed of the ranks divided by that of one thread and by their number; its limit is 1.

corpora: MB/s per core of encoding a large text, memory, and start of a run on the encoded text, which is generated in a
temporary folder (--folder: where), with the cache beside it; both take 1.6 times its size. Lines of common words are
repeated in random order, each with a word that occurs only once. 10 GB take about five minutes on two cores. The last
column extrapolates to 1 TB.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import measure
import torch
from measure import describe_machine, memory_of, process_tree, running, speedup, table, tokens_per_second
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import random_batch

from tinylm.config.model import ModelConfig
from tinylm.distributed.ranks import join_ranks
from tinylm.machine.device import autocast
from tinylm.objectives.loss import next_token
from tinylm.system.ranks import ONE_RANK, Launch, Ranks
from tinylm.text.batches import Batch
from tinylm.training.parallel import full, shard_model, sum_gradients
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
VOCABULARY = 50_000  # of wide models
KINDS = {"adamw": "--optimizer adamw", "muon": "--optimizer muon", "lora": ""}  # of training, with their options
KINDS |= {f"{kind}-checkpointed": f"{words} --checkpoint-activations" for kind, words in KINDS.items()}
COMMON = "--steps 3 --eval-every 3 --save-every 1 --batch-size 4 --val-fraction 0.02 --compile off --force --quiet"


# Memory of training.


def memory(options: argparse.Namespace) -> None:
    """Print estimates and peaks by model and kind of training."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus, tokenizer, base = Path(folder) / "corpus.txt", Path(folder) / "tokenizer.json", Path(folder) / "base"
        write_corpus(corpus, 5_000_000)
        measure.run_tinylm(["train-tokenizer", corpus, "--vocab-size", VOCABULARY, "--out", tokenizer, "-q"])
        corpus.write_text(corpus.read_text()[:300_000])
        for model in options.models:
            layers, width = map(int, model.split("x"))
            shape = f"--layers {layers} --width {width} --heads {max(1, width // 64)} --context 256"
            shape += f" --tokenizer {tokenizer if width >= 768 else 'char'}"
            for kind in options.kinds:
                start = f"train {corpus} --out {base} {shape}"
                if kind.startswith("lora"):
                    start = f"finetune-lora {corpus} --model {base} --out {folder}/lora"
                words = f"{start} {COMMON} --dtype {options.dtype} {KINDS[kind]}".split()
                command = measure.tinylm_command(*words)
                if options.ranks > 1:
                    torchrun = [sys.executable, *TORCHRUN, str(options.ranks)]
                    command = [*torchrun, *command[1:], "--parallel", options.parallel]
                plan = subprocess.check_output([*command, "--dry-run", "--json"], timeout=600)
                estimate = int(json.loads(plan)["memory"])
                for rank, peak in enumerate(peak_resident_memory(command)):
                    name = kind if options.ranks == 1 else f"{kind}, {options.parallel}, rank {rank} of {options.ranks}"
                    rows.append([model, name, f"{estimate / 1e6:,.0f}", f"{peak / 1e6:,.0f}", f"{estimate / peak:.2f}"])
    print(describe_machine(["torch", "tokenizers"]))
    print(table([f"model, {options.dtype}", "training", "estimate, MB", "peak resident memory, MB", "ratio"], rows))


def peak_resident_memory(command: Sequence[str]) -> list[int]:
    """Run a command; returns the peak resident memory of each rank in bytes, as recorded by the system.

    A command without torchrun is its only rank.
    """
    peaks: dict[int, int] = {}
    with running(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for pid in process_tree(process.pid):
                with suppress(OSError):  # the process has ended
                    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    rank = next((int(entry[5:]) for entry in entries if entry.startswith(b"RANK=")), -1)
                    peaks[rank] = max(peaks.get(rank, 0), memory_of(pid, "VmHWM"))
            time.sleep(0.02)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return [peaks[rank] for rank in sorted(peaks) if rank >= 0] or [peaks[-1]]


# Training in ranks.

OURS, SHARDS, PEER = "ranks, tinylm", "ranks, tinylm, shards", "ranks, DistributedDataParallel"
WHOLE, PART = "one process, all threads", "one thread"
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # of gradient norms, relative; bf16 rounds the loss of each part


class BatchLoss(nn.Module):
    """The loss of a batch as the forward pass of a module, which DistributedDataParallel needs."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return next_token(self.model, batch).total


class Training:
    """A model that is trained on its part of a batch.

    rows: of the whole batch. parallel: OURS, SHARDS, PEER, or WHOLE for one process
    """

    def __init__(self, config: ModelConfig, rows: int, dtype: str, ranks: Ranks, parallel: str) -> None:
        model = cast(Decoder, build_model(config, 0))
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


def on(ranks: Ranks | None, threads: int, work: Callable[[], object]) -> None:
    """Call `work` with this number of threads on all ranks, or on rank 0 of `ranks` while the others wait."""
    torch.set_num_threads(threads)
    if ranks is None or ranks.is_first:
        work()
    torch.distributed.barrier()


def row_of_ranks(config: ModelConfig, options: argparse.Namespace, dtype: str, ranks: Ranks) -> list[str]:
    """The row of the table for a number format."""
    torch.set_num_threads(1)
    rows, part = options.rows, -(-options.rows // ranks.size)
    ours, shards, peer = (Training(config, rows, dtype, ranks, parallel) for parallel in (OURS, SHARDS, PEER))
    whole, alone = (Training(config, number, dtype, ONE_RANK, WHOLE) for number in (rows, part))
    norms = [training.step() for training in (ours, shards, peer, whole)]
    if max(norms) - min(norms) > TOLERANCE[dtype] * min(norms):
        raise SystemExit(f"the gradient norms of the first step differ: {norms}")
    works: dict[str, tuple[Ranks | None, int, Training]] = {OURS: (None, 1, ours), SHARDS: (None, 1, shards)}
    works |= {PEER: (None, 1, peer), WHOLE: (ranks, ranks.size, whole), PART: (ranks, 1, alone)}
    steps = {name: partial(on, who, threads, training.step) for name, (who, threads, training) in works.items()}
    times = measure.take_turns(steps, options.rounds, options.warmup)
    speeds = [tokens_per_second(times, name, (part if name == PART else rows) * config.context) for name in works]
    # With perfect scaling, the ranks need as long for the batch as one thread for the part of one rank.
    compared = ((OURS, PEER), (OURS, PART), (OURS, WHOLE), (SHARDS, OURS))
    return [dtype, *speeds, *(str(speedup(times, one, other)) for one, other in compared)]


def ranks(options: argparse.Namespace) -> None:
    """Start torchrun with this program, or in a rank measure, and print the table on rank 0."""
    if "RANK" not in os.environ:
        command = [sys.executable, *TORCHRUN, str(options.ranks), *sys.argv]
        subprocess.run(command, check=True, timeout=3600)
        return
    config = measure.chosen_shape(options, "modern")
    with join_ranks(Launch.of(os.environ)) as joined:
        rows = [row_of_ranks(config, options, dtype, joined) for dtype in options.dtypes]
        if joined.is_first:
            parameters = sum(parameter.numel() for parameter in build_model(config, 0).parameters())
            print(f"{parameters:,} parameters, {options.rows} rows of {config.context} tokens, {joined.size} ranks")
            speeds = ["tok/s of " + name for name in (OURS, SHARDS, PEER, WHOLE, PART)]
            ratios = ["tinylm / DistributedDataParallel", "efficiency", "tinylm / one process", "shards / replicas"]
            print(table(["format", *speeds, *ratios], rows))
            print(describe_machine(["torch"]))


# Large corpora.

LINES, LINE_WORDS = 50_000, 48  # that are repeated; as many are written at a time
TERABYTE = 1e12
VAL_FRACTION = "0.01"
TINY = "--layers 1 --heads 2 --width 32 --context 32 --steps 1 --compile off"


def corpora(options: argparse.Namespace) -> None:
    """Print what the preparation of a large text takes."""
    if options.child is not None:
        prepare(options.child)
        return
    size = int(options.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        os.environ["TINYLM_CACHE"] = str(Path(folder) / "cache")
        corpus, cache = Path(folder) / "corpus.txt", Path(folder) / "cache" / "tokens"
        write_corpus(corpus, size)
        time.sleep(3)  # statistics of files that have just changed are not cached (files.SETTLED_SECONDS)
        first, start = Measured(corpus), Measured(corpus)
        start_up = f"train {corpus} --val-fraction {VAL_FRACTION} {TINY} --dry-run".split()
        commands = {"torch": [sys.executable, "-c", "import torch"], "plan": measure.tinylm_command(*start_up)}
        silent = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 3600}
        runs = {name: partial(subprocess.run, command, **silent) for name, command in commands.items()}
        times = measure.take_turns(runs, rounds=3, warmup=0)
        dry_run = min(times["plan"]) - min(times["torch"])
        shards = len(list(cache.glob("*/train*.bin")))
    cores, larger = len(os.sched_getaffinity(0)), TERABYTE / size
    scan, choosing, encode = (first.phases[name] for name in ("scan", "tokenizer", "encode"))
    rows = [
        ["reading once (hash, alphabet), seconds", f"{scan:.1f}", f"{scan * larger:,.0f}"],
        # one pass, and training, whose time is constant
        ["choosing a tokenizer, seconds", f"{choosing:.1f}", f"at most {choosing * larger:,.0f}"],
        ["encoding, MB/s per core", f"{size / 1e6 / encode / cores:.1f}", ""],
        [f"encoding on {cores} cores, seconds", f"{encode:.1f}", f"{encode * larger:,.0f}"],
        ["peak memory of all processes, MB", f"{first.peak / 1e6:,.0f}", "the same"],
        ["token files of the training text", str(shards), f"{shards * larger:,.0f}"],
        ["preparing an encoded corpus, seconds", f"{sum(start.phases.values()):.2f}", ""],
        ["of these, opening the token files", f"{start.phases['open']:.3f}", f"{start.phases['open'] * larger:.2f}"],
        ["tinylm train --dry-run, seconds after import torch", f"{dry_run:.2f}", ""],
    ]
    print(describe_machine(["torch", "tokenizers", "gigatoken", "numpy"]))
    print(table(["", f"{size / 1e9:g} GB", "1 TB"], rows))


def write_corpus(path: Path, size: int) -> None:
    """Lines of about 300 bytes of common words, in random order, each with a word of its own."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = ["".join(rng.choices(letters[: 8 + n % 18], k=2 + n % 9)) for n in range(30_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    drawn = rng.choices(words, weights, k=LINE_WORDS * LINES)
    lines = [" ".join(drawn[start : start + LINE_WORDS]) for start in range(0, len(drawn), LINE_WORDS)]
    to_letters = str.maketrans("0123456789abcdef", "bcdfghklmnprstvw")
    with path.open("w", encoding="ascii") as file:
        while file.tell() < size:
            block = rng.choices(lines, k=LINES)
            new = f"{rng.getrandbits(40 * LINES):0{10 * LINES}x}".translate(to_letters)
            file.write("".join(f"{line} {new[10 * n : 10 * n + 8]}.\n" for n, line in enumerate(block)))


def prepare(corpus: Path) -> None:
    """Scan and encode a text as a run does, and print the seconds of each phase as JSON. For a process of its own."""
    from tinylm.jobs.run_tokens import encode_split
    from tinylm.text.corpus import find_corpus
    from tinylm.text.split import split_corpus
    from tinylm.text.token_files import open_part, token_key
    from tinylm.text.tokenizer_choice import choose_tokenizer

    phases = {}
    clock = time.monotonic()

    def lap(name: str) -> None:
        nonlocal clock
        phases[name] = time.monotonic() - clock
        clock = time.monotonic()

    split = split_corpus([find_corpus([str(corpus)])], float(VAL_FRACTION))
    lap("scan")
    tokenizer = choose_tokenizer(split, "auto", None)
    lap("tokenizer")
    tokens, data = encode_split(split, tokenizer)
    lap("encode")
    key = token_key(data.fingerprint, data.val_fingerprint, data.train_characters, tokenizer, data.encoder)
    open_part(tokens.path, "train", key, tokenizer.vocab_size)
    lap("open")
    print(json.dumps(phases))


class Measured:
    """The seconds of each phase of `prepare`, and the peak of the anonymous memory of its processes in bytes."""

    def __init__(self, corpus: Path) -> None:
        command, self.peak = [sys.executable, __file__, "corpora", "--child", str(corpus)], 0
        with running(command, stdout=subprocess.PIPE) as process:
            while process.poll() is None:
                self.peak = max(self.peak, sum(memory_of(pid, "RssAnon") for pid in process_tree(process.pid)))
                time.sleep(0.05)
            self.phases: dict[str, float] = json.loads(process.communicate()[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = commands.add_parser("memory")
    chosen.add_argument("--models", nargs="+", default=["4x128", "6x384"], help="default: 4x128 6x384")
    chosen.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS)[:3], help="default: adamw muon lora")
    chosen.add_argument("--dtype", default="bf16", help="default: bf16")
    chosen.add_argument("--ranks", type=int, default=1, metavar="N", help="processes, by torchrun (default: 1)")
    chosen.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="default: ddp")
    chosen.set_defaults(command=memory)
    chosen = commands.add_parser("ranks")
    chosen.add_argument("--ranks", type=int, default=2, metavar="N", help="processes, by torchrun (default: 2)")
    chosen.add_argument("--rows", type=int, default=16, metavar="N", help="sequences per batch (default: 16)")
    chosen.add_argument("--dtypes", nargs="+", choices=TOLERANCE, default=list(TOLERANCE), help="default: fp32 bf16")
    measure.add_options(chosen, context=256)
    chosen.set_defaults(command=ranks)
    chosen = commands.add_parser("corpora")
    chosen.add_argument("--gigabytes", type=float, default=10, help="size of the corpus (default: 10)")
    chosen.add_argument("--folder", type=Path, help="where the temporary folder is made (default: $TMPDIR)")
    chosen.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    chosen.set_defaults(command=corpora)
    options = parser.parse_args(arguments)
    options.command(options)


if __name__ == "__main__":
    main()
