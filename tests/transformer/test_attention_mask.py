import torch

from tinylm.transformer.attention import causal_mask, padding_mask, segment_mask, segment_positions


def test_no_mask_is_made_where_a_query_attends_to_all_earlier_slots() -> None:
    assert causal_mask(5, offset=0) is None
    assert causal_mask(1, offset=7) is None
    assert causal_mask(5, offset=0, window=5) is None
    assert causal_mask(1, offset=7, window=3) is None


def test_a_mask_equals_its_definition_over_the_kept_slots() -> None:
    """i - window < s <= i, with a column for each slot from the start of the first query's window. Rows of the batch
    begin at `starts`: tokens do not attend to the padding before, and padding attends to itself."""
    wrong = []
    for window in (None, 1, 2, 3, 4, 20):
        for queries, offset in ((5, 0), (1, 0), (1, 6), (3, 4), (4, 1)):
            slots = range(0 if window is None else max(0, offset - window + 1), offset + queries)
            expected = [
                [
                    [s == i or (start <= s <= i and (window is None or i - s < window)) for s in slots]
                    for i in range(offset, offset + queries)
                ]
                for start in (0, 2, offset + 1)
            ]
            mask = causal_mask(queries, offset, window=window)
            if mask is None:  # plain causal attention
                found = [[True] * len(slots)] if queries == 1 else torch.ones(queries, queries).tril().bool().tolist()
            else:
                found = mask.tolist()
            padded = causal_mask(queries, offset, torch.tensor([0, 2, offset + 1]), window=window)[:, 0].tolist()
            wrong += [] if found == expected[0] and padded == expected else [(window, queries, offset)]
    assert not wrong


def test_padding_mask_is_false_after_the_length_of_each_row() -> None:
    assert padding_mask(torch.tensor([2, 3, 1]), 3)[:, 0, 0].int().tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert padding_mask(None, 3) is None


def test_segments_are_masked_and_numbered_as_a_loop_does() -> None:
    rows = [[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 2]]
    segments = torch.tensor(rows)
    slots = range(8)
    expected_positions = [[slot - row.index(row[slot]) if row[slot] else 0 for slot in slots] for row in rows]
    assert segment_positions(segments).tolist() == expected_positions
    for window in (None, 1, 2, 5):
        expected = [
            [[s <= i and (window is None or i - s < window) and row[s] == row[i] for s in slots] for i in slots]
            for row in rows
        ]
        assert segment_mask(segments, window)[:, 0].tolist() == expected, window
