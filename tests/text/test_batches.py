"""Batches of windows, compared with slices of the token ids; masking, compared with the shares of Devlin et al."""

from collections import Counter
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinylm.errors import TinyLMError
from tinylm.text.batches import Batch, Windows, evaluation_batches
from tinylm.text.token_masking import MaskedWindows, mask_tokens, masked_evaluation_batches

# Training windows.


@given(st.integers(1, 8), st.integers(0, 80), st.integers(1, 7), st.integers(0, 5))
def test_an_epoch_visits_every_window_once(context: int, extra: int, batch_size: int, seed: int) -> None:
    tokens = np.arange(context + 1 + extra, dtype=np.uint16)
    windows = Windows(tokens, context, batch_size, seed)
    epochs = 3
    n_windows = epochs * windows.windows_per_epoch
    rows = [row for n in range(-(-n_windows // batch_size)) for row in windows.batch(n).ids.tolist()][:n_windows]
    assert windows.windows_per_epoch == max(1, (len(tokens) - 1) // context - 1)
    for start in range(0, n_windows, windows.windows_per_epoch):
        epoch = rows[start : start + windows.windows_per_epoch]
        first = min(row[0] for row in epoch)
        assert sorted(epoch) == [
            list(range(first + i * context, first + (i + 1) * context)) for i in range(windows.windows_per_epoch)
        ]
        assert first <= min(context, len(tokens) - 1 - windows.windows_per_epoch * context)


def test_the_target_of_a_token_is_the_next_token() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 100).astype(np.uint8)
    batch = Windows(tokens, 7, 5, seed=1).batch(3)
    assert batch.ids.shape == batch.targets.shape == (5, 7)
    assert batch.ids.dtype == batch.targets.dtype == torch.int64
    assert batch.mask is None
    sequences = {tuple(tokens[i : i + 8].tolist()) for i in range(93)}
    for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
        assert (*ids, targets[-1]) in sequences
        assert ids[1:] == targets[:-1]


def test_epochs_and_seeds_differ_in_offset_and_order() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    windows = Windows(tokens, 10, 98, seed=0)
    epochs = [windows.batch(n).ids for n in range(6)]
    offsets = {int(epoch.min()) for epoch in epochs}
    assert len(offsets) > 2
    orders = {tuple((epoch[:, 0] - epoch.min()).tolist()) for epoch in epochs}
    assert len(orders) == 6
    assert not torch.equal(Windows(tokens, 10, 98, seed=1).batch(0).ids, epochs[0])
    again = Windows(tokens, 10, 98, seed=0)  # a batch depends only on the seed and its number
    assert all(torch.equal(again.batch(n).ids, epochs[n]) for n in (4, 0, 2))


def test_batches_of_a_text_beyond_memory_are_found_by_their_number() -> None:
    """Of 2^50 tokens, each equal to its position modulo 2^16; a list of the windows would have 2^44 entries."""

    class Positions:
        def __len__(self) -> int:
            return 1 << 50

        def __getitem__(self, part: slice) -> np.ndarray:
            return np.arange(part.start, part.stop).astype(np.uint16)

    tokens = cast("np.ndarray", Positions())
    windows = Windows(tokens, 64, 4, seed=0)
    last = windows.windows_per_epoch // 4 - 1
    starts = {int(windows.batch(number).ids[row, 0]) for number in (0, 1, last // 2, last) for row in range(4)}
    assert len(starts) == 16
    assert sum(batch.n_targets for batch in evaluation_batches(tokens, 64, 8, max_tokens=64_000)) == 64_000 - 1


def test_a_text_of_context_plus_one_tokens_has_a_window_and_a_shorter_one_is_refused() -> None:
    assert Windows(np.arange(5), 4, 1, seed=0).batch(7).ids.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(TinyLMError, match="4 tokens are too few for a window of 4"):
        Windows(np.arange(4), 4, 1, seed=0)


# Evaluation windows.


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[int, int, int | None, int]:
    context = draw(st.integers(1, 12))
    return draw(st.integers(2, 60)), context, draw(st.none() | st.integers(1, context)), draw(st.integers(1, 9))


@given(evaluations())
def test_every_token_but_the_first_is_scored_once(
    evaluation: tuple[int, int, int | None, int],
) -> None:
    length, context, stride, batch_size = evaluation
    tokens = np.arange(length, dtype=np.uint8)
    scored: Counter[int] = Counter()
    for batch in evaluation_batches(tokens, context, batch_size, stride):
        assert 1 <= len(batch) <= batch_size
        assert batch.ids.shape[1] <= context
        assert torch.equal(batch.targets, batch.ids + 1)  # each token equals its position
        assert torch.equal(batch.ids, batch.ids[:, :1] + torch.arange(batch.ids.shape[1]))
        mask = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
        assert batch.n_targets == int(mask.sum()) > 0
        scored.update(batch.targets[mask].tolist())
        if stride is not None:  # a token is predicted from all tokens before it, or from more than context - stride
            available = torch.arange(1, batch.ids.shape[1] + 1).expand_as(batch.ids)[mask]
            position = batch.targets[mask]
            assert bool(((available == position) | (available > context - stride)).all())
    assert scored == Counter(range(1, length))


def test_a_limited_evaluation_uses_the_same_evenly_spaced_windows() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    first, second = (
        [int(row) for batch in evaluation_batches(tokens, 10, 4, max_tokens=200) for row in batch.ids[:, 0]]
        for _ in range(2)
    )
    assert first == second
    assert len(first) == len(set(first)) == 20
    assert (first[0], first[-1]) == (0, 990)
    assert all(40 <= after - before <= 60 for before, after in pairwise(first))
    total = sum(batch.n_targets for batch in evaluation_batches(tokens, 10, 4, max_tokens=1000))
    assert total == 1000


# Batches.


@given(st.integers(1, 20), st.integers(1, 25), st.booleans())
def test_micro_batches_contain_the_batch_in_order(size: int, rows: int, masked: bool) -> None:
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


def test_all_tensors_of_a_batch_move_to_a_device() -> None:
    ids = torch.arange(6).reshape(2, 3)
    moved = Batch(ids, ids + 1, ids > 2).to(torch.device("meta"))
    assert moved.mask is not None and moved.ids.is_meta and moved.targets.is_meta and moved.mask.is_meta
    assert Batch(ids, ids + 1).to(torch.device("meta")).mask is None


# Masking.

MASK, V = 50, 51
TOKENS = np.random.default_rng(0).integers(1, MASK, 3000).astype(np.uint8)


def test_15_percent_are_targets_of_which_80_percent_are_masked_and_10_percent_random() -> None:
    ids = np.full(400_000, 7)
    inputs, selected = mask_tokens(ids, np.random.default_rng(1), MASK, V)
    assert selected.mean() == pytest.approx(0.15, abs=0.003)
    replaced = inputs[selected]
    assert (replaced == MASK).mean() == pytest.approx(0.8 + 0.1 / V, abs=0.005)
    assert (replaced == 7).mean() == pytest.approx(0.1 + 0.1 / V, abs=0.005)
    others = np.bincount(replaced[(replaced != MASK) & (replaced != 7)], minlength=V)
    assert (others[np.arange(V) != 7][:-1] > 50).all()  # about 117 of each other token
    assert (inputs[~selected] == 7).all()


def test_there_is_always_a_target() -> None:
    for seed in range(50):
        assert mask_tokens(np.array([[3]]), np.random.default_rng(seed), MASK, V)[1].all()


def test_the_targets_are_the_text_and_the_masks_differ_between_epochs() -> None:
    windows = MaskedWindows(TOKENS, 16, 4, seed=3, mask_id=MASK, vocab_size=V)
    plain = Windows(TOKENS, 16, 4, seed=3)
    for number in (0, 7, 1000):
        batch = windows.batch(number)
        assert batch.mask is not None
        assert torch.equal(batch.targets, plain.batch(number).ids)
        assert torch.equal(batch.ids[~batch.mask], batch.targets[~batch.mask])
        again = MaskedWindows(TOKENS, 16, 4, seed=3, mask_id=MASK, vocab_size=V).batch(number)
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
