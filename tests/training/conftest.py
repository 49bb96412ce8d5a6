"""Fixtures of the tests of training."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.run_sessions import TOKENIZER, RunSession, config_of
from tinylm.config.run import RunConfig
from tinylm.text.files import no_progress
from tinylm.text.token_files import TokenFolder, encode_to_folder
from tinylm.training import run_store


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """Short documents, which are also valid pairs of a source and a target."""
    rng = random.Random(0)
    words = ["a", "be", "dad", "face", "cab", "fed."]

    def documents(n: int) -> list[str | None]:
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 2))) for _ in range(n)]
        return [piece for text in texts for piece in (text, None)][:-1]

    train, val = documents(300), documents(40)
    folder = tmp_path_factory.mktemp("session") / "tokens"
    return encode_to_folder(folder, "key", {"train": iter(train), "val": iter(val)}.__getitem__, TOKENIZER, no_progress)


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small saves, too, are written in the background."""
    monkeypatch.setattr(run_store, "MIN_BYTES", 0)


Begin = Callable[..., RunSession]


@pytest.fixture
def begin(tokens: TokenFolder, tmp_path: Path) -> Begin:
    """Trains a run in a folder of the test, with a configuration or the choices of one; returns the session."""

    def train(name: str = "run", config: RunConfig | None = None, **choices: Any) -> RunSession:
        session = RunSession(tmp_path / name, tokens)
        session.begin(config or config_of(**choices))
        return session

    return train
