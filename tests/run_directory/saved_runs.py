"""Small runs on disk. The weights of save number n are the initial ones plus n, which identifies the save."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.variants import small
from tinylm.config.run import DataConfig, RunConfig, RuntimeConfig, TokenizerConfig
from tinylm.config.training import Budget, TrainingConfig
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, restore_model
from tinylm.run_directory.weights import Shard
from tinylm.text.tokenizer import train_char
from tinylm.transformer.build import build_model

TOKENIZER = train_char("abc")
SHAPE = small(vocab_size=4, context=4, layers=1, width=4, heads=2, kv_heads=1, ffn_width=4)
CONFIG = RunConfig(
    version="0.1",
    created="now",
    model=SHAPE,
    tokenizer=TokenizerConfig(kind="char", sha256=TOKENIZER.sha256),
    data=DataConfig(
        corpus=("c.txt",),
        train_characters=9,
        fingerprint="f",
        characters=10,
        bytes=10,
        documents=1,
        train_tokens=9,
        val_tokens=1,
    ),
    training=TrainingConfig(budget=Budget(steps=9), batch_size=2, micro_batch=1, lr=0.1, min_lr=0.0, warmup=0.0),
    runtime=RuntimeConfig(device="cpu", dtype="fp32", compile=False, threads=1),
)

INITIAL = build_model(SHAPE, seed=1).state_dict()


def weights_of(number: int) -> dict[str, Tensor]:
    return {name: tensor + number for name, tensor in INITIAL.items()}


def optimizer_of(number: int) -> dict[str, Tensor]:
    return {"embedding.weight/exp_avg": torch.full((4, 4), float(number)), "norm.weight/step": torch.tensor(1.0)}


def state_of(number: int) -> dict[str, Any]:
    return {"step": number, "val_loss": 1.0 / (1 + number), "rng": {"cpu": "00"}}


def save(run: RunDirectory, number: int, ranks: int = 1) -> None:
    """Save as one process does, or as several with shards do, one after the other."""
    state = state_of(number)
    run.save_for_inference(weights_of(number), CONFIG, number, state["val_loss"])
    if ranks == 1:
        run.save_last(weights_of(number), optimizer_of(number), state, CONFIG)
        return
    folder = run.begin_last()
    hashes: dict[str, str] = {}
    for shard in (Shard(index, ranks) for index in range(ranks)):
        weights, optimizer = (
            {name: shard.rows(tensor) for name, tensor in tensors.items()}
            for tensors in (weights_of(number), optimizer_of(number))
        )
        hashes |= run.write_last(folder, weights, optimizer, state, CONFIG, shard)
    run.commit_last(folder, hashes, state)


def saved_run(path: Path, *numbers: int) -> RunDirectory:
    run = RunDirectory.create(path, CONFIG, TOKENIZER)
    for number in numbers or (0,):
        save(run, number)
    return run


def raw(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


def best_save(path: Path) -> int:
    """Load the best weights as `sample` does; return the number of their save. Fails for a mix of two saves."""
    model, _, _, weights = load_model(path)
    assert raw(dict(model.state_dict())) == raw(weights.tensors) == raw(weights_of(weights.step))
    assert weights.val_loss == state_of(weights.step)["val_loss"]
    model(torch.tensor([[0, 1, 2]]))
    return weights.step


def last_save(path: Path) -> int:
    """Load `last/` as resuming does; return the number of its save."""
    config = read_config(path)
    last = RunDirectory(path).load_last(config)
    number = last.state["step"]
    assert last.state == state_of(number)
    assert raw(dict(restore_model(config, last.read_weights(), Path()).state_dict())) == raw(weights_of(number))
    assert raw(last.read_optimizer()) == raw(optimizer_of(number))
    return int(number)
