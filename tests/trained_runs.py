"""Small runs, trained once for all tests that use them. Tests must not change them; `copied` makes a copy."""

from pathlib import Path

import pytest

from tests.machines import write_profile
from tests.shell import TINY, run_ok, story

SOURCES = ["abc", "bca", "cab", "acb", "bac", "cba", "aab", "bbc", "cca", "abb"]
REVERSED = [(source, " ".join(reversed(source))) for source in SOURCES]
HELD_OUT = ("--val-fraction", 0.1)  # the text is so short that it would be its own validation text
SHAPE = ("--layers", 1, "--heads", 2, "--width", 32, "--batch-size", 10)
BOTH = ("--architecture", "encoder-decoder", "--tokenizer", "char", *SHAPE, "--dropout", 0, "--label-smoothing", 0)


def pairs_file(path: Path, pairs: list[tuple[str, str]] = REVERSED) -> Path:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs * 4))
    return path


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs below."""
    folder = tmp_path_factory.mktemp("shelf")
    (folder / "one.txt").write_text(story(3000))
    (folder / "two.txt").write_text("no joy, no joy; no bed\n" * 80)
    return folder


@pytest.fixture
def shelf_cache(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache in which the texts of the runs below are encoded."""
    monkeypatch.setenv("TINYLM_CACHE", str(shelf / "cache"))


def trained(shelf: Path, name: str, *arguments: object) -> Path:
    """With a token cache that lasts as long as the run, in fp32 on every processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(shelf / "cache"))
        write_profile(shelf / "cache")
        run_ok(*arguments, "--dtype", "fp32", "--out", shelf / name)
    return shelf / name


@pytest.fixture(scope="session")
def run(shelf: Path) -> Path:
    """A model of characters, trained for a second: enough that it hardly ever draws the end of text."""
    intervals = ("--steps", 200, "--lr", 0.02, "--eval-every", 50, "--log-every", 50)
    return trained(shelf, "run", "train", shelf / "one.txt", *HELD_OUT, *intervals, *TINY)


@pytest.fixture(scope="session")
def bpe_run(shelf: Path) -> Path:
    """A model with byte-level BPE, which is hardly trained, so that it generates invalid UTF-8."""
    return trained(shelf, "bpe", "train", shelf / "one.txt", *HELD_OUT, "--tokenizer", "bpe", "--steps", 3, *TINY)


@pytest.fixture(scope="session")
def adapter(run: Path, shelf: Path) -> Path:
    """An adapter for `run`."""
    budget = ("--steps", 20, "--lr", 0.05, "--batch-size", 4)
    return trained(shelf, "adapter", "finetune-lora", shelf / "two.txt", "--model", run, *budget)


@pytest.fixture(scope="session")
def encoder(shelf: Path) -> Path:
    """An encoder of characters."""
    options = ("--architecture", "encoder", "--steps", 30)
    return trained(shelf, "enc", "train", shelf / "one.txt", *HELD_OUT, *options, *TINY)


@pytest.fixture(scope="session")
def translator(shelf: Path) -> Path:
    """An encoder-decoder that is trained to reverse ten words of three letters."""
    pairs = pairs_file(shelf / "pairs.tsv")
    return trained(shelf, "mt", "train", pairs, "--val-data", pairs, "--steps", 150, "--lr", 0.015, *BOTH)
