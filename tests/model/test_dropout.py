import torch

from tinylm.model.dropout import Dropout


def test_dropout_depends_on_the_seed_in_training_and_is_off_in_evaluation() -> None:
    drop, x = Dropout(0.3), torch.ones(1000)
    torch.manual_seed(1)
    first = drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), first) and not torch.equal(first, x)
    assert Dropout(0.0)(x) is x
    assert drop.eval()(x) is x
