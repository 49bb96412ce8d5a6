"""Learning rates of adapters: the held-out loss at each rate, by base model, kind of adapter and number of steps.

    python benchmarks/adapter_rates.py german.txt --base checkpoints/nano --base checkpoints/micro --steps 50,200

The text is split into 80 % for training, 10 % on which the best rate is chosen, and 10 % (the test part), whose loss is
printed. Every run uses the recipe of its kind of adapter, in fp32 and in this process. Losses that are not finite
are printed as 'diverged'. With --out, runs that are recorded in the file are not repeated.
"""

import argparse
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import describe_machine, table
from training_step import NoStore

from tinylm.adapters.bottleneck import sublayers
from tinylm.adapters.load import add_adapter
from tinylm.adapters.lora import max_rank, target_modules
from tinylm.errors import DivergedError
from tinylm.evaluation.loop import default_batch_size, evaluate_loss
from tinylm.model.stack import Transformer
from tinylm.planning.recipes import RECIPES
from tinylm.run_config import AdapterConfig
from tinylm.run_directory.loading import load_model, read_config, read_tokenizer
from tinylm.task_kinds import make_task
from tinylm.text.batches import evaluation_batches
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.optimizer import build_optimizer
from tinylm.training.state import TrainerState
from tinylm.training.trainer import Trainer, TrainerHooks, TrainingJob
from tinylm.training_config import Budget, TrainingConfig

KINDS: dict[str, dict[str, Any]] = {
    **{f"lora-{rank}": {"rank": rank} for rank in (2, 8, 32)},
    "lora-8-share-b": {"rank": 8, "share_b": True},
    "lora-8-stabilised": {"rank": 8, "rank_stabilised": True},
    "lora-32-stabilised": {"rank": 32, "rank_stabilised": True},
    **{f"lora-{rank}-all": {"rank": rank, "target": "all"} for rank in (2, 8, 32)},
    "lora-8-all-share-b": {"rank": 8, "target": "all", "share_b": True},
    **{f"bottleneck-{size}": {"kind": "bottleneck", "rank": size} for size in (16, 64)},
}
RATES = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = 1024  # per step
EVAL_TOKENS = 40_000  # of each held-out part


@dataclass(frozen=True)
class Text:
    """The token ids of a text, (N,) for each part."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="the text to fine-tune on")
    parser.add_argument("--base", type=Path, action="append", required=True, help="a run of tinylm train (repeatable)")
    parser.add_argument("--kinds", type=_words, default=tuple(KINDS), help="some of: " + ", ".join(KINDS))
    parser.add_argument("--steps", type=_numbers(int), default=(50, 200), help="default: 50,200")
    parser.add_argument("--rates", type=_numbers(float), default=RATES, help="default: 0.002,0.005,0.01,0.02,0.05,0.1")
    parser.add_argument("--seeds", type=_numbers(int), default=(0,), help="default: 0")
    parser.add_argument("--alpha", type=float, default=2.0, help="alpha of LoRA as a multiple of the rank (default: 2)")
    parser.add_argument("--warmup", type=float, default=None, help="fraction of the steps (default: the recipe's)")
    parser.add_argument("--train-characters", type=int, default=None, help="train on the first N characters only")
    parser.add_argument("--out", type=Path, default=None, help="JSONL file of results; appended to if it exists")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    records = {_key(record): record for record in _read(options.out)}
    rows = []
    for base in options.base:
        tokenizer = read_tokenizer(base, read_config(base))
        text = split(options.text, tokenizer, options.train_characters)
        for kind, steps in itertools.product(options.kinds, options.steps):
            for rate, seed in itertools.product(options.rates, options.seeds):
                settings = {
                    "base": base.name,
                    "text": options.text.name,
                    "train_characters": options.train_characters,
                    "kind": kind,
                    "steps": steps,
                    "rate": rate,
                    "seed": seed,
                    "alpha": options.alpha,
                    "warmup": options.warmup,
                }
                if _key(settings) not in records:
                    started = time.monotonic()
                    losses = fine_tune(base, text, settings)
                    record = {**settings, **losses, "seconds": round(time.monotonic() - started, 1)}
                    records[_key(settings)] = record
                    if options.out is not None:
                        with options.out.open("a") as file:
                            file.write(json.dumps(record) + "\n")
            chosen = [
                record
                for record in records.values()
                if (record["base"], record["kind"], record["steps"]) == (base.name, kind, steps)
                and (record["alpha"], record["warmup"]) == (options.alpha, options.warmup)
                and (record["text"], record["train_characters"]) == (options.text.name, options.train_characters)
                and record["rate"] in options.rates
                and record["seed"] in options.seeds
            ]
            rows.append([base.name, kind, str(steps), *_cells(chosen, options.rates)])
    print(describe_machine(["torch"]))
    print(table(["base", "adapter", "steps", *(f"{rate:g}" for rate in options.rates), "best"], rows))


def split(path: Path, tokenizer: Tokenizer, train_characters: int | None) -> Text:
    """Split a text by lines into 80 %, 10 % and 10 %, and encode the parts."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    ends = (0, len(lines) * 8 // 10, len(lines) * 9 // 10, len(lines))
    parts = ["".join(lines[start:end]) for start, end in itertools.pairwise(ends)]
    parts[0] = parts[0][:train_characters]
    return Text(*(tokenizer.encode(part) for part in parts))


def fine_tune(base: Path, text: Text, settings: Mapping[str, Any]) -> dict[str, float | None]:
    """The losses of the validation and test parts by name; None if training diverged."""
    model, config, tokenizer, _ = load_model(base)
    adapter = adapter_config(model, KINDS[settings["kind"]], settings["alpha"])
    add_adapter(model, adapter, settings["seed"])
    batch = max(1, TOKENS // config.model.context)
    warmup = {} if settings["warmup"] is None else {"warmup": settings["warmup"]}
    recipe = {**RECIPES[adapter.kind].settings, **warmup}
    training = TrainingConfig(
        **recipe,
        budget=Budget(steps=settings["steps"]),
        batch_size=batch,
        micro_batch=batch,
        lr=settings["rate"],
        eval_every=settings["steps"],
        eval_tokens=EVAL_TOKENS,
        save_every=settings["steps"],
        log_every=settings["steps"],
        seed=settings["seed"],
    )
    torch.manual_seed(training.seed)
    tokens = TokenFolder(base, text.train, text.val)
    task = make_task(tokens, tokenizer, config.model, training)

    def loss(part: np.ndarray) -> float:
        batches = evaluation_batches(
            part, config.model.context, default_batch_size(config.model.context), max_tokens=EVAL_TOKENS
        )
        return evaluate_loss(model, task.validation_objective, batches).loss

    job = TrainingJob(model, task, build_optimizer(model, training, "fp32"), training)
    state = TrainerState(micro_batch=batch, last_eval_step=0, val_loss=0.0)
    trainer = Trainer(job, state, NoStore(), TrainerHooks(), started=time.monotonic())
    try:
        state = trainer.run().state
    except DivergedError:
        return {"val": None, "test": None}
    return {"val": state.val_loss, "test": loss(text.test)}


def adapter_config(model: Transformer, kind: Mapping[str, Any], alpha: float) -> AdapterConfig:
    chosen = {"base": "", "base_digest": "", "dropout": 0.0, **kind}
    target = chosen.pop("target", "attention")
    if chosen.get("kind") == "bottleneck":
        return AdapterConfig(**chosen, targets=sublayers(model))
    targets = target_modules([target], model)
    chosen["rank"] = min(chosen["rank"], max_rank(model, targets))
    return AdapterConfig(**chosen, alpha=alpha * chosen["rank"], targets=targets)


def _cells(records: Sequence[Mapping[str, Any]], rates: Sequence[float]) -> list[str]:
    """The test loss at each rate, averaged over seeds, and the rate with the lowest validation loss."""
    by_rate: dict[float, list[Mapping[str, Any]]] = {
        rate: [record for record in records if record["rate"] == rate] for rate in rates
    }

    def mean(rate: float, part: str) -> float:
        losses = [record[part] for record in by_rate[rate]]
        return float("inf") if None in losses else sum(losses) / len(losses)

    cells = [f"{mean(rate, 'test'):.3f}".replace("inf", "diverged") for rate in rates]
    return [*cells, f"{min(rates, key=lambda rate: mean(rate, 'val')):g}"]


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("base", "text", "train_characters", "kind", "steps", "rate", "seed", "alpha", "warmup")
    return tuple(record[name] for name in names)


def _read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(kind: type[int] | type[float]) -> Any:
    return lambda text: tuple(kind(word) for word in text.split(","))


if __name__ == "__main__":
    main()
