import pytest
import torch
from torch import Tensor

from tests.variants import every_variant, randomised, small
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.model.kv_cache import KVCache
from tinylm.model_config import ModelConfig

LENGTH = 12
CHUNKS = {"one-by-one": [1] * 12, "uneven": [3, 1, 5, 2, 1], "prefill-then-decode": [9, 1, 1, 1], "at-once": [12]}


def exact(config: ModelConfig) -> Decoder:
    return randomised(build_model(config)).double()


def tokens(config: ModelConfig, batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def through_cache(model: Decoder, ids: Tensor, chunks: list[int], starts: Tensor | None = None) -> Tensor:
    cache = model.make_cache(len(ids), ids.shape[1], starts)
    with torch.no_grad():
        return torch.cat([model(part, cache).hidden for part in ids.split(chunks, dim=1)], dim=1)


def uncached(model: Decoder, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).hidden


@every_variant
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_cached_decoding_equals_uncached_decoding(config: ModelConfig, chunks: list[int]) -> None:
    model, ids = exact(config), tokens(config, batch=2)
    torch.testing.assert_close(through_cache(model, ids, chunks), uncached(model, ids), rtol=0, atol=1e-12)


@every_variant
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_left_padded_rows_equal_each_row_alone(config: ModelConfig, chunks: list[int]) -> None:
    """The rows have 12, 1, 7 and 10 tokens. Some chunks are padding only in some rows."""
    model, ids = exact(config), tokens(config, batch=4)
    starts = torch.tensor([0, 11, 5, 2])
    together = through_cache(model, ids, chunks, starts)
    assert together.isfinite().all()
    for row, start in enumerate(starts.tolist()):
        expected = uncached(model, ids[row : row + 1, start:])[0]
        torch.testing.assert_close(together[row, start:], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
@pytest.mark.parametrize("window", [1, 2, 5, 50])
def test_a_sliding_window_cache_never_holds_more_than_its_window(window: int, chunks: list[int]) -> None:
    """It keeps one token fewer than the window, for the next query, and is no view of a larger tensor."""
    config = small(local_window=window, local_layers=(0,))
    model, ids = exact(config), tokens(config, batch=2)
    local, full = model.make_cache(2, LENGTH)
    n_tokens = 0
    for part in ids.split(chunks, dim=1):
        model(part, [local, full])
        n_tokens += part.shape[1]
        kept = min(window - 1, n_tokens)
        assert local.keys.shape == local.values.shape == (2, config.kv_heads, kept, config.head_dim)
        assert local.keys.untyped_storage().nbytes() == local.keys.numel() * 8
        assert (local.offset, full.offset) == (n_tokens, n_tokens)


@every_variant
def test_reordered_rows_continue_from_the_cache_of_their_source_rows(config: ModelConfig) -> None:
    model, ids = exact(config), tokens(config, batch=3)
    cache = model.make_cache(3, LENGTH)
    rows = torch.tensor([2, 0, 2])
    with torch.no_grad():
        model(ids[:, :7], cache)
        for one in cache:
            one.reorder(rows)
        after = model(ids[:, 7:9], cache).hidden
    expected = uncached(model, torch.cat((ids[rows, :7], ids[:, 7:9]), dim=1))[:, 7:]
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)


@every_variant
def test_the_content_of_padding_does_not_change_the_output(config: ModelConfig) -> None:
    model, ids = exact(config), tokens(config, batch=2)
    starts = torch.tensor([4, 7])
    other = ids.clone()
    for row, start in enumerate(starts.tolist()):
        other[row, :start] = (ids[row, :start] + 1) % config.vocab_size
    before, after = (through_cache(model, x, [10, 1, 1], starts) for x in (ids, other))
    for row, start in enumerate(starts.tolist()):
        torch.testing.assert_close(after[row, start:], before[row, start:], rtol=0, atol=1e-12)


@every_variant
def test_cached_decoding_is_causal(config: ModelConfig) -> None:
    """Chunks after the first need a mask of their own; `is_causal` aligns queries with the first keys."""
    model, ids = exact(config), tokens(config, batch=1)
    changed = ids.clone()
    changed[0, 8:] = (ids[0, 8:] + 1) % config.vocab_size
    before, after = (through_cache(model, x, [4, 8]) for x in (ids, changed))
    torch.testing.assert_close(after[0, :8], before[0, :8], rtol=0, atol=1e-12)
    assert not torch.equal(after[0, 8:], before[0, 8:])


def test_a_cache_returns_all_keys_and_values_in_order() -> None:
    cache = KVCache(2, 3, 5, 4, torch.device("cpu"), torch.float32)
    keys, values = torch.randn(2, 2, 3, 5, 4)
    for begin, end in ((0, 2), (2, 3), (3, 5)):
        held = cache.update(keys[:, :, begin:end], values[:, :, begin:end])
        assert cache.offset == end
        assert torch.equal(held[0], keys[:, :, :end])
        assert torch.equal(held[1], values[:, :, :end])


def test_each_layer_has_its_own_offset_and_caches_only_key_and_value_heads() -> None:
    model = exact(small(kv_heads=2, layers=3))
    cache = model.make_cache(5, 7)
    model(torch.zeros(5, 4, dtype=torch.long), cache)
    assert [layer.offset for layer in cache] == [4, 4, 4]
    assert all(layer.keys.shape == layer.values.shape == (5, 2, 7, 4) for layer in cache)
    assert all(layer.keys.dtype == layer.values.dtype == torch.float64 for layer in cache)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_full_cache_raises_an_error(steps: int) -> None:
    cache = KVCache(1, 1, 2, 2, torch.device("cpu"), torch.float32)
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    with pytest.raises(ValueError, match="slots"):
        cache.update(torch.ones(1, 1, steps, 2), torch.ones(1, 1, steps, 2))
