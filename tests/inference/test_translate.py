"""Judge: beam search written out over a function of prefixes, and enumeration of all targets."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests import reference_parts
from tests.variants import randomised, small
from tinylm.inference.generator import generate
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.inference.translate import beam_search, condition
from tinylm.model.build import build_model
from tinylm.model.cache import Cache
from tinylm.model.encoder_decoder import EncoderDecoder

V, END, MOST = 5, 0, 4
SOURCES = [[3, 1, 4], [2], [1, 1, 2, 3, 4], [4, 4], [2, 3]]


def translator(seed: int, position: str = "rope") -> EncoderDecoder:
    config = small(vocab_size=V, architecture="encoder-decoder", encoder_layers=1, layers=1, position=position)
    model = randomised(build_model(config), seed).double()
    assert isinstance(model, EncoderDecoder)
    with torch.no_grad():
        model.norm.weight.mul_(3)  # opinions strong enough to differ from one another
    return model


class Steps:
    """log p of the next token after a prefix, by teacher forcing on that prefix alone."""

    def __init__(self, model: EncoderDecoder, source: list[int]) -> None:
        self.model = model
        self.source = torch.tensor([[*source, END]])

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            hidden = self.model(torch.tensor([prefix]), self.source).hidden[:, -1]
            return self.model.logits(hidden)[0].float().log_softmax(-1).numpy()


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("beams", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_search_is_that_of_the_reference(seed: int, beams: int, penalty: float) -> None:
    """Sources of several lengths side by side, whose searches end at different times."""
    model = translator(seed)
    found = beam_search(model, SOURCES, END, beams=beams, length_penalty=penalty, max_tokens=MOST)
    for source, one in zip(SOURCES, found, strict=True):
        steps = Steps(model, source)
        tokens, score = reference_parts.beam_search(steps, END, END, beams, MOST, penalty)
        assert [*one.tokens, *([END] if one.ended else [])] == tokens
        assert one.score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_with_room_for_everything_the_best_of_all_targets_is_found(seed: int) -> None:
    model = translator(seed)
    found = beam_search(model, SOURCES[:2], END, beams=V**3, length_penalty=0.8, max_tokens=3)
    for source, one in zip(SOURCES, found, strict=False):
        tokens, score = reference_parts.best_sequence_by_enumeration(Steps(model, source), END, END, 3, 0.8)
        assert [*one.tokens, END] == tokens
        assert one.score == pytest.approx(score, abs=1e-5)


def test_the_order_and_the_number_of_sources_change_nothing() -> None:
    model = translator(1)
    together = beam_search(model, SOURCES, END, beams=3, max_tokens=MOST)
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        again = beam_search(model, [SOURCES[i] for i in order], END, beams=3, max_tokens=MOST)
        assert [one.tokens for one in again] == [together[i].tokens for i in order]
    assert [beam_search(model, [s], END, beams=3, max_tokens=MOST)[0].tokens for s in SOURCES] == [
        one.tokens for one in together
    ]


@pytest.mark.parametrize("position", ["rope", "learned", "relative"])
def test_one_beam_is_the_likeliest_token_each_time(position: str) -> None:
    model = translator(2, position)
    greedy = beam_search(model, SOURCES, END, max_tokens=MOST)
    for use_cache in (True, False):
        sampler = Sampler(Sampling(temperature=0.0), 0, len(SOURCES), torch.device("cpu"), V)
        columns = generate(condition(model, SOURCES, END), [[END]] * len(SOURCES), sampler, MOST, use_cache)
        for one, tokens in zip(greedy, zip(*columns, strict=True), strict=True):
            assert tuple(one.tokens) == tuple(itertools.takewhile(lambda token: token != END, tokens))


def test_a_target_that_never_ends_is_the_best_of_those_that_are_open() -> None:
    model = translator(0)
    model.output = torch.nn.Linear(16, V).double()
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.copy_(torch.tensor([-math.inf, 0.0, 1.0, 0.0, 0.0]))
    (found,) = beam_search(model, SOURCES[:1], END, beams=2, max_tokens=3)
    assert (found.tokens, found.ended) == ([2, 2, 2], False)


class Sure:
    """In the place of a conditioned model: tokens 1, 1, 1 and the end, each with a probability of 0.98."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.step = 0

    def make_cache(self, batch: int, length: int) -> list[Cache]:
        return []

    def last_logits(self, ids: torch.Tensor, cache: list[Cache], count: int) -> torch.Tensor:
        self.step += 1
        probabilities = [0.012, 0.98, 0.008] if self.step < 4 else [0.98, 0.012, 0.008]
        return torch.tensor(probabilities).log().expand(len(ids), count, 3)

    def reorder(self, rows: torch.Tensor, cache: list[Cache], sources_too: bool) -> None:
        pass


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_short_and_unlikely_targets_do_not_end_a_search(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them have come to their ends before the likely one does."""
    monkeypatch.setattr("tinylm.inference.translate.condition", lambda *inputs, times: Sure())
    (found,) = beam_search(translator(0), [[1]], 0, beams=beams, max_tokens=9)
    assert (found.tokens, found.ended) == ([1, 1, 1], True)
    assert found.score == pytest.approx(4 * math.log(0.98) / ((5 + 4) / 6), rel=1e-5)
