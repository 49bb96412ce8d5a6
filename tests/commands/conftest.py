"""Each test runs in an empty folder of its own."""

from pathlib import Path

import pytest

from tests.shell import story


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def corpus(here: Path) -> Path:
    path = here / "corpus.txt"
    path.write_text(story(3000))
    return path


@pytest.fixture
def second(here: Path) -> Path:
    """A text to fine-tune on."""
    path = here / "second.txt"
    path.write_text("no joy, no joy; no bed\n" * 60)
    return path
