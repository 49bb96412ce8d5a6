import pytest
import torch
from torch import Tensor

from tests.transformer.test_architectures import exact
from tests.variants import every_variant, small
from tinylm.config.model import ModelConfig
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.attention import KVCache

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
