"""Fine-tune a model one step at a time, so that several processes can take turns (used by finetuning_peer.py).

    python benchmarks/finetuning_worker.py tinylm SETTINGS.json

Reads a line from stdin before each step, and prints the seconds and the loss of the step as JSON. Reads one more line
before it exits.
"""

import importlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
BETAS, EPSILON, CLIP = (0.9, 0.999), 1e-8, 1.0


@dataclass(frozen=True)
class Settings:
    """The settings that all workers share.

    model: Hugging Face folder. text, val: files. batches: .npy file of token ids, (steps, B, T + 1), the batches that
        tinylm makes from the text. home: an existing folder for runs. rank: of LoRA; None fine-tunes all weights.
    """

    model: str
    text: str
    val: str
    batches: str
    home: str
    steps: int
    batch_size: int
    rank: int | None
    lr: float
    compile: bool

    @classmethod
    def read(cls, path: Path) -> "Settings":
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


class Turns:
    """The protocol with the parent process: wait for a line, run a step, report its time and loss."""

    def __init__(self) -> None:
        self._started = 0.0

    def wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit("The parent process has exited.")
        self._started = time.perf_counter()

    def report(self, loss: float) -> None:
        print(json.dumps({"seconds": time.perf_counter() - self._started, "loss": loss}), flush=True)


def initial_a(layer: int, projection: str, shape: torch.Size) -> Tensor:
    """LoRA's initial A of a projection: (r, in), the same in all workers."""
    generator = torch.Generator().manual_seed(len(PROJECTIONS) * layer + PROJECTIONS.index(projection))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Set the A matrices of a LoRA, if there is one. Both libraries' names contain `layers.N` and the projection."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parts = name.split(".")
            projection = next(part for part in parts if part in PROJECTIONS)
            parameter.copy_(initial_a(int(parts[parts.index("layers") + 1]), projection, parameter.shape))


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

    shared: dict[str, Any] = {
        "out": Path(settings.home) / "run",
        "val_data": settings.val,
        "steps": settings.steps,
        "batch_size": settings.batch_size,
        "micro_batch": settings.batch_size,
        "lr": settings.lr,
        "warmup_steps": 0,
        "schedule": "constant",
        "optimizer": "adamw",
        "weight_decay": 0.0,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "grad_clip": CLIP,
        "log_every": 1,
        "eval_every": settings.steps,
        "save_every": settings.steps,
        "seed": 0,
        "compile": "on" if settings.compile else "off",
        "callbacks": [take_turns],
    }
    if settings.rank is None:
        tinylm.train(settings.text, init_from=settings.model, **shared)
    else:
        tinylm.finetune_lora(settings.text, settings.model, rank=settings.rank, alpha=2.0 * settings.rank, **shared)


def train_peer(settings: Settings, turns: Turns, weights: torch.dtype, autocast: bool) -> None:
    """Run a minimal training loop with transformers and, for LoRA, peft. The LoRA parameters are fp32."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    base = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=weights, use_cache=False)
    model = (base if settings.rank is None else with_lora(base, settings.rank)).train()
    if settings.compile:
        for layer in base.model.layers:
            layer.compile()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True)
    for rows in np.load(settings.batches):
        turns.wait()
        tokens = torch.from_numpy(rows)
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=targets, shift_labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.report(loss.item())
    turns.wait()


def with_lora(base: Any, rank: int) -> nn.Module:
    """The peer's model with peft's LoRA on the projections of attention."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    initialise(model)
    return model


TINYLM = "tinylm"
WORKERS: dict[str, Callable[[Settings, Turns], None]] = {
    TINYLM: train_tinylm,
    "bf16 weights": lambda settings, turns: train_peer(settings, turns, torch.bfloat16, autocast=False),
    "bf16 autocast": lambda settings, turns: train_peer(settings, turns, torch.float32, autocast=True),
    "fp32": lambda settings, turns: train_peer(settings, turns, torch.float32, autocast=False),
}


if __name__ == "__main__":
    importlib.import_module("torch._dynamo" if Settings.read(Path(sys.argv[2])).compile else "torch")
    WORKERS[sys.argv[1]](Settings.read(Path(sys.argv[2])), Turns())
