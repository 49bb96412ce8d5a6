"""Fine-tuning of SmolLM2-135M or its shape: tokens per second, loss and memory of tinylm, transformers and peft.

    python benchmarks/finetuning_peer.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/finetuning_peer.py                       # random weights
    python benchmarks/finetuning_peer.py MODEL --weights bf16  # dtype of the weights on disk; default: that of the file
    python benchmarks/finetuning_peer.py MODEL --full          # all weights instead of LoRA, beside transformers

All have the same weights, batches, learning rate, AdamW settings and initial A. They take turns step by step, each in
its own process. tinylm runs tinylm.finetune_lora or tinylm.train, with the number format that it chooses; the peer runs
in a plain loop with fused AdamW, with bf16 weights, with autocast, and in fp32. Ratios are computed per step; their
median is printed.

Memory is the peak resident memory of a process: `steps` from the second step to the last, `process` since its start,
which for tinylm includes the evaluation before the first step. Linux only.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import family_peers
import numpy as np
import torch
import transformers
from finetuning_worker import TINYLM, WORKERS, Settings
from measure import describe_machine, speedup, table, tokens_per_second

from tinylm.exporting import export_model
from tinylm.open_model import open_model
from tinylm.reporter import LogReporter
from tinylm.text.batches import Windows
from tinylm.text.corpus_loading import TextSource, encode_text, load_text

SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}
TINY = {**SMOLLM2, "vocab_size": 300, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TEXT = Path(__file__).parents[1] / "data" / "corpus.txt"
VALIDATION = 2000  # characters at the end of the text; small, since only tinylm evaluates


@dataclass
class Worker:
    """A running process of finetuning_worker.py.

    seconds, losses: of each step. start_peak, step_peak: peak resident memory in bytes, before the second step and
        from then on.
    """

    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    start_peak: int = 0
    step_peak: int = 0

    def step(self) -> None:
        """Run one step."""
        self.proceed()
        line = _pipe(self.process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait(60)}")
        result = json.loads(line)
        self.seconds.append(result["seconds"])
        self.losses.append(result["loss"])

    def proceed(self) -> None:
        """Signal the process to run the next step or, after the last one, to exit."""
        _pipe(self.process.stdin).write("\n")
        _pipe(self.process.stdin).flush()

    def reset_peak(self) -> None:
        """Record the peak so far as `start_peak`, and reset the system's counter."""
        self.start_peak = self._peak()
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def read_peak(self) -> None:
        """Record the peak since `reset_peak`, or before the second step since the start, as `step_peak`."""
        self.step_peak = self._peak()

    @property
    def peak(self) -> int:
        """The peak since the start of the process, in bytes."""
        return max(self.start_peak, self.step_peak)

    def _peak(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def make_model(source: Path | None, folder: Path, options: argparse.Namespace) -> None:
    """Write a Hugging Face folder with the weights of `source` or random ones, and the context that the options set."""
    if source is not None:
        export_model(source, to="hf", out=folder, dtype=options.weights)
    else:
        shape = TINY if options.tiny else SMOLLM2
        config = transformers.LlamaConfig(**shape, bos_token_id=0, eos_token_id=1, pad_token_id=2)
        torch.manual_seed(0)
        peer = transformers.LlamaForCausalLM(config).to(DTYPES[options.weights or "f32"])
        peer.save_pretrained(folder)
        family_peers.save_tokenizer(folder)
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**values, "max_position_embeddings": options.context}))


def make_batches(settings: Settings, context: int) -> np.ndarray:
    """The token ids that tinylm trains on with seed 0: (steps, B, T + 1)."""
    reporter = LogReporter()
    tokenizer = open_model(Path(settings.model)).tokenizer
    split = load_text(TextSource(paths=(settings.text,), val_data=settings.val), Path(settings.home), "text", reporter)
    tokens, _ = encode_text(split, tokenizer, Path(settings.home), reporter)
    windows = Windows(tokens.train, context, settings.batch_size, seed=0)
    batches = map(windows.batch, range(settings.steps))
    return np.stack([np.concatenate([batch.ids, batch.targets[:, -1:]], axis=1) for batch in batches])


@contextmanager
def running(name: str, settings: Path) -> Iterator[Worker]:
    """Start a worker; at the end of the block, wait up to 300 s for its exit and kill it otherwise."""
    command = [sys.executable, str(Path(__file__).with_name("finetuning_worker.py")), name, str(settings)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Worker(process)
            process.wait(300)
        finally:
            process.kill()


def compare(names: Sequence[str], settings: Path, steps: int) -> dict[str, Worker]:
    """Run the workers' steps in turn."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(running(name, settings)) for name in names}
        for number in range(steps):
            for worker in workers.values():
                if number == 1:
                    worker.reset_peak()
                worker.step()
                worker.read_peak()
        for worker in workers.values():
            worker.proceed()
    return workers


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="any model that tinylm opens (default: random weights)")
    parser.add_argument("--weights", choices=sorted(DTYPES), help="dtype of the weights on disk")
    parser.add_argument("--text", type=Path, default=TEXT, help="default: data/corpus.txt")
    parser.add_argument("--steps", type=int, default=20, help="including the first, which is not timed (default: 20)")
    parser.add_argument("--batch-size", type=int, default=4, help="default: 4")
    parser.add_argument("--context", type=int, default=256, help="default: 256")
    method = parser.add_mutually_exclusive_group()
    method.add_argument("--rank", type=int, default=8, help="of LoRA (default: 8)")
    method.add_argument("--full", action="store_true", help="fine-tune all weights")
    parser.add_argument("--lr", type=float, help="default: 1e-3, with --full 2e-5")
    parser.add_argument("--compile", action="store_true", help="compile the layers of both")
    parser.add_argument("--peers", nargs="*", choices=[name for name in WORKERS if name != TINYLM], help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, to test this program")
    options = parser.parse_args(arguments)
    peers = options.peers if options.peers is not None else [name for name in WORKERS if name != TINYLM]
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        make_model(options.model, home / "model", options)
        text = options.text.read_text(encoding="utf-8")
        (home / "train.txt").write_text(text[:-VALIDATION], encoding="utf-8")
        (home / "val.txt").write_text(text[-VALIDATION:], encoding="utf-8")
        settings = Settings(
            model=str(home / "model"),
            text=str(home / "train.txt"),
            val=str(home / "val.txt"),
            batches=str(home / "batches.npy"),
            home=str(home),
            steps=options.steps,
            batch_size=options.batch_size,
            rank=None if options.full else options.rank,
            lr=options.lr if options.lr is not None else 2e-5 if options.full else 1e-3,
            compile=options.compile,
        )
        np.save(settings.batches, make_batches(settings, options.context))
        settings.write(home / "settings.json")
        workers = compare([TINYLM, *peers], home / "settings.json", options.steps)
        shutil.rmtree(home / "model")
    print(describe_machine(["torch", "transformers", "peft"]))
    print(report(workers, "transformers" if options.full else "peft", options.batch_size * options.context))


def report(workers: dict[str, Worker], peer: str, tokens: int) -> str:
    """The table of results, without the time of the first step. peer: a library. tokens: per step."""
    times = {name: worker.seconds[1:] for name, worker in workers.items()}
    rows = []
    for name, worker in workers.items():
        last = worker.losses[-max(1, len(worker.losses) // 4) :]
        rows.append(
            [
                name if name == TINYLM else f"{peer}, {name}",
                tokens_per_second(times, name, tokens),
                "" if name == TINYLM else str(speedup(times, TINYLM, name)),
                f"{worker.losses[0]:.4f}",
                f"{statistics.mean(last):.4f}",
                f"{worker.step_peak / 1e6:,.0f}",
                f"{worker.peak / 1e6:,.0f}",
            ]
        )
    names = ["", "tokens/s", "speedup of tinylm", "first loss", "mean of last quarter", "MB, steps", "MB, process"]
    return table(names, rows)


if __name__ == "__main__":
    main()
