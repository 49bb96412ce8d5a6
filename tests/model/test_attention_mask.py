import pytest
import torch

from tinylm.model.attention_mask import causal_mask, padding_mask, segment_mask, segment_positions


def test_a_query_attends_to_slots_up_to_its_own() -> None:
    assert causal_mask(2, offset=1).int().tolist() == [[1, 1, 0], [1, 1, 1]]


def test_no_mask_is_made_where_a_query_attends_to_all_earlier_slots() -> None:
    assert causal_mask(5, offset=0) is None
    assert causal_mask(1, offset=7) is None
    assert causal_mask(5, offset=0, window=5) is None
    assert causal_mask(1, offset=7, window=3) is None


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 20])
@pytest.mark.parametrize(("queries", "offset"), [(5, 0), (1, 0), (1, 6), (3, 4), (4, 1)])
def test_a_window_mask_equals_its_definition_over_the_kept_slots(queries: int, offset: int, window: int | None) -> None:
    """i - window < s <= i, with a column for each slot from the start of the first query's window."""
    slots = range(0 if window is None else max(0, offset - window + 1), offset + queries)
    expected = [[s <= i and (window is None or i - s < window) for s in slots] for i in range(offset, offset + queries)]
    assert causal_mask(queries, offset, torch.tensor([0]), window=window)[0, 0].tolist() == expected
    mask = causal_mask(queries, offset, window=window)
    if mask is not None:
        assert mask.tolist() == expected
    elif queries == 1:
        assert all(expected[0])
    else:
        assert torch.equal(torch.tensor(expected), torch.ones(queries, queries).tril().bool())


def test_padding_mask_is_false_after_the_length_of_each_row() -> None:
    assert padding_mask(torch.tensor([2, 3, 1]), 3)[:, 0, 0].int().tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert padding_mask(None, 3) is None


def test_tokens_do_not_attend_to_left_padding_and_padding_attends_to_itself() -> None:
    mask = causal_mask(3, offset=1, starts=torch.tensor([0, 2, 3]))
    assert mask.shape == (3, 1, 3, 4)
    assert mask[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    ]


@pytest.mark.parametrize("window", [None, 1, 2, 5])
def test_segments_are_masked_and_numbered_as_a_loop_does(window: int | None) -> None:
    segments = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2]])
    mask, positions = segment_mask(segments, window), segment_positions(segments)
    assert mask.shape == (2, 1, 8, 8)
    for row in range(2):
        for query in range(8):
            numbers = segments[row].tolist()
            assert positions[row, query] == query - numbers.index(numbers[query])
            for key in range(8):
                near = window is None or query - key < window
                expected = key <= query and near and numbers[key] == numbers[query]
                assert bool(mask[row, 0, query, key]) == expected
