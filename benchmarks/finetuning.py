"""Fine-tuning of SmolLM2-135M or its shape: tokens per second, loss and memory of tinylm, transformers and peft.

    python benchmarks/finetuning.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/finetuning.py                       # random weights
    python benchmarks/finetuning.py MODEL --weights bf16  # dtype of the weights on disk; default: that of the file
    python benchmarks/finetuning.py MODEL --full          # all weights instead of LoRA, beside transformers
    python benchmarks/finetuning.py --shape 1b --batch-size 8 --context 1024   # on a GPU

All have the same weights, batches, learning rate, AdamW settings and initial A. They take turns step by step, each in
its own process. tinylm runs tinylm.finetune_lora or tinylm.train, with the number format that it chooses; the peer runs
in a plain loop with fused AdamW, with bf16 weights, with autocast, and in fp32. Ratios are computed per step.
`share of product rate` is that of training.py, with 6 FLOPs per matrix parameter and token, or 4 with LoRA, whose
frozen matrices need no gradient; the products are measured before the steps. Memory is the peak resident memory of a
process: `steps` from the second step to the last, `process` since its start. Linux only.

On a GPU, the blocks of both are compiled, memory is what torch has reserved, and there is no share of product rate.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Times, ask, describe_machine, memory_of, running, speedup, table, take_turns, tokens_per_second
from torch import nn
from training import number_formats, products, share_of_product_rate

from tinylm.config.model import ModelConfig
from tinylm.jobs.reading import ModelReader, load_text
from tinylm.jobs.run_tokens import encode_text
from tinylm.machine.device import choose_device
from tinylm.models.exporting import export_model
from tinylm.models.open import open_model
from tinylm.reporter import LogReporter
from tinylm.text.batches import Windows
from tinylm.text.file_selection import TextSource
from tinylm.text.tokenizer import train_bpe

SMOLLM2: dict[str, Any] = {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "rope_theta": 1e5}
SMOLLM2 |= {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
TINY = {**SMOLLM2, "vocab_size": 300, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2}
ONE_B: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "rope_theta": 1e4}
ONE_B |= {"num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False}
SHAPES = {"smollm2": SMOLLM2, "1b": ONE_B, "tiny": TINY}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
TEXT = Path(__file__).parents[1] / "data" / "corpus.txt"
VALIDATION = 2000  # characters at the end of the text; small, since only tinylm evaluates

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
BETAS, EPSILON, CLIP = (0.9, 0.999), 1e-8, 1.0


@dataclass(frozen=True)
class Settings:
    """The settings that all workers share.

    folder: has the Hugging Face folder `model`, the texts train.txt and val.txt, and batches.npy, the token ids of the
        batches that tinylm makes from the text: (steps, B, T + 1). rank: of LoRA; None fine-tunes all weights.
    """

    folder: str
    steps: int
    batch_size: int
    rank: int | None
    lr: float
    device: str

    @property
    def home(self) -> Path:
        return Path(self.folder)


# The workers. Each reads a line from stdin before each step, prints the seconds and the loss of the step as JSON, and
# reads one more line before it exits.


class Turns:
    """The protocol with the parent process: wait for a line, run a step, report its time, loss and GPU memory."""

    def __init__(self, device: str) -> None:
        self._device, self._started = device, 0.0

    def wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit("The parent process has exited.")
        self._started = time.perf_counter()

    def report(self, loss: float) -> None:
        seconds, memory = time.perf_counter() - self._started, 0
        if self._device == "cuda":
            memory = torch.cuda.max_memory_reserved()  # with the memory of CUDA graphs
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps({"seconds": seconds, "loss": loss, "memory": memory}), flush=True)


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Set the A matrices (r, in) of a LoRA, if there is one, to the same values in all workers."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parts = name.split(".")  # in both libraries, they contain `layers`, its number, and the projection
            projection = next(PROJECTIONS.index(part) for part in parts if part in PROJECTIONS)
            seed = len(PROJECTIONS) * int(parts[parts.index("layers") + 1]) + projection
            uniform = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.copy_((2 * uniform - 1) / math.sqrt(parameter.shape[1]))


def train_tinylm(settings: Settings, turns: Turns) -> None:
    """Run tinylm.finetune_lora, or tinylm.train for all weights. The first step's time includes an evaluation."""
    import tinylm
    from tinylm.training.events import Logged, Started

    def take_turns(event: Any) -> None:
        if isinstance(event, Started):
            initialise(event.model)
        elif isinstance(event, Logged):
            turns.report(event.loss)
        if isinstance(event, Started | Logged):
            turns.wait()

    shared: dict[str, Any] = {"out": settings.home / "run", "val_data": f"{settings.home}/val.txt", "log_every": 1}
    shared |= {"batch_size": settings.batch_size, "micro_batch": settings.batch_size, "lr": settings.lr, "seed": 0}
    shared |= {"warmup_steps": 0, "schedule": "constant", "optimizer": "adamw", "weight_decay": 0.0, "grad_clip": CLIP}
    shared |= {"beta1": BETAS[0], "beta2": BETAS[1], "callbacks": [take_turns], "device": settings.device}
    shared["compile"] = "on" if settings.device == "cuda" else "off"
    shared |= dict.fromkeys(("steps", "eval_every", "save_every"), settings.steps)
    text, model = settings.home / "train.txt", settings.home / "model"
    if settings.rank is None:
        tinylm.train(text, init_from=model, **shared)
    else:
        tinylm.finetune_lora(text, model, rank=settings.rank, alpha=2.0 * settings.rank, **shared)


def train_peer(settings: Settings, turns: Turns, weights: torch.dtype, autocast: bool) -> None:
    """Run a minimal training loop with transformers and, for LoRA, peft. The LoRA parameters are fp32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    base = transformers.AutoModelForCausalLM.from_pretrained(settings.home / "model", dtype=weights, use_cache=False)
    model: Any = base
    if settings.rank is not None:
        from peft import LoraConfig, get_peft_model

        rank, names = settings.rank, list(PROJECTIONS)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM")
        initialise(model := get_peft_model(base, config))
    model.to(settings.device).train()
    if settings.device == "cuda":
        for layer in base.model.layers:
            layer.compile()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True)
    for rows in np.load(settings.home / "batches.npy"):
        turns.wait()
        tokens = torch.from_numpy(rows).to(settings.device)
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with torch.autocast(settings.device, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.report(loss.item())
    turns.wait()


TINYLM = "tinylm"
WORKERS: dict[str, Callable[[Settings, Turns], None]] = {
    TINYLM: train_tinylm,
    "bf16 weights": lambda settings, turns: train_peer(settings, turns, torch.bfloat16, autocast=False),
    "bf16 weights and autocast": lambda settings, turns: train_peer(settings, turns, torch.bfloat16, autocast=True),
    "bf16 autocast": lambda settings, turns: train_peer(settings, turns, torch.float32, autocast=True),
    "fp32": lambda settings, turns: train_peer(settings, turns, torch.float32, autocast=False),
}


# The comparison.


@dataclass
class Worker:
    """A running worker.

    seconds, losses: of each step. start_peak, step_peak: peak resident memory in bytes, before the second step and
        from then on.
    """

    process: "subprocess.Popen[str]"
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    start_peak: int = 0
    step_peak: int = 0

    def step(self) -> None:
        """Run one step. Before the second one, the system's counter of the peak is reset."""
        if len(self.seconds) == 1:  # a GPU's memory is that of each step
            self.start_peak = self.step_peak
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        result = ask(self.process, "step")
        self.seconds.append(result["seconds"])
        self.losses.append(result["loss"])
        self.step_peak = result["memory"] or memory_of(self.process.pid, "VmHWM")


def make_model(source: Path | None, folder: Path, options: argparse.Namespace) -> None:
    """Write a Hugging Face folder with the weights of `source` or random ones, and the context that the options set."""
    import transformers

    if source is not None:
        export_model(source, to="hf", out=folder, dtype=options.weights)
    else:
        # No padding id: its embedding would be zero, and gradients at zero grow with each RMSNorm.
        config = transformers.LlamaConfig(**SHAPES[options.shape], bos_token_id=0, eos_token_id=1, pad_token_id=None)
        torch.manual_seed(0)
        peer: Any = transformers.LlamaForCausalLM(config)
        peer.to(DTYPES[options.weights or "f32"])
        peer.save_pretrained(folder)
        tokenizer = train_bpe([TEXT.read_text(encoding="utf-8")[:20_000]], 280).to_str()
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**values, "max_position_embeddings": options.context}))


def make_batches(settings: Settings, context: int) -> np.ndarray[Any, Any]:
    """The token ids that tinylm trains on with seed 0: (steps, B, T + 1)."""
    home, reporter = settings.home, LogReporter()
    source = TextSource(paths=(str(home / "train.txt"),), val_data=str(home / "val.txt"))
    split = load_text(source, home, ModelReader(), reporter)
    tokenizer = open_model(home / "model").tokenizer
    tokens, _ = encode_text(split, tokenizer, home, reporter)
    windows = Windows(tokens.train, context, settings.batch_size, 0, tokenizer.end_of_text_id)
    batches = map(windows.batch, range(settings.steps))
    return np.stack([np.concatenate([batch.ids, batch.targets[:, -1:]], axis=1) for batch in batches])


def compare(names: Sequence[str], settings: Path, steps: int) -> dict[str, Worker]:
    """Run the workers' steps in turn."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    with ExitStack() as stack:
        workers = {}
        for name in names:
            command = [sys.executable, __file__, "--worker", name, str(settings)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            workers[name] = Worker(stack.enter_context(running(command, env=environment, **pipes)))
        for _ in range(steps):
            for worker in workers.values():
                worker.step()
        for worker in workers.values():
            worker.process.communicate("exit\n", timeout=300)
    return workers


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
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
    parser.add_argument("--peers", nargs="*", choices=[name for name in WORKERS if name != TINYLM], help="default: all")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="of random weights; tiny tests this program")
    parser.add_argument("--device", default="auto", help="default: auto")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.worker:
        settings = Settings(**json.loads(Path(options.worker[1]).read_text()))
        WORKERS[options.worker[0]](settings, Turns(settings.device))
        return
    device = choose_device(options.device).value
    peers = options.peers if options.peers is not None else [name for name in WORKERS if name != TINYLM]
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        make_model(options.model, home / "model", options)
        text = options.text.read_text(encoding="utf-8")
        (home / "train.txt").write_text(text[:-VALIDATION], encoding="utf-8")
        (home / "val.txt").write_text(text[-VALIDATION:], encoding="utf-8")
        rank, lr = (None, 2e-5) if options.full else (options.rank, 1e-3)
        settings = Settings(temporary, options.steps, options.batch_size, rank, options.lr or lr, device)
        np.save(home / "batches.npy", make_batches(settings, options.context))
        (home / "settings.json").write_text(json.dumps(asdict(settings)))
        config = open_model(home / "model").config.model
        alone = take_turns({dtype: products(dtype) for dtype in number_formats()}, 3) if device == "cpu" else {}
        workers = compare([TINYLM, *peers], home / "settings.json", options.steps)
    print(describe_machine(["torch", "transformers", "peft"]))
    print(report(workers, "transformers" if options.full else "peft", options, config, alone))


def report(
    workers: dict[str, Worker], peer: str, options: argparse.Namespace, config: ModelConfig, alone: Times
) -> str:
    """The table of results, without the time of the first step. peer: a library. alone: seconds of the products."""
    times = {name: worker.seconds[1:] for name, worker in workers.items()}
    tokens, rows = options.batch_size * options.context, []
    for name, worker in workers.items():
        dtype = "fp32" if name == "fp32" else number_formats()[-1]
        share = "-"
        if alone:
            product = [statistics.median(alone[dtype])] * len(times[name])
            share = (
                f"{share_of_product_rate(config, tokens, times[name], product) * (1 if options.full else 2 / 3):.2f}"
            )
        last = worker.losses[-max(1, len(worker.losses) // 4) :]
        row = [name if name == TINYLM else f"{peer}, {name}", tokens_per_second(times, name, tokens)]
        row += ["" if name == TINYLM else str(speedup(times, TINYLM, name)), share]
        row += [f"{worker.losses[0]:.4f}", f"{statistics.mean(last):.4f}"]
        rows.append([*row, *(f"{n / 1e6:,.0f}" for n in (worker.step_peak, max(worker.start_peak, worker.step_peak)))])
    losses, memory = ["first loss", "mean of last quarter"], ["MB, steps", "MB, process"]
    return table(["", "tokens/s", "speedup of tinylm", "share of product rate", *losses, *memory], rows)


if __name__ == "__main__":
    main()
