"""Batches of pairs, compared with batches built by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.text.corpora import PAIRS, tsv, write_pairs
from tinylm.errors import TinyLMError
from tinylm.text.pair_batches import PairTokens, pair_evaluation_batches
from tinylm.text.token_files import encode_stream
from tinylm.text.tokenizer import train_char

TOKENIZER = train_char("abcdefghij ")
END_ID = TOKENIZER.end_of_text_id


def tokens_of(pairs: list[tuple[str, str]], tmp_path: Path) -> PairTokens:
    return PairTokens(encode_stream(write_pairs(tmp_path / "p.tsv", tsv(pairs)).stream(), TOKENIZER), END_ID)


def decoded(ids: object) -> str:
    return TOKENIZER.decode(ids)


def test_encoded_pairs_decode_to_their_texts(tmp_path: Path) -> None:
    pairs = tokens_of(PAIRS, tmp_path)
    assert [(decoded(pairs.source(i)), decoded(pairs.target(i))) for i in range(len(pairs))] == PAIRS
    assert pairs.lengths.tolist() == [[3, 2], [1, 3], [3, 1], [4, 4]]
    assert pairs.fitting(4).tolist() == [0, 1, 2]
    assert pairs.fitting(5).tolist() == [0, 1, 2, 3]


def test_an_odd_number_of_documents_is_an_error() -> None:
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


def test_a_batch_depends_only_on_seed_and_number(tmp_path: Path) -> None:
    pairs = random_pairs(tmp_path)
    first, second = (pairs.training_batches(64, 7, seed=1) for _ in range(2))
    other = pairs.training_batches(64, 7, seed=2)
    for number in (40, 3, 29):
        assert torch.equal(first.batch(number).ids, second.batch(number).ids)
    assert not torch.equal(first.batch(3).ids, other.batch(3).ids)


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
