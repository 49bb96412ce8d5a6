"""Judge: the lines themselves, and batches put together by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tinylm.errors import TinyLMError, UsageError
from tinylm.text.corpus import find_corpus
from tinylm.text.dataset import encode_stream
from tinylm.text.pairs import Pair, PairBatches, PairCorpus, PairTokens, evaluation_pairs
from tinylm.text.tokenizer import train_char

CHARACTERS = train_char("abcdefghij ")
END = CHARACTERS.end_of_text
PAIRS = [("abc", "ij"), ("d", "hgf"), ("a b", "j"), ("efgh", "iiii")]


def corpus_of(file: Path) -> PairCorpus:
    corpus = find_corpus([str(file)], kind=PairCorpus)
    assert isinstance(corpus, PairCorpus)
    return corpus


def written(path: Path, text: str) -> PairCorpus:
    path.write_text(text, encoding="utf-8")
    return corpus_of(path)


def tsv(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{source}\t{target}\n" for source, target in pairs)


def tokens_of(pairs: list[tuple[str, str]], tmp_path: Path) -> PairTokens:
    return PairTokens(encode_stream(written(tmp_path / "p.tsv", tsv(pairs)).stream(), CHARACTERS), END)


def text(ids: object) -> str:
    return CHARACTERS.decode(ids)


# Reading.


def test_a_line_is_a_source_a_tab_and_a_target(tmp_path: Path) -> None:
    corpus = written(tmp_path / "p.tsv", " a b \tc d\r\n\n\te\tf\n".replace("\te\tf", "e\tf"))
    assert list(corpus.pairs()) == [Pair("a b", "c d"), Pair("e", "f")]


def test_a_line_of_jsonl_is_a_source_and_a_target(tmp_path: Path) -> None:
    lines = [json.dumps({"target": target, "source": source, "id": 3}) for source, target in PAIRS]
    assert [tuple(pair) for pair in written(tmp_path / "p.jsonl", "\n".join(lines)).pairs()] == PAIRS


@pytest.mark.parametrize(
    ("line", "found"), [("no tab", "no tab"), ("a\tb\tc", "2 tabs"), ("a\t", "an empty one"), ("\tb", "an empty one")]
)
def test_a_malformed_line_is_named_with_what_was_expected(line: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        list(written(tmp_path / "p.tsv", f"a\tb\n\n{line}\n").pairs())
    assert str(caught.value) == (
        f"{tmp_path / 'p.tsv'}, line 3: expected a source, a tab and a target, and found {found}; mend the line."
    )


@pytest.mark.parametrize(
    "line", ["[1]", '{"source": "a"}', '{"source": "a", "target": 3}', '{"source": "", "target": "b"}']
)
def test_a_malformed_line_of_jsonl_is_named_too(line: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"p\.jsonl, (line|element) 1: expected an object with texts under 'source' and 'target'"
    ):
        list(written(tmp_path / "p.jsonl", line).pairs())


def test_pairs_are_a_stream_of_two_documents_each_and_are_never_cut_in_two(tmp_path: Path) -> None:
    corpus = written(tmp_path / "p.tsv", tsv(PAIRS))
    assert list(corpus.stream()) == [
        "abc",
        None,
        "ij",
        None,
        "d",
        None,
        "hgf",
        None,
        "a b",
        None,
        "j",
        None,
        "efgh",
        None,
        "iiii",
    ]
    sizes = [len(source) + len(target) for source, target in PAIRS]
    ends = [sum(sizes[:n]) for n in range(5)]
    for characters in range(ends[-1] + 1):
        assert corpus.whole(characters) == max(end for end in ends if end <= characters)


# Batches.


def test_encoded_pairs_are_found_again(tmp_path: Path) -> None:
    pairs = tokens_of(PAIRS, tmp_path)
    assert [(text(pairs.source(i)), text(pairs.target(i))) for i in range(len(pairs))] == PAIRS
    assert pairs.lengths.tolist() == [[3, 2], [1, 3], [3, 1], [4, 4]]
    assert pairs.fitting(4).tolist() == [0, 1, 2]
    assert pairs.fitting(5).tolist() == [0, 1, 2, 3]


def test_half_a_pair_is_damage() -> None:
    with pytest.raises(TinyLMError, match="not pairs"):
        PairTokens(np.array([1, END, 2, END, 3]), END)


def test_a_batch_has_sources_that_end_and_targets_that_begin_and_end(tmp_path: Path) -> None:
    batch = tokens_of(PAIRS, tmp_path).batch([0, 1])
    a, b, c, d, f, g, h, i, j = (int(CHARACTERS.encode(letter)[0]) for letter in "abcdfghij")
    assert batch.source is not None and batch.source_lengths is not None and batch.mask is not None
    assert batch.source.tolist() == [[a, b, c, END], [d, END, END, END]]
    assert batch.source_lengths.tolist() == [4, 2]
    assert batch.ids.tolist() == [[END, i, j, END], [END, h, g, f]]
    assert batch.targets.tolist() == [[i, j, END, END], [h, g, f, END]]
    assert batch.mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.scored == 7


def many(tmp_path: Path, n: int = 200) -> PairTokens:
    rng = np.random.default_rng(0)
    return tokens_of([("a" * int(x), "b" * int(y)) for x, y in rng.integers(1, 30, (n, 2))], tmp_path)


def test_an_epoch_has_every_pair_once_and_the_next_one_another_order(tmp_path: Path) -> None:
    pairs = many(tmp_path)
    batches = PairBatches(pairs, 64, 7, seed=1)
    assert batches.per_epoch == 29

    def epoch(number: int) -> list[tuple[int, int]]:
        drawn = [batches.batch(number * 29 + n) for n in range(29)]
        return [(int(s), int(t)) for b in drawn for s, t in zip(b.source_lengths - 1, b.mask.sum(1) - 1, strict=True)]

    first, second = epoch(0), epoch(1)
    assert sorted(first) == sorted(second) == sorted(map(tuple, pairs.lengths.tolist()))
    assert first != second


def test_a_batch_depends_on_seed_and_number_alone(tmp_path: Path) -> None:
    pairs = many(tmp_path)
    straight, jumping = (PairBatches(pairs, 64, 7, seed=1) for _ in range(2))
    other = PairBatches(pairs, 64, 7, seed=2)
    for number in (40, 3, 29):
        assert torch.equal(straight.batch(number).ids, jumping.batch(number).ids)
    assert not torch.equal(straight.batch(3).ids, other.batch(3).ids)


def test_pairs_of_a_batch_are_of_about_equal_length(tmp_path: Path) -> None:
    """At random, two thirds of the targets' places would be filled; in order, nearly all are."""
    batches = PairBatches(many(tmp_path, 1000), 64, 10, seed=0)
    drawn = [batches.batch(n) for n in range(batches.per_epoch)]
    assert sum(b.scored for b in drawn) / sum(b.ids.numel() for b in drawn) > 0.9


def test_pairs_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    pairs = many(tmp_path)
    batches = PairBatches(pairs, 11, 7, seed=0)
    drawn = [batches.batch(n) for n in range(batches.per_epoch)]
    assert sum(map(len, drawn)) == int((pairs.lengths.max(axis=1) <= 10).sum())
    assert max(b.source.shape[1] for b in drawn) <= 11


def test_evaluation_scores_every_target_token_once_and_a_sample_is_always_the_same(tmp_path: Path) -> None:
    pairs = many(tmp_path)
    assert sum(b.scored for b in evaluation_pairs(pairs, 64, 16)) == int((pairs.lengths[:, 1] + 1).sum())
    one, other = ([b.ids for b in evaluation_pairs(pairs, 64, 16, most=500)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert 350 < sum(b.scored for b in evaluation_pairs(pairs, 64, 16, most=500)) < 650
