"""A run that is killed while it computes, evaluates or saves can be loaded and resumed."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tinylm.model.build import build_model
from tinylm.presets import make_model_config
from tinylm.run_config import RunConfig, RuntimeConfig, TokenizerConfig
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, restore_model
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import train_char
from tinylm.training import background_save
from tinylm.training.run import TrainingRun
from tinylm.training_config import Budget, TrainingConfig

KILLS = 20
ALPHABET = "abcdefgh"
TOKENIZER = train_char(ALPHABET)
CONFIG = RunConfig(
    version="0",
    created="",
    model=make_model_config(
        vocab_size=TOKENIZER.vocab_size, preset="modern", size="nano", layers=1, width=32, heads=2, context=8
    ),
    tokenizer=TokenizerConfig(kind="char", sha256=TOKENIZER.sha256),
    training=TrainingConfig(
        budget=Budget(steps=1_000_000),
        batch_size=2,
        micro_batch=1,
        lr=1e-3,
        min_lr=0.0,
        warmup=0.0,
        eval_every=4,
        save_every=2,
        log_every=1,
    ),
    runtime=RuntimeConfig(device="cpu", dtype="fp32", compile=False, threads=1),
)


def tokens(folder: Path) -> TokenFolder:
    ids = np.random.default_rng(0).integers(1, TOKENIZER.vocab_size, 400).astype(np.uint8)
    return TokenFolder(folder, ids[:300], ids[300:])


def train(path: Path, resume: bool) -> None:
    torch.set_num_threads(1)
    run = RunDirectory(path) if resume else RunDirectory.create(path, CONFIG, TOKENIZER)
    save = run.load_last(CONFIG) if resume else None
    assert CONFIG.training is not None
    model = restore_model(CONFIG, save.read_weights(), Path()) if save else build_model(CONFIG.model)
    TrainingRun(run, CONFIG, model, TOKENIZER, tokens(path), save).train(started=time.monotonic())


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("background", [False, True])
def test_a_run_killed_at_random_moments_can_be_loaded_and_resumed(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """background: saves are written in a thread, as those of large models are."""
    if background:
        monkeypatch.setattr(background_save, "MIN_BYTES", 0)
    torch.set_num_threads(1)
    path = tmp_path / "run"
    rng = random.Random(0)
    fork = multiprocessing.get_context("fork")
    reached = 0
    for kill in range(KILLS):
        process = fork.Process(target=train, args=(path, kill > 0))
        process.start()
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            assert process.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0.02, 0.4))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)

        assert process.exitcode == -signal.SIGKILL, "the run ended by itself"
        model, _, _, weights = load_model(path)
        save = RunDirectory(path).load_last(read_config(path))
        assert save.state["step"] >= reached and save.state["step"] % CONFIG.training.save_every == 0
        behind = CONFIG.training.save_every if background else 0  # the step of a save that was being written
        assert weights.step <= save.state["step"] + behind + CONFIG.training.eval_every
        assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
        reached = save.state["step"]
    assert reached > 0
