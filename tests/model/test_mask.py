import pytest
import torch

from tinylm.model.mask import causal_mask, padding_mask


def test_a_query_sees_the_slots_up_to_its_own() -> None:
    assert causal_mask(2, offset=1).int().tolist() == [[1, 1, 0], [1, 1, 1]]


def test_where_a_query_sees_all_that_came_before_there_is_no_mask() -> None:
    assert causal_mask(5, offset=0) is None
    assert causal_mask(1, offset=7) is None
    assert causal_mask(5, offset=0, window=5) is None
    assert causal_mask(1, offset=7, window=3) is None


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 20])
@pytest.mark.parametrize(("queries", "offset"), [(5, 0), (1, 0), (1, 6), (3, 4), (4, 1)])
def test_a_mask_is_its_definition_over_the_slots_that_are_kept(queries: int, offset: int, window: int | None) -> None:
    """i - window < s <= i, for every slot that the first query may see or a later one."""
    kept = range(0 if window is None else max(0, offset - window + 1), offset + queries)
    expected = [[s <= i and (window is None or i - s < window) for s in kept] for i in range(offset, offset + queries)]
    assert causal_mask(queries, offset, torch.tensor([0]), window=window)[0, 0].tolist() == expected
    mask = causal_mask(queries, offset, window=window)
    if mask is not None:
        assert mask.tolist() == expected
    elif queries == 1:
        assert all(expected[0])
    else:
        assert torch.equal(torch.tensor(expected), torch.ones(queries, queries).tril().bool())


def test_padding_is_what_follows_a_rows_length() -> None:
    assert padding_mask(torch.tensor([2, 3, 1]), 3)[:, 0, 0].int().tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert padding_mask(None, 3) is None


def test_no_token_sees_the_padding_before_its_row_and_padding_sees_itself() -> None:
    mask = causal_mask(3, offset=1, starts=torch.tensor([0, 2, 3]))
    assert mask.shape == (3, 1, 3, 4)
    assert mask[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    ]
