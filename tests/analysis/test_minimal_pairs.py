"""Minimal pairs: reference is the sum of log-probabilities, token by token, in float64."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.shell import assert_error, records, run_ok, story, tinylm
from tinylm.analysis import minimal_pairs
from tinylm.analysis.minimal_pairs import (
    MinimalPair,
    PairAccuracy,
    measure_minimal_pairs,
    read_pairs,
    reads_english,
    score_sentences,
)
from tinylm.errors import UsageError
from tinylm.generation.prompts import start_tokens
from tinylm.models.load import load
from tinylm.models.model import Model
from tinylm.transformer.architectures import Decoder

WORDS = list(dict.fromkeys(story(5000).split()))
SMALL = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 64, "--steps", 30, "--dtype", "fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "a.txt").write_text(story(5000))
    run_ok("train", folder / "a.txt", *SMALL, "--out", folder / "run")
    return load(folder / "run")


def reference(model: Model, sentence: str) -> float:
    """log p(sentence), in nats: each token by a forward pass of the tokens before it."""
    network = model.network.double()
    assert isinstance(network, Decoder)
    ids = start_tokens(model.tokenizer, model.data, [], model.context)
    total = 0.0
    for token in model.tokenizer.encode(sentence):
        with torch.no_grad():
            logits = network.logits(network(torch.tensor([ids])).hidden)[0, -1]
        total += float(logits.log_softmax(-1)[int(token)])
        ids = [*ids, int(token)]
    network.float()
    return total


@pytest.mark.parametrize(("batch_tokens", "max_logits"), [(1, 1), (60, 1000), (10_000, minimal_pairs.MAX_LOGITS)])
def test_a_sentence_has_the_sum_of_the_log_probabilities_of_its_tokens(
    model: Model, batch_tokens: int, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minimal_pairs, "MAX_LOGITS", max_logits)
    sentences = [*(" ".join(WORDS[:count]) for count in (2, 6, 4, 1)), WORDS[3][:1]]
    found = np.zeros(len(sentences))
    for indices, scores in score_sentences(model, sentences, batch_tokens):
        found[indices] = scores
    assert found == pytest.approx([reference(model, sentence) for sentence in sentences], rel=1e-4)


def test_accuracy_counts_pairs_whose_good_sentence_is_more_probable_and_ties_are_wrong(model: Model) -> None:
    texts = [" ".join(WORDS[at : at + 3]) for at in range(0, 12, 3)]
    ordered = sorted(texts, key=lambda text: -reference(model, text))
    right = MinimalPair(ordered[0], ordered[-1], "x")
    wrong = MinimalPair(ordered[-1], ordered[0], "y")
    tie = MinimalPair(texts[0], texts[0], "y")
    result = measure_minimal_pairs(model, [right, wrong, right, tie])
    assert [(one.phenomenon, one.pairs, one.accuracy) for one in result] == [
        ("all", 4, 0.5),
        ("x", 2, 1.0),
        ("y", 2, 0.0),
    ]
    assert [one.phenomenon for one in measure_minimal_pairs(model, [right, right])] == ["all"]


def test_the_interval_has_the_shares_from_which_the_found_one_is_at_most_1_96_standard_deviations_away(
    model: Model,
) -> None:
    """Wilson's definition: |found - p| = z sqrt(p (1 - p) / n) at both ends."""
    texts = sorted((WORDS[0], " ".join(WORDS[:9])), key=lambda text: -reference(model, text))
    pair, swapped = MinimalPair(texts[0], texts[1], "x"), MinimalPair(texts[1], texts[0], "x")
    for n, k in ((10, 3), (50, 50), (7, 0)):
        one: PairAccuracy = measure_minimal_pairs(model, [pair] * k + [swapped] * (n - k))[0]
        for end in (one.low, one.high):
            spread = 1.959964 * np.sqrt(end * (1 - end) / n)
            assert abs(one.accuracy - end) == pytest.approx(spread, abs=1e-7)
        assert one.low <= one.accuracy <= one.high


def test_the_sample_of_blimp_has_every_tenth_pair_of_67_paradigms() -> None:
    pairs = read_pairs("blimp")
    phenomena = Counter(pair.phenomenon for pair in pairs)
    assert len(pairs) == 6700
    assert len(phenomena) == 13 and all(count % 100 == 0 for count in phenomena.values())
    assert pairs[0] == MinimalPair(
        " Who should Derek hug after shocking Richard?",
        " Who should Derek hug Richard after shocking?",
        "island effects",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 2: expected an object with texts under 'good' and 'bad'; 'good' is missing"),
        ('{"good": "a", "bad": " "}', "'bad' is missing"),
        ('{"good": "a", "bad": "b", "phenomenon": 3}', "'phenomenon' is 3; it must be a text"),
        ('{"good": "a"', "line 2: invalid JSON"),
        ("[1]", "'good' is missing"),
        ('{"good": "a", "bad": "b", "phenomenon": "all"}', "'all' stands for all pairs; give the phenomenon another"),
    ],
)
def test_a_line_that_is_no_pair_is_an_error(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"good": "a", "bad": "b"}\n' + line + "\n")
    with pytest.raises(UsageError) as error:
        read_pairs(tmp_path / "pairs.jsonl")
    assert message in str(error.value)


def test_files_and_sentences_that_cannot_be_scored_are_errors(model: Model, tmp_path: Path) -> None:
    for content in (b"", b"\xff\xfe"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(UsageError, match=r"has no pairs in it|is not UTF-8"):
            read_pairs(tmp_path / "a")
    with pytest.raises(UsageError, match="Cannot read"):
        read_pairs(tmp_path / "absent")
    foreign, known = MinimalPair("\u4f60", "a", ""), MinimalPair("a", WORDS[0], "")
    with pytest.raises(UsageError, match="1 of 1 pair with characters that are not in the vocabulary"):
        measure_minimal_pairs(model, [foreign])
    assert measure_minimal_pairs(model, [foreign, known])[0].pairs == 1
    with pytest.raises(UsageError, match="longer than the context"):
        measure_minimal_pairs(model, [MinimalPair("a " * 100, "a", "")])


def test_the_command_prints_each_phenomenon_and_says_if_the_training_text_is_not_english(
    model: Model, tmp_path: Path
) -> None:
    file = tmp_path / "pairs.jsonl"
    line = json.dumps({"good": WORDS[0], "bad": WORDS[1], "phenomenon": "order"})
    file.write_text(f"{line}\n" * 3)
    found = records(run_ok("eval", "-m", model.path, "--minimal-pairs", file, "--json"))
    assert [(record["phenomenon"], record["pairs"]) for record in found] == [("all", 3)]
    assert found[0]["low"] <= found[0]["accuracy"] <= found[0]["high"]
    for extra, message in (
        (("--stride", 4), "out."),
        (("--memorisation",), "out."),
        ((model.path,), "named by --model"),
    ):
        result = tinylm("eval", "-m", model.path, *extra, "--minimal-pairs", file)
        assert_error(result, 2, "has no effect with --minimal-pairs; leave it out", message)
    (tmp_path / "code.txt").write_text("int main() { return x[i] + y; }\n" * 300)
    run_ok("train", tmp_path / "code.txt", *SMALL, "--out", tmp_path / "code")
    assert not reads_english(load(tmp_path / "code"))
    assert reads_english(model)
