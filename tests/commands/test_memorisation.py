"""tinylm eval --memorisation."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.shell import assert_error, copied, edit_config, records, run_ok, story, tinylm
from tests.trained_runs import trained

SOURCES = ["samples", "continuations of training text", "continuations of held-out text", "held-out text"]
FEW = ("--num-samples", 12, "--sample-length", 120, "--min-match", 25)


def measured(*arguments: object) -> dict[str, dict[str, Any]]:
    """The records of tinylm eval --memorisation by source."""
    found = records(run_ok("eval", "--memorisation", "--json", *arguments))
    return {record["source"]: record for record in found}


def noise(characters: int, seed: int) -> str:
    """Text that a model can only memorise."""
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz \n", k=characters))


@pytest.mark.slow
def test_a_model_made_to_memorise_copies_nearly_all_and_the_control_nothing(shelf: Path) -> None:
    text = noise(600, seed=1) * 4  # so that windows at any offset contain all of it
    (shelf / "noise.txt").write_text(text)
    (shelf / "once.txt").write_text(noise(600, seed=1))
    (shelf / "unseen.txt").write_text(noise(1000, seed=2))
    shape = ("--layers", 2, "--heads", 2, "--width", 64, "--context", 128, "--batch-size", 8, "--dropout", 0)
    data = (shelf / "noise.txt", "--val-data", shelf / "once.txt")
    path = trained(shelf, "memory", "train", *data, "--steps", 300, "--lr", 0.01, *shape)
    texts = (shelf / "unseen.txt", "--train-data", shelf / "noise.txt")
    for temperature, share in ((1, 0.75), (0, 0.95)):
        found = measured("-m", path, *texts, *FEW, "--temperature", temperature)
        assert found["continuations of training text"]["copied"] > share
        assert found["samples"]["copied"] > share
        assert found["held-out text"]["copied"] == found["held-out text"]["longest"] == 0
        match = found["continuations of training text"]["matches"][0]
        assert text[match["character"] :].startswith(match["text"])
        assert (match["name"], match["line"]) == (
            str(shelf / "noise.txt"),
            text[: match["character"]].count("\n") + 1,
        )


@pytest.mark.usefixtures("shelf_cache")
def test_a_model_that_has_learned_little_copies_no_more_than_the_control(run: Path, shelf: Path) -> None:
    found = measured("-m", run, *FEW)
    assert list(found) == SOURCES
    assert all(record["samples"] <= 12 and record["characters"] <= 12 * 120 for record in found.values())
    assert found["samples"]["copied"] <= found["held-out text"]["copied"] + 0.1
    names = {match["name"] for record in found.values() for match in record["matches"]}
    assert names <= {str(shelf / "one.txt")}


@pytest.mark.usefixtures("shelf_cache")
def test_the_table_has_shares_and_places_and_the_same_seed_gives_the_same_figures(run: Path, shelf: Path) -> None:
    result = run_ok("eval", "-m", run, "--memorisation", *FEW[:4], "--min-match", 8)
    shares, longest = result.stdout.split("\n\n")
    assert [line.split("  ")[0] for line in shares.splitlines()] == ["text", *SOURCES]
    assert f"{shelf / 'one.txt'}, line " in longest
    assert run_ok("eval", "-m", run, "--memorisation", *FEW[:4], "--min-match", 8).stdout == result.stdout
    other = run_ok("eval", "-m", run, "--memorisation", *FEW[:4], "--min-match", 8, "--seed", 1).stdout
    assert other != result.stdout


@pytest.mark.usefixtures("shelf_cache")
def test_without_its_text_a_run_needs_one_and_opens_no_forged_path(run: Path, here: Path, monkeypatch: Any) -> None:
    path = copied(run, here / "forged")
    edit_config(path, data={"corpus": [str(here / "secret.txt")]})
    (here / "secret.txt").write_text("secret " * 100)
    found = measured("-m", path, *FEW[:4], "--min-match", 8)
    assert not any("secret" in match["text"] for record in found.values() for match in record["matches"])
    (here / "t.txt").write_text(story(300))
    monkeypatch.setenv("TINYLM_CACHE", str(here / "none"))
    assert_error(tinylm("eval", "--memorisation", "-m", run, "t.txt"), 1, "is no longer in the cache")
