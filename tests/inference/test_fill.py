import pytest
import torch

from tests.variants import randomised, small
from tinylm.inference.fill import guess
from tinylm.model.build import build_model
from tinylm.model.encoder import Encoder

MASK = 12
IDS = [3, MASK, 4, 1, MASK, 9]


def encoder() -> Encoder:
    model = randomised(build_model(small(architecture="encoder")))
    assert isinstance(model, Encoder)
    return model


def test_a_guess_is_the_softmax_at_its_place_without_the_mask_itself() -> None:
    model = encoder()
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([IDS])).hidden)[0]
    found = guess(model, IDS, MASK, candidates=4)
    assert len(found) == 2
    for one, place in zip(found, (1, 4), strict=True):
        powers = logits[place, :MASK].double().exp()
        expected = sorted(enumerate((powers / powers.sum()).tolist()), key=lambda pair: -pair[1])[:4]
        assert one.tokens == [token for token, _ in expected]
        assert one.probabilities == pytest.approx([probability for _, probability in expected], rel=1e-5)


def test_no_more_candidates_are_given_than_there_are() -> None:
    found = guess(encoder(), IDS, MASK, candidates=1000)
    assert all(sorted(one.tokens) == list(range(MASK)) for one in found)
    assert all(sum(one.probabilities) == pytest.approx(1) for one in found)


def test_what_must_not_be_guessed_has_no_probability() -> None:
    found = guess(encoder(), IDS, MASK, candidates=1000, never=[2, 5])
    for one in found:
        assert sorted(one.tokens) == sorted(set(range(MASK)) - {2, 5})
        assert sum(one.probabilities) == pytest.approx(1)
