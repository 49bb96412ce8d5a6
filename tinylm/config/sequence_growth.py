"""Sequence length warmup: windows of text are split into shorter sequences until 85 % of a run (decision 037).

Early in training, a model learns little from distant tokens, and short sequences cost less attention (Li et al. 2022).
Every eighth step has whole windows, which keep the model usable, and its validation loss comparable, at its full
context from the beginning. Splitting windows changes neither the tokens of a batch nor their order.
"""

import itertools

from tinylm.config.validation import require

SEQUENCE_GROWTHS = (1, 2, 4)  # sequences that a window is split into at the beginning
HALVED_GROWTH, NO_GROWTH = 0.6, 0.85  # progress from which windows are split into half as many parts, and are whole
WHOLE_EVERY = 8  # steps, of which the last has whole windows


def window_parts(step: int, progress: float, growth: int) -> int:
    """The number of sequences that each window of a step is split into.

    step: steps before this one. progress: from 0 to 1. growth: one of SEQUENCE_GROWTHS; half as many from HALVED_GROWTH
    on, and 1 from NO_GROWTH on.
    """
    if step % WHOLE_EVERY == WHOLE_EVERY - 1 or progress >= NO_GROWTH:
        return 1
    return growth if progress < HALVED_GROWTH else max(1, growth // 2)


def mean_share(growth: int) -> float:
    """The length of the sequences divided by that of the windows, as a mean over the tokens of a long run."""
    bounds = (0.0, HALVED_GROWTH, NO_GROWTH, 1.0)
    return sum(
        (end - start) / window_parts(step, start, growth) / WHOLE_EVERY
        for start, end in itertools.pairwise(bounds)
        for step in range(WHOLE_EVERY)
    )


def check_sequence_growth(growth: int, length: int, *, is_plain_text: bool) -> None:
    """Raise UsageError if training sequences of `length` tokens cannot be split as `sequence_growth` says."""
    require(growth in SEQUENCE_GROWTHS, f"`sequence_growth` is {growth}; it must be 1, 2 or 4.")
    require(growth == 1 or is_plain_text, "`sequence_growth` is for plain text; leave it out.")
    require(
        length % growth == 0,
        f"`sequence_growth` is {growth}; it must divide the length of the sequences, {length}.",
    )
