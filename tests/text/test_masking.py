"""Judge: the shares that Devlin et al. prescribe, and the text itself."""

import numpy as np
import pytest
import torch

from tinylm.text.dataset import Windows, evaluation_batches
from tinylm.text.masking import MaskedWindows, cover, masked_evaluation_batches

MASK, V = 50, 51
TOKENS = np.random.default_rng(0).integers(1, MASK, 3000).astype(np.uint8)


def test_a_seventh_is_asked_for_of_which_four_fifths_are_covered_and_a_tenth_replaced() -> None:
    ids = np.full(400_000, 7)
    shown, selected = cover(ids, np.random.default_rng(1), MASK, V)
    assert selected.mean() == pytest.approx(0.15, abs=0.003)
    asked = shown[selected]
    assert (asked == MASK).mean() == pytest.approx(0.8 + 0.1 / V, abs=0.005)
    assert (asked == 7).mean() == pytest.approx(0.1 + 0.1 / V, abs=0.005)
    others = np.bincount(asked[(asked != MASK) & (asked != 7)], minlength=V)
    assert (others[np.arange(V) != 7][:-1] > 50).all()  # about 117 of each other token
    assert (shown[~selected] == 7).all()


@pytest.mark.parametrize("seed", range(50))
def test_something_is_always_asked_for(seed: int) -> None:
    assert cover(np.array([[3]]), np.random.default_rng(seed), MASK, V)[1].all()


def test_the_targets_are_the_text_itself_covered_anew_each_time() -> None:
    windows = MaskedWindows(TOKENS, 16, 4, seed=3, mask=MASK, vocab_size=V)
    plain = Windows(TOKENS, 16, 4, seed=3)
    for number in (0, 7, 1000):
        batch = windows.batch(number)
        assert batch.mask is not None
        assert torch.equal(batch.targets, plain.batch(number).ids)
        assert torch.equal(batch.ids[~batch.mask], batch.targets[~batch.mask])
        again = MaskedWindows(TOKENS, 16, 4, seed=3, mask=MASK, vocab_size=V).batch(number)
        assert torch.equal(batch.ids, again.ids) and torch.equal(batch.mask, again.mask)
    per_epoch = plain.per_epoch // 4 * 4
    assert not torch.equal(windows.batch(0).mask, windows.batch(per_epoch).mask)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_evaluation_covers_the_same_places_whatever_the_batch(rows: int) -> None:
    def flat(rows: int) -> list[tuple[list[int], list[int], list[bool]]]:
        batches = masked_evaluation_batches(TOKENS, 16, rows, MASK, V)
        return [
            (ids.tolist(), targets.tolist(), mask.tolist())
            for batch in batches
            for ids, targets, mask in zip(batch.ids, batch.targets, batch.mask, strict=True)
        ]

    assert flat(rows) == flat(7)
    assert [targets for _, targets, _ in flat(rows)] == [
        row.tolist() for batch in evaluation_batches(TOKENS, 16, 1) for row in batch.ids
    ]
