"""Windows of text that are split into shorter sequences at the beginning of a run (decision 037).

Early in training, a model learns little from distant tokens, and short sequences cost less attention (Li et al. 2022,
sequence length warmup). Splitting windows changes neither the tokens of a batch nor their order.
"""

HALVED_GROWTH, NO_GROWTH = 0.6, 0.85  # progress from which windows are split into half as many parts, and are whole


def window_parts(progress: float, growth: int) -> int:
    """The number of sequences that a window is split into at `progress`, from 0 to 1.

    growth: 1, 2 or 4 sequences at the beginning; half as many from HALVED_GROWTH on, and 1 from NO_GROWTH on.
    """
    if progress < HALVED_GROWTH:
        return growth
    return max(1, growth // 2) if progress < NO_GROWTH else 1
