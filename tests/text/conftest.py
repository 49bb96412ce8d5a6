"""Text files that several tests use."""

from pathlib import Path

import pytest

from tests.text.corpora import TEXT, write_file


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A file with TEXT."""
    return write_file(tmp_path / "corpus.txt", TEXT)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A file with another text, of characters that are not in TEXT."""
    return write_file(tmp_path / "other.txt", "Zebras!\n")
