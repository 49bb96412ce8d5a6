import numpy as np
import pytest

from tests import reference_parts
from tests.variants import randomised, small
from tinylm.evaluation.masked import masked_losses_and_accuracy
from tinylm.model.build import build_model
from tinylm.text.token_masking import masked_evaluation_batches


def test_the_loss_and_accuracy_of_masked_tokens_equal_their_formulas() -> None:
    config = small(architecture="encoder", context=8, vocab_size=4)
    model = randomised(build_model(config)).double()
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    batches = list(masked_evaluation_batches(np.tile([0, 1, 2], 30), 8, rows=3, mask_id=3, vocab_size=4))
    progress: list[int] = []
    found, accuracy = masked_losses_and_accuracy(model.train(), iter(batches), "fp32", progress.append)
    losses, correct = [], []
    result = found.total
    for batch in batches:
        for ids, targets, mask in zip(batch.ids, batch.targets, batch.mask, strict=True):
            logits = reference_parts.encoder_logits(weights, config, ids.tolist(), len(ids), table=np.float32)
            for position in np.flatnonzero(mask):
                losses.append(-reference_parts.log_softmax(logits[position])[targets[position]])
                correct.append(logits[position].argmax() == targets[position])
    assert (result.tokens, sum(progress)) == (len(losses), len(losses))
    assert result.loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert accuracy == sum(correct) / len(correct)
    assert 0 < accuracy < 1
    assert model.training
