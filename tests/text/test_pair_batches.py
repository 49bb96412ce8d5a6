"""Pairs, compared with their lines, and their batches, compared with batches built by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.text.corpora import PAIRS, documents_of, require_errors, tsv, write_pairs
from tinylm.errors import TinyLMError
from tinylm.text.corpus_encoding import split_corpus
from tinylm.text.pair_batches import PairTokens, pair_evaluation_batches
from tinylm.text.pairs import Pair
from tinylm.text.token_files import encode_stream
from tinylm.text.tokenizer import train_char

# Files


def test_a_line_is_a_source_a_tab_and_a_target_or_an_object(tmp_path: Path) -> None:
    corpus = write_pairs(tmp_path / "p.tsv", " a b \tc d\r\n\ne\tf\n")
    assert list(corpus.pairs()) == [Pair("a b", "c d"), Pair("e", "f")]
    lines = [json.dumps({"target": target, "source": source, "id": 3}) for source, target in PAIRS]
    assert [tuple(pair) for pair in write_pairs(tmp_path / "p.jsonl", "\n".join(lines)).pairs()] == PAIRS


def test_an_error_about_an_invalid_line_says_what_was_expected(tmp_path: Path) -> None:
    sides = {"no tab": "no tab", "a\tb\tc": "2 tabs", "a\t": "an empty side", "\tb": "an empty side"}
    expected = "expected a source, a tab and a target, but found"
    rows = [("p.tsv", f"a\tb\n\n{line}\n", f"line 3: {expected} {found}; correct") for line, found in sides.items()]
    for line in ("[1]", '{"source": "a"}', '{"source": "a", "target": 3}', '{"source": "", "target": "b"}'):
        words = "(line|element) 1: expected an object with texts under 'source' and 'target'"
        rows.append(("p.jsonl", line, words))
    require_errors(
        lambda name, content: list(write_pairs(tmp_path / name, content).pairs()),
        [(name, content, f"{name}, {words}") for name, content, words in rows],
    )


def test_a_pair_is_two_documents_of_a_stream_and_is_never_split(tmp_path: Path) -> None:
    corpus = write_pairs(tmp_path / "p.tsv", tsv(PAIRS))
    assert documents_of(corpus.stream()) == [text for pair in PAIRS for text in pair]
    split = split_corpus(corpus, None, 0.5)
    halves = [documents_of(stream) for stream in (split.train_stream(), split.val_stream())]
    assert split.val_records == 2
    pairs = [pair for half in halves for pair in zip(half[::2], half[1::2], strict=True)]
    assert sorted(pairs) == sorted(PAIRS) and len(halves[1]) == 4


# Batches

TOKENIZER = train_char("abcdefghij ")
END_ID = TOKENIZER.end_of_text_id


def tokens_of(pairs: list[tuple[str, str]], tmp_path: Path) -> PairTokens:
    return PairTokens(encode_stream(write_pairs(tmp_path / "p.tsv", tsv(pairs)).stream(), TOKENIZER), END_ID)


def test_encoded_pairs_decode_to_their_texts(tmp_path: Path) -> None:
    pairs = tokens_of(PAIRS, tmp_path)
    assert [(TOKENIZER.decode(pairs.source(i)), TOKENIZER.decode(pairs.target(i))) for i in range(len(pairs))] == PAIRS
    assert pairs.lengths.tolist() == [[3, 2], [1, 3], [3, 1], [4, 4]]
    assert pairs.fitting(4).tolist() == [0, 1, 2]
    assert pairs.fitting(5).tolist() == [0, 1, 2, 3]
    with pytest.raises(TinyLMError, match="not pairs"):
        PairTokens(np.array([1, END_ID, 2, END_ID, 3]), END_ID)


def test_a_batch_has_end_of_text_ids_after_sources_and_around_targets(tmp_path: Path) -> None:
    batch = tokens_of(PAIRS, tmp_path).batch([0, 1])
    a, b, c, d, f, g, h, i, j = (int(TOKENIZER.encode(letter)[0]) for letter in "abcdfghij")
    assert batch.source is not None and batch.source_lengths is not None and batch.mask is not None
    assert batch.source.tolist() == [[a, b, c, END_ID], [d, END_ID, END_ID, END_ID]]
    assert batch.source_lengths.tolist() == [4, 2]
    assert batch.ids.tolist() == [[END_ID, i, j, END_ID], [END_ID, h, g, f]]
    assert batch.targets.tolist() == [[i, j, END_ID, END_ID], [h, g, f, END_ID]]
    assert batch.mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.n_targets == 7


def random_pairs(tmp_path: Path, n: int = 200) -> PairTokens:
    rng = np.random.default_rng(0)
    return tokens_of([("a" * int(x), "b" * int(y)) for x, y in rng.integers(1, 30, (n, 2))], tmp_path)


def test_each_epoch_has_every_pair_once_in_another_order(tmp_path: Path) -> None:
    pairs = random_pairs(tmp_path)
    batches = pairs.training_batches(64, 7, seed=1)
    assert batches.batches_per_epoch == 29

    def epoch(number: int) -> list[tuple[int, int]]:
        drawn = [batches.batch(number * 29 + n) for n in range(29)]
        return [(int(s), int(t)) for b in drawn for s, t in zip(b.source_lengths - 1, b.mask.sum(1) - 1, strict=True)]

    first, second = epoch(0), epoch(1)
    assert sorted(first) == sorted(second) == sorted(map(tuple, pairs.lengths.tolist()))
    assert first != second
    assert torch.equal(pairs.training_batches(64, 7, seed=1).batch(40).ids, batches.batch(40).ids)
    assert not torch.equal(pairs.training_batches(64, 7, seed=2).batch(3).ids, batches.batch(3).ids)


def test_pairs_of_a_batch_have_similar_lengths(tmp_path: Path) -> None:
    """In random order, a third of the target positions would be padding; sorted by length, almost none are."""
    batches = random_pairs(tmp_path, 1000).training_batches(64, 10, seed=0)
    drawn = [batches.batch(n) for n in range(batches.batches_per_epoch)]
    assert sum(b.n_targets for b in drawn) / sum(b.ids.numel() for b in drawn) > 0.9


def test_pairs_that_do_not_fit_are_skipped(tmp_path: Path) -> None:
    pairs = random_pairs(tmp_path)
    batches = pairs.training_batches(11, 7, seed=0)
    drawn = [batches.batch(n) for n in range(batches.batches_per_epoch)]
    assert sum(map(len, drawn)) == int((pairs.lengths.max(axis=1) <= 10).sum())
    assert max(b.source.shape[1] for b in drawn) <= 11


def test_evaluation_scores_every_target_once_and_a_limited_one_always_the_same_pairs(tmp_path: Path) -> None:
    pairs = random_pairs(tmp_path)
    assert sum(b.n_targets for b in pair_evaluation_batches(pairs, 64, 16)) == int((pairs.lengths[:, 1] + 1).sum())
    one, other = ([b.ids for b in pair_evaluation_batches(pairs, 64, 16, max_tokens=500)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert 350 < sum(b.n_targets for b in pair_evaluation_batches(pairs, 64, 16, max_tokens=500)) < 650
