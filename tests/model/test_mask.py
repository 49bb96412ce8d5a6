import torch

from tinylm.model.mask import causal_mask


def test_a_query_sees_the_slots_up_to_its_own() -> None:
    assert causal_mask(2, offset=1).int().tolist() == [[1, 1, 0], [1, 1, 1]]


def test_without_an_offset_the_mask_is_a_triangle() -> None:
    assert torch.equal(causal_mask(5, offset=0), torch.ones(5, 5).tril().bool())


def test_no_token_sees_the_padding_before_its_row_and_padding_sees_itself() -> None:
    mask = causal_mask(3, offset=1, starts=torch.tensor([0, 2, 3]))
    assert mask.shape == (3, 1, 3, 4)
    assert mask[:, 0].int().tolist() == [
        [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
    ]
