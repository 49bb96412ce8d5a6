"""The part of a text that the report scores."""

import numpy as np

from tinylm.report.scores import first_pairs

END = 9
PAIRS = np.array([1, END, 2, 2, END, 3, END, 4, END, 5, END, 6, 6, 6])  # the last target has no end


def test_the_first_pairs_are_whole_and_the_last_one_may_lack_its_end() -> None:
    assert first_pairs(PAIRS, END, 1, 100).tolist() == [1, END, 2, 2, END]
    assert first_pairs(PAIRS, END, 2, 100).tolist() == [1, END, 2, 2, END, 3, END, 4, END]
    assert first_pairs(PAIRS, END, 3, 100).tolist() == PAIRS.tolist()
    assert first_pairs(PAIRS, END, 9, 100).tolist() == PAIRS.tolist()


def test_a_pair_beyond_the_limit_of_tokens_is_left_out() -> None:
    assert first_pairs(PAIRS, END, 9, 13).tolist() == [1, END, 2, 2, END, 3, END, 4, END]
    assert first_pairs(PAIRS, END, 9, 7).tolist() == [1, END, 2, 2, END]
    assert first_pairs(PAIRS, END, 9, 4).tolist() == []
