"""Beam search, compared with a plain one over prefixes without a cache, and with enumeration of all targets."""

import itertools
import math

import numpy as np
import pytest
import torch

from tests import reference_parts
from tests.variants import randomised, small
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.torch_engine import Sampler, generate
from tinylm.jobs.pairs.translate import BeamSearchConfig, beam_search, encode_sources
from tinylm.transformer.architectures import EncoderDecoder
from tinylm.transformer.attention import Cache
from tinylm.transformer.build import build_model

V, END, MAX_TOKENS = 5, 0, 4
SOURCES = [[3, 1, 4], [2], [1, 1, 2, 3, 4], [4, 4], [2, 3]]


def translator(seed: int, position: str = "rope") -> EncoderDecoder:
    config = small(vocab_size=V, architecture="encoder-decoder", encoder_layers=1, layers=1, position=position)
    model = randomised(build_model(config), seed).double()
    assert isinstance(model, EncoderDecoder)
    with torch.no_grad():
        model.norm.weight.mul_(3)  # makes the distributions of the next token clearly uneven
    return model


class LogProbabilities:
    """Log-probabilities (V,) of the next token after a prefix, by one forward pass over the prefix."""

    def __init__(self, model: EncoderDecoder, source: list[int]) -> None:
        self.model = model
        self.source = torch.tensor([[*source, END]])

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            hidden = self.model(torch.tensor([prefix]), self.source).hidden[:, -1]
            return self.model.logits(hidden)[0].float().log_softmax(-1).numpy()


@pytest.mark.parametrize("beams", [1, 2, 3, 5])
def test_beam_search_finds_the_target_and_score_of_the_reference(beams: int) -> None:
    """A batch of sources of several lengths, whose searches end at different steps."""
    for seed, penalty in ((0, 0.0), (1, 0.6), (2, 1.5)):
        model = translator(seed)
        found = beam_search(model, SOURCES, END, BeamSearchConfig(beams=beams, length_penalty=penalty), MAX_TOKENS)
        for source, target in zip(SOURCES, found, strict=True):
            log_probabilities = LogProbabilities(model, source)
            tokens, score = reference_parts.beam_search(log_probabilities, END, END, beams, MAX_TOKENS, penalty)
            assert [*target.tokens, *([END] if target.ended else [])] == tokens, (seed, penalty)
            assert target.score == pytest.approx(score, abs=1e-5)


def test_targets_do_not_depend_on_the_order_and_number_of_sources() -> None:
    model = translator(1)
    batched = beam_search(model, SOURCES, END, BeamSearchConfig(beams=3), MAX_TOKENS)
    for order in ((3, 0, 4, 1, 2), (4, 3), (0,), (1,), (2,)):
        again = beam_search(model, [SOURCES[i] for i in order], END, BeamSearchConfig(beams=3), MAX_TOKENS)
        assert [target.tokens for target in again] == [batched[i].tokens for i in order]


def test_one_beam_is_greedy_decoding() -> None:
    for position, use_cache in itertools.product(("rope", "learned", "relative"), (True, False)):
        model = translator(2, position)
        greedy = beam_search(model, SOURCES, END, BeamSearchConfig(beams=1), MAX_TOKENS)
        sampler = Sampler(SamplingConfig(temperature=0.0), len(SOURCES), V)
        steps = generate(encode_sources(model, SOURCES, END), [[END]] * len(SOURCES), sampler, MAX_TOKENS, use_cache)
        for target, tokens in zip(greedy, zip(*(tokens for tokens, _ in steps), strict=True), strict=True):
            assert tuple(target.tokens) == tuple(itertools.takewhile(lambda token: token != END, tokens))


def test_without_an_end_the_best_open_hypothesis_is_returned() -> None:
    model = translator(0)
    model.output = torch.nn.Linear(16, V).double()
    with torch.no_grad():
        model.output.weight.zero_()
        model.output.bias.copy_(torch.tensor([-math.inf, 0.0, 1.0, 0.0, 0.0]))
    (found,) = beam_search(model, SOURCES[:1], END, BeamSearchConfig(beams=2), 3)
    assert (found.tokens, found.ended) == ([2, 2, 2], False)


class ScriptedDecoder:
    """Stands in for a ConditionedDecoder: tokens 1, 1, 1 and the end of text (0), each with a probability of 0.98."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.step = 0

    def make_cache(self, batch: int, length: int) -> list[Cache]:
        return []

    def last_logits(self, ids: torch.Tensor, cache: list[Cache]) -> torch.Tensor:
        self.step += 1
        probabilities = [0.012, 0.98, 0.008] if self.step < 4 else [0.98, 0.012, 0.008]
        return torch.tensor(probabilities).log().expand(len(ids), 3)

    def reorder(self, rows: torch.Tensor, cache: list[Cache], reorder_sources: bool) -> None:
        pass


@pytest.mark.parametrize("beams", [1, 2, 3])
def test_short_and_unlikely_targets_do_not_end_the_search(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 or 3 beams, three short hypotheses end before the likely one."""
    monkeypatch.setattr("tinylm.jobs.pairs.translate.encode_sources", lambda *inputs, repeats: ScriptedDecoder())
    (found,) = beam_search(translator(0), [[1]], 0, BeamSearchConfig(beams=beams), 9)
    assert (found.tokens, found.ended) == ([1, 1, 1], True)
    assert found.score == pytest.approx(4 * math.log(0.98) / ((5 + 4) / 6), rel=1e-5)
