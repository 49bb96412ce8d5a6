from collections.abc import Iterator

import pytest
import torch

from tests.variants import randomised, small
from tinylm.inference import threads as module
from tinylm.inference.arrange import arrange
from tinylm.inference.generator import generate
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.inference.threads import COMPUTING, ThreadPace, WakingDecoder, measure_threads, pace_entry, thread_pace
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder

WAKING, READING = 13e-6, 40e9
PACE = ThreadPace(WAKING, READING)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Watched(WakingDecoder):
    """Remembers how many threads its decoder had."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(decoder, PACE)
        self.threads: list[int] = []
        decoder.register_forward_pre_hook(lambda *_: self.threads.append(torch.get_num_threads()))


def test_rows_and_a_long_past_wake_more_threads_and_a_token_of_a_small_model_does_not() -> None:
    """By the rule: half of what reading or computing takes, against one waking for each product."""
    decoder = build_model(small(context=1024)).eval()
    products = 2 * 7  # of two layers; the output layer is the embedding
    weights = sum(p.numel() for name, p in decoder.named_parameters() if "proj" in name)
    enough_rows = round(2 * WAKING * products * COMPUTING / (2 * weights))
    enough_cached = round((2 * WAKING * products * READING - 4 * weights) / (2 * 4 * 2 * 2 * 4))
    watched = Watched(decoder)
    for rows, threads in ((1, 1), (enough_rows - 1, 1), (enough_rows + 1, 2)):
        watched.last_logits(torch.zeros(rows, 1, dtype=torch.long), None, 1)
        assert watched.threads.pop() == threads
    batch, cache = torch.zeros(256, 1, dtype=torch.long), watched.make_cache(256, 1024)
    for offset, threads in ((enough_cached // 256 - 1, 1), (enough_cached // 256 + 1, 2)):
        for layer in cache:
            layer.offset = offset
        watched.last_logits(batch, cache, 1)
        assert watched.threads.pop() == threads
    assert torch.get_num_threads() == 2


def test_threads_are_as_before_when_a_model_fails() -> None:
    watched = WakingDecoder(build_model(small()), PACE)
    with pytest.raises(IndexError):
        watched.last_logits(torch.tensor([[99]]), None, 1)
    assert torch.get_num_threads() == 2


def test_it_writes_what_the_decoder_writes() -> None:
    decoder = randomised(build_model(small()))
    arrange(decoder)

    def written(model: Decoder | WakingDecoder) -> list[list[int]]:
        sampler = Sampler(Sampling(), 1, 2, decoder.device, 13)
        return list(generate(model, [[1], [2, 3, 4]], sampler, 40))

    assert written(WakingDecoder(decoder, PACE)) == written(decoder)


@pytest.mark.parametrize("threads, waking", [(2, 3e-6), (1, 0.0)])
def test_waking_costs_what_all_threads_take_beyond_their_share_of_what_one_takes(
    threads: int, waking: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a clock by which all work takes 10 us alone, and 8 us together."""
    torch.set_num_threads(threads)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 10e-6 if torch.get_num_threads() == 1 else 8e-6
        return now

    monkeypatch.setattr(module.time, "perf_counter", clock)
    pace = measure_threads()
    assert pace.waking == pytest.approx(waking, abs=1e-12)
    assert pace.reading == pytest.approx(1024 * 1024 * 4 / 10e-6)
    assert torch.get_num_threads() == threads


class Silent:
    def note(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


def test_what_sharing_out_costs_is_measured_once_for_each_setting_of_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([ThreadPace(1e-5, 2e10), ThreadPace(3e-5, 4e10)])
    monkeypatch.setattr(module, "measure_threads", lambda: next(found))
    paces = []
    for spins in ("11", "22", "11", "22"):
        monkeypatch.setenv("GOMP_SPINCOUNT", spins)
        paces.append(thread_pace(Silent()))
    assert paces == [ThreadPace(1e-5, 2e10), ThreadPace(3e-5, 4e10)] * 2


def test_a_recorded_pace_that_cannot_be_true_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pace_entry().write({"waking": -1.0, "reading": 1e10})
    monkeypatch.setattr(module, "measure_threads", lambda: PACE)
    assert thread_pace(Silent()) == PACE
