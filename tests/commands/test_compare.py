"""tinylm compare."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.commands.test_evaluate import nats_by_definition
from tests.shell import TINY, assert_error, copied, edit_config, records, run_ok, story, tinylm
from tests.trained_runs import trained
from tinylm.run_directory.loading import load_model

KEYS = "a b bits_per_byte_a bits_per_byte_b loss_a loss_b difference difference_low difference_high better bytes"


@pytest.fixture(scope="session")
def other(shelf: Path) -> Path:
    """A model like `run`, trained on the same text for fewer steps."""
    return trained(shelf, "other", "train", shelf / "one.txt", "--steps", 60, "--lr", 0.02, *TINY)


def compared(*arguments: object, **how: str | bytes) -> dict[str, object]:
    (record,) = records(run_ok("compare", *arguments, "--json", **how))
    return record


def document_bits(run: Path, documents: list[str]) -> list[float]:
    """The bits of each document with the end of text after it, without the first character, by definition."""
    tokenizer = load_model(run).tokenizer
    ids = [i for text in documents for i in (*tokenizer.encode(text).tolist(), tokenizer.end_of_text_id)][:-1]
    ends = np.cumsum([len(text) + 1 for text in documents]) - 1
    return [sum(part) / math.log(2) for part in np.split(nats_by_definition(run, ids), ends[:-1])]


def test_the_difference_and_its_interval_are_those_of_a_paired_bootstrap(run: Path, other: Path, here: Path) -> None:
    documents = story(1500, seed=5).splitlines()
    (here / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    record = compared(run, other, "t.jsonl")
    assert list(record) == [*KEYS.split(), "resampled"]
    sizes = np.array([len(text) for text in documents]) - (np.arange(len(documents)) == 0)
    bits = {name: np.array(document_bits(path, documents)) for name, path in (("a", run), ("b", other))}
    assert record["bytes"] == sizes.sum() and record["resampled"] == f"{len(documents)} documents"
    for name, expected in bits.items():
        assert record[f"bits_per_byte_{name}"] == pytest.approx(expected.sum() / sizes.sum(), rel=1e-5)
    rng, differences = np.random.default_rng(7), []
    for _ in range(4000):
        drawn = rng.integers(0, len(documents), len(documents))
        differences.append((bits["b"] - bits["a"])[drawn].sum() / sizes[drawn].sum())
    low, high = np.quantile(differences, [0.025, 0.975])  # not corrected for the number of documents
    assert record["difference_low"] == pytest.approx(low, abs=0.1 * (high - low))
    assert record["difference_high"] == pytest.approx(high, abs=0.1 * (high - low))
    assert record["better"] == "a" and record["difference"] > 0
    text = "\n".join(documents)  # lines end with line breaks, which count
    record = compared(run, other, "-", "--format", "lines", stdin=text + "\n")
    assert record["bytes"] == len(text) - 1  # the first character is not scored
    for name, expected in bits.items():
        assert record[f"bits_per_byte_{name}"] == pytest.approx(expected.sum() / record["bytes"], rel=1e-5)


def test_the_better_model_is_named_in_either_order(run: Path, other: Path, here: Path, bpe_run: Path) -> None:
    (here / "t.txt").write_text(story(3000, seed=3))
    result = run_ok("compare", run, other, "t.txt")
    assert result.stdout.splitlines()[-1].startswith("A is better by 0.")
    assert "paired bootstrap of" in result.stderr and "the text has only 1 document" in result.stderr
    assert run_ok("compare", other, run, "t.txt").stdout.splitlines()[-1].startswith("B is better by 0.")
    same = compared(run, run, "t.txt")
    assert (same["difference"], same["difference_low"], same["difference_high"], same["better"]) == (0, 0, 0, None)
    assert run_ok("compare", run, run, "t.txt").stdout.splitlines()[-1] == "No difference can be shown with this text."
    record = compared(run, bpe_run, "t.txt")
    assert record["better"] == "a"
    bpe = load_model(bpe_run).tokenizer
    first = len(bpe.decode(bpe.encode(story(3000, seed=3))[:1]))
    assert record["bytes"] == len(story(3000, seed=3)) - first
    (scored,) = records(run_ok("eval", "-m", bpe_run, "t.txt", "--json"))
    assert record["bits_per_byte_b"] == pytest.approx(scored["bits_per_byte"], rel=1e-6)
    assert record["loss_b"] == pytest.approx(scored["loss"], rel=1e-6)


@pytest.mark.usefixtures("shelf_cache")
def test_without_a_text_models_are_compared_on_that_of_their_data(
    run: Path, other: Path, bpe_run: Path, adapter: Path, shelf: Path, here: Path
) -> None:
    (scored,) = records(run_ok("eval", "-m", other, "--json"))
    assert compared(run, other)["bits_per_byte_b"] == pytest.approx(scored["bits_per_byte"], rel=1e-6)
    record = compared(run, bpe_run)
    assert record["difference"] > 0 and record["better"] is None  # 301 characters: too short for an interval
    assert_error(tinylm("compare", run, adapter), 2, "not trained on the same text", "name a text")
    record = compared(run, adapter, shelf / "two.txt")
    assert (record["a"], record["b"], record["better"]) == (str(run), str(adapter), "b")
    path = copied(other, here / "forged")
    edit_config(path, data={"corpus": ["/etc/passwd"]})
    assert compared(run, path) == {**compared(run, other), "b": str(path)}


def test_a_short_text_gives_no_verdict_and_unknown_ones_are_skipped(run: Path, other: Path, bpe_run: Path) -> None:
    result = run_ok("compare", run, other, "-", stdin="the old man said")
    assert result.stdout.splitlines()[-1] == "The text is too short to compare the models."
    record = compared(run, other, "-", stdin="the old man said")
    assert (record["difference_low"], record["better"], record["bytes"]) == (None, None, 15)
    text = "é the old man said é"
    assert_error(tinylm("compare", bpe_run, run, "-", stdin=text), 2, "has no id for 1 of the text's characters, 'é'")
    assert compared(bpe_run, run, "-", "--unknown", "skip", stdin=text)["bytes"] < len(text) - 2
