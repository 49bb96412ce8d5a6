"""Masking, compared with the shares of Devlin et al. and with the text itself."""

import numpy as np
import pytest
import torch

from tinylm.text.batches import Windows, evaluation_batches
from tinylm.text.token_masking import MaskedWindows, mask_tokens, masked_evaluation_batches

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


@pytest.mark.parametrize("seed", range(50))
def test_there_is_always_a_target(seed: int) -> None:
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


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_evaluation_masks_do_not_depend_on_the_batch_size(rows: int) -> None:
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
