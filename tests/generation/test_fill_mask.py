import pytest
import torch

from tests.variants import randomised, small
from tinylm.jobs.masked.job import predict_masks
from tinylm.transformer.architectures import Encoder
from tinylm.transformer.build import build_model

MASK = 12
IDS = [3, MASK, 4, 1, MASK, 9]


def encoder() -> Encoder:
    model = randomised(build_model(small(architecture="encoder")))
    assert isinstance(model, Encoder)
    return model


def test_a_prediction_is_the_softmax_at_its_position_without_the_mask_token() -> None:
    model = encoder()
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([IDS])).hidden)[0]
    found = predict_masks(model, IDS, MASK, candidates=4)
    assert len(found) == 2
    for prediction, position in zip(found, (1, 4), strict=True):
        exponentials = logits[position, :MASK].double().exp()
        expected = sorted(enumerate((exponentials / exponentials.sum()).tolist()), key=lambda pair: -pair[1])[:4]
        assert [token for token, _ in prediction] == [token for token, _ in expected]
        for (_, probability), (_, exact) in zip(prediction, expected, strict=True):
            assert probability == pytest.approx(exact, rel=1e-5)


def test_all_tokens_but_the_mask_and_excluded_ones_can_be_candidates() -> None:
    for exclude in ([], [2, 5]):
        for prediction in predict_masks(encoder(), IDS, MASK, candidates=1000, exclude=exclude):
            assert sorted(token for token, _ in prediction) == sorted(set(range(MASK)) - {*exclude})
            assert sum(probability for _, probability in prediction) == pytest.approx(1)
