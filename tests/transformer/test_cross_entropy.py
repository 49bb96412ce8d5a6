"""Reference: the cross-entropy and the label smoothing of reference.py and reference_parts.py, in float64."""

import numpy as np
import pytest
import torch

from tests import reference, reference_parts
from tinylm.transformer.layers import IGNORED, CrossEntropy


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_each_row_of_targets_has_its_cross_entropy(smoothing: float) -> None:
    """The second row of targets is not smoothed, and those of its targets that are IGNORED do not count."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(30, 13, generator=rng, dtype=torch.float64)
    targets = torch.randint(13, (2, 30), generator=rng)
    targets[1, 1::3] = IGNORED
    counted = targets[1] != IGNORED
    pairs = zip(logits.numpy(), targets[0].tolist(), strict=True)
    first = sum(reference_parts.label_smoothed(*pair, smoothing) for pair in pairs)
    mean = reference.cross_entropy(logits[counted].numpy(), targets[1, counted].tolist())
    found = CrossEntropy()(logits, targets, smoothing)
    assert [loss.item() for loss in found] == pytest.approx([first, mean * int(counted.sum())], rel=1e-12)


def test_logits_in_16_bits_are_summed_in_single_precision() -> None:
    """Logits are 3 for id 0 and 0 for the other twelve: the loss of id 0 is log(e^3 + 12) - 3."""
    logits = torch.zeros(2000, 13, dtype=torch.bfloat16)
    logits[:, 0] = 3
    (loss,) = CrossEntropy()(logits, torch.zeros(1, 2000, dtype=torch.long), 0.0)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(2000 * (np.log(np.exp(3) + 12) - 3), rel=1e-5)
