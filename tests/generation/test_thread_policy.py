from collections.abc import Iterator

import pytest
import torch

from tests.variants import small
from tinylm.generation.thread_policy import OPERATIONS_PER_SECOND, ThreadPolicyDecoder
from tinylm.kernels.thread_latency import ThreadLatency
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder

WAKE_UP, BANDWIDTH = 13e-6, 40e9
LATENCY = ThreadLatency(WAKE_UP, BANDWIDTH)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class RecordingPolicy(ThreadPolicyDecoder):
    """Records the number of threads of each forward pass."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, LATENCY)
        self.threads: list[int] = []
        decoder.register_forward_pre_hook(lambda *_: self.threads.append(torch.get_num_threads()))


def test_many_rows_and_a_long_cache_use_all_threads_and_one_token_of_a_small_model_uses_one() -> None:
    """With two threads, half of the time of reading or computing is saved, at the cost of one wake-up per product."""
    decoder = build_model(small(context=1024)).eval()
    products = 2 * 7  # of two layers; the output layer is the embedding
    weights = sum(p.numel() for name, p in decoder.named_parameters() if "proj" in name)
    enough_rows = round(2 * WAKE_UP * products * OPERATIONS_PER_SECOND / (2 * weights))
    enough_cached = round((2 * WAKE_UP * products * BANDWIDTH - 4 * weights) / (2 * 4 * 2 * 2 * 4))
    policy = RecordingPolicy(decoder)
    for rows, threads in ((1, 1), (enough_rows - 1, 1), (enough_rows + 1, 2)):
        policy.last_logits(torch.zeros(rows, 1, dtype=torch.long), None, 1)
        assert policy.threads.pop() == threads
    batch, cache = torch.zeros(256, 1, dtype=torch.long), policy.make_cache(256, 1024)
    for offset, threads in ((enough_cached // 256 - 1, 1), (enough_cached // 256 + 1, 2)):
        for layer in cache:
            layer.offset = offset
        policy.last_logits(batch, cache, 1)
        assert policy.threads.pop() == threads
    assert torch.get_num_threads() == 2


def test_the_number_of_threads_is_restored_if_the_model_fails() -> None:
    policy = ThreadPolicyDecoder(build_model(small()), LATENCY)
    with pytest.raises(IndexError):
        policy.last_logits(torch.tensor([[99]]), None, 1)
    assert torch.get_num_threads() == 2
