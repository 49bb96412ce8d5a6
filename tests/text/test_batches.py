"""Batches of windows, pairs and masked tokens, compared with slices of the token ids and with batches built by hand."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.text.corpora import PAIRS, documents_of, require_errors, tsv, write_pairs
from tinylm.errors import TinyLMError
from tinylm.jobs.masked.job import MaskedToken, mask_tokens, masked_evaluation_batches
from tinylm.jobs.pairs.corpus import Pair, PairTokens, pair_evaluation_batches
from tinylm.text.batches import Batch, Windows, evaluation_batches
from tinylm.text.parallel_encoding import encode_in_memory
from tinylm.text.split import split_corpus
from tinylm.text.tokenizer import train_char

END = 0  # id of the end of the text


@given(st.integers(1, 8), st.integers(0, 80), st.integers(1, 7), st.integers(0, 5))
def test_an_epoch_of_few_windows_goes_round_the_text_and_its_end_and_begins_anywhere(
    context: int, extra: int, batch_size: int, seed: int
) -> None:
    """Regression: of 1,000 tokens in windows of 256, the last 232 were in no epoch."""
    end = context + 1 + extra
    ring = end + 1
    windows = Windows(np.arange(end, dtype=np.uint16), context, batch_size, seed, end)
    size, epochs = windows.windows_per_epoch, 20 * ring
    batches = [windows.batch(number) for number in range(-(-epochs * size // batch_size))]
    ids, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("ids", "targets"))
    assert size == -(-ring // context)
    assert torch.equal(targets, (ids + 1) % ring) and torch.equal(ids, (ids[:, :1] + torch.arange(context)) % ring)
    for start in range(0, epochs * size, size):
        assert set(ids[start : start + size].flatten().tolist()) == set(range(ring))
    assert set(ids[:, 0].tolist()) == set(range(ring))


@given(st.integers(1, 8), st.integers(0, 80), st.integers(1, 7), st.integers(0, 5))
def test_an_epoch_visits_every_window_once(context: int, extra: int, batch_size: int, seed: int) -> None:
    tokens = np.arange(100 * context + 1 + extra, dtype=np.uint16)
    windows = Windows(tokens, context, batch_size, seed, END)
    n_windows = 3 * windows.windows_per_epoch
    rows = [row for n in range(-(-n_windows // batch_size)) for row in windows.batch(n).ids.tolist()][:n_windows]
    assert windows.windows_per_epoch == (len(tokens) - 1) // context - 1
    for start in range(0, n_windows, windows.windows_per_epoch):
        epoch = rows[start : start + windows.windows_per_epoch]
        first = min(row[0] for row in epoch)
        expected = np.arange(first, first + windows.windows_per_epoch * context).reshape(-1, context)
        assert sorted(epoch) == expected.tolist()
        assert first <= min(context, len(tokens) - 1 - windows.windows_per_epoch * context)


def test_the_target_of_a_token_is_the_next_token_and_a_text_of_context_plus_one_tokens_has_a_window() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 100).astype(np.uint8)
    batch = Windows(tokens, 7, 5, 1, END).batch(3)
    assert batch.ids.shape == batch.targets.shape == (5, 7)
    assert batch.ids.dtype == batch.targets.dtype == torch.int64 and batch.mask is None
    ring = [*tokens.tolist(), END, *tokens[:7].tolist()]
    sequences = {tuple(ring[i : i + 8]) for i in range(101)}
    for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
        assert (*ids, targets[-1]) in sequences and ids[1:] == targets[:-1]
    assert Windows(np.arange(5), 4, 1, 0, 5).batch(7).ids.shape == (1, 4)
    with pytest.raises(TinyLMError, match="4 tokens are too few for a window of 4"):
        Windows(np.arange(4), 4, 1, 0, END)


def test_epochs_and_seeds_differ_in_offset_and_order() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    windows = Windows(tokens, 10, 99, 0, END)
    epochs = [windows.batch(n).ids for n in range(6)]
    assert len({int(epoch.min()) for epoch in epochs}) > 2
    assert len({tuple((epoch[:, 0] - epoch.min()).tolist()) for epoch in epochs}) == 6
    assert not torch.equal(Windows(tokens, 10, 99, 1, END).batch(0).ids, epochs[0])
    again = Windows(tokens, 10, 99, 0, END)  # a batch depends only on the seed and its number
    assert all(torch.equal(again.batch(n).ids, epochs[n]) for n in (4, 0, 2))


def test_batches_of_a_text_beyond_memory_are_found_by_their_number() -> None:
    """Of 2^36 tokens, each equal to its position modulo 2^32; only the order of their windows is in memory."""

    class Positions:
        def __len__(self) -> int:
            return 1 << 36

        def __getitem__(self, part: slice) -> np.ndarray:
            return np.arange(part.start, part.stop).astype(np.uint32)

    tokens = cast("np.ndarray", Positions())
    windows = Windows(tokens, 1 << 16, 4, 0, END)
    last = windows.windows_per_epoch // 4 - 1
    starts = [int(windows.batch(number).ids[row, 0]) for number in (0, 1, last // 2, last) for row in range(4)]
    assert len(set(starts)) == 16 and max(starts) > 1 << 31
    assert sum(batch.n_targets for batch in evaluation_batches(tokens, 64, 8, max_tokens=64_000)) == 64_000 - 1


@given(st.integers(2, 60), st.integers(1, 12), st.none() | st.integers(1, 12), st.integers(1, 9))
def test_every_token_but_the_first_is_scored_once(length: int, context: int, stride: int | None, rows: int) -> None:
    stride = stride and min(stride, context)
    tokens = np.arange(length, dtype=np.uint8)
    scored: Counter[int] = Counter()
    for batch in evaluation_batches(tokens, context, rows, stride):
        assert 1 <= len(batch) <= rows and batch.ids.shape[1] <= context
        assert torch.equal(batch.targets, batch.ids + 1)  # each token equals its position
        assert torch.equal(batch.ids, batch.ids[:, :1] + torch.arange(batch.ids.shape[1]))
        mask = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
        assert batch.n_targets == int(mask.sum()) > 0
        scored.update(batch.targets[mask].tolist())
        if stride is not None:  # a token is predicted from all tokens before it, or from more than context - stride
            available = torch.arange(1, batch.ids.shape[1] + 1).expand_as(batch.ids)[mask]
            assert bool(((available == batch.targets[mask]) | (available > context - stride)).all())
    assert scored == Counter(range(1, length))


def test_a_limited_evaluation_uses_the_same_evenly_spaced_windows() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    first, second = (
        [int(row) for batch in evaluation_batches(tokens, 10, 4, max_tokens=200) for row in batch.ids[:, 0]]
        for _ in range(2)
    )
    assert first == second and len(first) == len(set(first)) == 20
    assert (first[0], first[-1]) == (0, 990)
    assert all(40 <= after - before <= 60 for before, after in pairwise(first))
    total = sum(batch.n_targets for batch in evaluation_batches(tokens, 10, 4, max_tokens=1000))
    assert total == 1000


@given(st.integers(1, 20), st.integers(1, 25), st.booleans())
def test_micro_batches_contain_the_batch_in_order_and_tensors_move_devices(size: int, rows: int, masked: bool) -> None:
    ids = torch.arange(size * 3).reshape(size, 3)
    batch = Batch(ids, ids + 1, ids % 2 == 0 if masked else None)
    parts = list(batch.split(rows))
    assert [len(part) for part in parts] == [rows] * (size // rows) + [size % rows] * (size % rows > 0)
    assert torch.equal(torch.cat([part.ids for part in parts]), batch.ids)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    assert sum(part.n_targets for part in parts) == batch.n_targets
    assert batch.n_targets == (int((ids % 2 == 0).sum()) if masked else size * 3)
    if batch.mask is not None:
        assert torch.equal(torch.cat([part.mask for part in parts if part.mask is not None]), batch.mask)
    moved = batch.to(torch.device("meta"))
    assert moved.ids.is_meta and moved.targets.is_meta and (moved.mask.is_meta if masked else moved.mask is None)


MASK, V = 50, 51
TOKENS = np.random.default_rng(0).integers(1, MASK, 3000).astype(np.uint8)


def test_15_percent_are_targets_of_which_80_percent_are_masked_and_10_percent_random() -> None:
    """There is always a target."""
    inputs, selected = mask_tokens(np.full(400_000, 7), np.random.default_rng(1), MASK, V)
    assert selected.mean() == pytest.approx(0.15, abs=0.003)
    replaced = inputs[selected]
    assert (replaced == MASK).mean() == pytest.approx(0.8 + 0.1 / V, abs=0.005)
    assert (replaced == 7).mean() == pytest.approx(0.1 + 0.1 / V, abs=0.005)
    others = np.bincount(replaced[(replaced != MASK) & (replaced != 7)], minlength=V)
    assert (others[np.arange(V) != 7][:-1] > 50).all()  # about 117 of each other token
    assert (inputs[~selected] == 7).all()
    for seed in range(50):
        assert mask_tokens(np.array([[3]]), np.random.default_rng(seed), MASK, V)[1].all()


def test_the_targets_are_the_text_and_the_masks_differ_between_epochs() -> None:
    tokenizer = SimpleNamespace(mask_id=MASK, vocab_size=V, end_of_text_id=END)
    training = SimpleNamespace(batch_size=4, seed=3, label_smoothing=0.0)
    settings = (SimpleNamespace(train=TOKENS, val=TOKENS), tokenizer, SimpleNamespace(context=16), training)
    windows = MaskedToken(*settings)
    plain = Windows(TOKENS, 16, 4, 3, END)
    for number in (0, 7, 1000):
        batch = windows.batch(number)
        assert batch.mask is not None and torch.equal(batch.targets, plain.batch(number).ids)
        assert torch.equal(batch.ids[~batch.mask], batch.targets[~batch.mask])
        again = MaskedToken(*settings).batch(number)
        assert torch.equal(batch.ids, again.ids) and torch.equal(batch.mask, again.mask)
    next_epoch = plain.windows_per_epoch // 4 * 4
    assert not torch.equal(windows.batch(0).mask, windows.batch(next_epoch).mask)


def test_evaluation_masks_do_not_depend_on_the_batch_size() -> None:
    def flat(rows: int) -> list[tuple[list[int], list[int], list[bool]]]:
        batches = masked_evaluation_batches(TOKENS, 16, rows, MASK, V)
        return [
            (ids.tolist(), targets.tolist(), mask.tolist())
            for batch in batches
            for ids, targets, mask in zip(batch.ids, batch.targets, batch.mask, strict=True)
        ]

    expected = [row.tolist() for batch in evaluation_batches(TOKENS, 16, 1) for row in batch.ids]
    assert [targets for _, targets, _ in flat(7)] == expected
    assert flat(1) == flat(3) == flat(7) == flat(100)


def test_a_line_is_a_source_and_a_target_which_are_two_documents_of_a_stream_that_are_never_split(
    tmp_path: Path,
) -> None:
    corpus = write_pairs(tmp_path / "p.tsv", " a b \tc d\r\n\ne\tf\n")
    assert list(corpus.pairs()) == [Pair("a b", "c d"), Pair("e", "f")]
    lines = [json.dumps({"target": target, "source": source, "id": 3}) for source, target in PAIRS]
    assert [tuple(pair) for pair in write_pairs(tmp_path / "p.jsonl", "\n".join(lines)).pairs()] == PAIRS
    corpus = write_pairs(tmp_path / "p.tsv", tsv(PAIRS))
    assert documents_of(corpus.stream()) == [text for pair in PAIRS for text in pair]
    split = split_corpus([corpus], 0.5)
    halves = [documents_of(stream) for stream in map(split.stream, ("train", "val"))]
    assert split.val_records == 2
    pairs = [pair for half in halves for pair in zip(half[::2], half[1::2], strict=True)]
    assert sorted(pairs) == sorted(PAIRS) and len(halves[1]) == 4


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


TOKENIZER = train_char("abcdefghij ")
END_ID = TOKENIZER.end_of_text_id


def tokens_of(pairs: list[tuple[str, str]], tmp_path: Path) -> PairTokens:
    return PairTokens(encode_in_memory(write_pairs(tmp_path / "p.tsv", tsv(pairs)).stream(), TOKENIZER), END_ID)


def test_encoded_pairs_decode_to_their_texts_and_have_end_of_text_ids_around_targets(tmp_path: Path) -> None:
    pairs = tokens_of(PAIRS, tmp_path)
    assert [(TOKENIZER.decode(pairs.source(i)), TOKENIZER.decode(pairs.target(i))) for i in range(len(pairs))] == PAIRS
    assert pairs.lengths.tolist() == [[3, 2], [1, 3], [3, 1], [4, 4]]
    assert (pairs.fitting(4).tolist(), pairs.fitting(5).tolist()) == ([0, 1, 2], [0, 1, 2, 3])
    with pytest.raises(TinyLMError, match="not pairs"):
        PairTokens(np.array([1, END_ID, 2, END_ID, 3]), END_ID)
    batch = pairs.batch([0, 1])
    a, b, c, d, f, g, h, i, j = (int(TOKENIZER.encode(letter)[0]) for letter in "abcdfghij")
    assert batch.source is not None and batch.source_lengths is not None and batch.mask is not None
    assert batch.source.tolist() == [[a, b, c, END_ID], [d, END_ID, END_ID, END_ID]]
    assert batch.source_lengths.tolist() == [4, 2]
    assert batch.ids.tolist() == [[END_ID, i, j, END_ID], [END_ID, h, g, f]]
    assert batch.targets.tolist() == [[i, j, END_ID, END_ID], [h, g, f, END_ID]]
    assert (batch.mask.int().tolist(), batch.n_targets) == ([[1, 1, 1, 0], [1, 1, 1, 1]], 7)


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


def test_pairs_of_a_batch_have_similar_lengths_and_those_that_do_not_fit_are_skipped(tmp_path: Path) -> None:
    """In random order, a third of the target positions would be padding; sorted by length, almost none are."""
    pairs = random_pairs(tmp_path, 1000)
    for context in (64, 11):
        batches = pairs.training_batches(context, 10, seed=0)
        drawn = [batches.batch(n) for n in range(batches.batches_per_epoch)]
        assert sum(b.n_targets for b in drawn) / sum(b.ids.numel() for b in drawn) > 0.9
        assert sum(map(len, drawn)) == int((pairs.lengths.max(axis=1) < context).sum())
        assert max(b.source.shape[1] for b in drawn) <= context


def test_evaluation_scores_every_target_once_and_a_limited_one_always_the_same_pairs(tmp_path: Path) -> None:
    pairs = random_pairs(tmp_path)
    assert sum(b.n_targets for b in pair_evaluation_batches(pairs, 64, 16)) == int((pairs.lengths[:, 1] + 1).sum())
    one, other = ([b.ids for b in pair_evaluation_batches(pairs, 64, 16, max_tokens=500)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert 350 < sum(b.n_targets for b in pair_evaluation_batches(pairs, 64, 16, max_tokens=500)) < 650
