"""Masks and caches of attention."""

import pytest
import torch
from torch import Tensor

from tests.transformer.test_architectures import exact
from tests.variants import every_variant, small
from tinylm.config.model import ModelConfig
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.attention import KVCache, causal_mask, padding_mask, segment_mask, segment_positions


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


LENGTH = 12
CHUNKS = ([1] * 12, [3, 1, 5, 2, 1], [9, 1, 1, 1], [12])


def tokens(batch: int) -> Tensor:
    return torch.randint(13, (batch, LENGTH), generator=torch.Generator().manual_seed(3))


def uncached(model: Decoder, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).hidden


@every_variant
def test_cached_decoding_equals_uncached_decoding_also_of_left_padded_rows(config: ModelConfig) -> None:
    """The rows have 12, 1, 7 and 10 tokens, or 12 each without padding. Some chunks are padding only in some rows."""
    model, ids = exact(config), tokens(batch=4)
    for starts in (None, torch.tensor([0, 11, 5, 2])):
        first = [0] * 4 if starts is None else starts.tolist()
        alone = [uncached(model, ids[row : row + 1, start:])[0] for row, start in enumerate(first)]
        for chunks in CHUNKS:
            cache = model.make_cache(4, LENGTH, starts)
            with torch.no_grad():
                together = torch.cat([model(part, cache).hidden for part in ids.split(chunks, dim=1)], dim=1)
            assert together.isfinite().all()
            for row, expected in enumerate(alone):
                torch.testing.assert_close(together[row, first[row] :], expected, rtol=0, atol=1e-12)


def test_caches_hold_only_key_and_value_heads_and_one_of_a_sliding_window_no_more_than_its_window() -> None:
    """That keeps one token fewer than the window, for the next query, and is no view of a larger tensor."""
    for window in (1, 2, 5, 50):
        model, ids = exact(small(local_window=window, local_layers=(0,))), tokens(batch=2)
        for chunks in CHUNKS:
            local, full = model.make_cache(2, LENGTH)
            n_tokens = 0
            for part in ids.split(chunks, dim=1):
                model(part, [local, full])
                n_tokens += part.shape[1]
                kept = min(window - 1, n_tokens)
                assert local.keys.shape == local.values.shape == (2, 2, kept, 4)
                assert full.keys.shape == full.values.shape == (2, 2, LENGTH, 4)
                assert local.keys.dtype == full.keys.dtype == full.values.dtype == torch.float64
                assert local.keys.untyped_storage().nbytes() == local.keys.numel() * 8
                assert (local.offset, full.offset) == (n_tokens, n_tokens)


def test_reordered_rows_continue_from_the_cache_of_their_source_rows() -> None:
    """In a cache of a sliding window and in one of all tokens."""
    model, ids = exact(small(local_window=3, local_layers=(0,))), tokens(batch=3)
    cache = model.make_cache(3, LENGTH)
    rows = torch.tensor([2, 0, 2])
    with torch.no_grad():
        model(ids[:, :7], cache)
        for one in cache:
            one.reorder(rows)
        after = model(ids[:, 7:9], cache).hidden
    expected = uncached(model, torch.cat((ids[rows, :7], ids[:, 7:9]), dim=1))[:, 7:]
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)


def test_a_full_cache_raises_an_error() -> None:
    cache = KVCache(1, 1, 2, 2, torch.device("cpu"), torch.float32)
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="slots"):
        cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
