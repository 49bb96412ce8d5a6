import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference, reference_parts
from tinylm.model.position import (
    LearnedPosition,
    LocalRotaryPosition,
    Position,
    RotaryPosition,
    SinusoidalPosition,
    rotate,
)
from tinylm.model.rope_frequencies import rope_frequencies

POSITIONS = st.integers(0, 400)


def rotary(head_dim: int, theta: float, context: int = 1024) -> RotaryPosition:
    return RotaryPosition(context, rope_frequencies(head_dim, theta))


def test_the_sinusoid_table_equals_the_formula() -> None:
    table = SinusoidalPosition(50, 12).add(torch.zeros(1, 50, 12), torch.arange(50))[0]
    expected = [[reference.sinusoid(p, i, 12) for i in range(12)] for p in range(50)]
    np.testing.assert_allclose(table.numpy(), expected, atol=1e-7)  # float32 keeps 6e-8


def test_sinusoids_are_added_to_the_embeddings() -> None:
    x = torch.randn(2, 3, 4)
    added = SinusoidalPosition(8, 4).add(x, torch.arange(5, 8)) - x
    expected = [[reference.sinusoid(p, i, 4) for i in range(4)] for p in (5, 6, 7)]
    np.testing.assert_allclose(added.numpy(), [expected, expected], atol=1e-6)


@pytest.mark.parametrize("make", [LearnedPosition, SinusoidalPosition], ids=["learned", "sinusoidal"])
def test_rows_of_a_batch_can_have_different_positions(make) -> None:
    position = make(9, 4)
    if isinstance(position, LearnedPosition):
        torch.nn.init.normal_(position.weight)
    x = torch.randn(2, 3, 4)
    positions = torch.tensor([[0, 1, 2], [6, 7, 8]])
    together = position.add(x, positions)
    for row in range(2):
        assert torch.equal(together[row : row + 1], position.add(x[row : row + 1], positions[row]))
    assert not torch.equal(together[0] - x[0], together[1] - x[1])


def test_a_learned_position_is_a_row_of_its_table() -> None:
    position = LearnedPosition(6, 4)
    with torch.no_grad():
        position.weight.copy_(torch.arange(24.0).view(6, 4))
    added = position.add(torch.ones(1, 2, 4), torch.tensor([2, 5]))
    assert added.tolist() == [[[9, 10, 11, 12], [21, 22, 23, 24]]]


def test_position_none_neither_adds_nor_rotates() -> None:
    x = torch.randn(1, 3, 4)
    assert torch.equal(Position().add(x, torch.arange(3)), x)
    assert Position().rotation(torch.arange(3)) is None


@given(p=POSITIONS, half=st.integers(1, 6), theta=st.sampled_from([10.0, 10_000.0, 1e6]), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_rope_rotates_split_half_pairs_as_complex_numbers(p: int, half: int, theta: float, seed: int) -> None:
    x = torch.randn(1, 1, 1, 2 * half, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    turned = rotate(x, rotary(2 * half, theta).rotation(torch.tensor([p])))
    expected = reference.rotary(x.flatten().numpy(), p, theta)
    np.testing.assert_allclose(turned.flatten().numpy(), expected, atol=1e-6)  # the tables are float32


def test_rope_equals_values_worked_out_by_hand() -> None:
    """Width 4, theta 100: at position p the pair (0, 2) turns by p, the pair (1, 3) by p/10."""
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).view(1, 1, 1, 4)
    turned = rotate(x, rotary(4, 100.0).rotation(torch.tensor([3])))
    expected = [math.cos(3), -math.sin(0.3), math.sin(3), math.cos(0.3)]
    np.testing.assert_allclose(turned.flatten().numpy(), expected, atol=1e-6)


@given(
    query_at=POSITIONS,
    key_at=POSITIONS,
    shift=POSITIONS,
    theta=st.sampled_from([10.0, 10_000.0]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=100)
def test_rope_scores_depend_on_the_offset_alone(
    query_at: int, key_at: int, shift: int, theta: float, seed: int
) -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    position = rotary(8, theta)

    def score(query_at: int, key_at: int) -> float:
        turned_q = rotate(q, position.rotation(torch.tensor([query_at])))
        turned_k = rotate(k, position.rotation(torch.tensor([key_at])))
        return float((turned_q * turned_k).sum())

    assert score(query_at + shift, key_at + shift) == pytest.approx(score(query_at, key_at), abs=1e-5)


def test_rows_of_a_batch_can_have_different_rope_angles() -> None:
    position = rotary(4, 10_000.0)
    x = torch.randn(2, 3, 5, 4)
    positions = torch.stack((torch.arange(5), torch.arange(7, 12)))
    together = rotate(x, position.rotation(positions))
    for row in range(2):
        torch.testing.assert_close(together[row : row + 1], rotate(x[row : row + 1], position.rotation(positions[row])))


@pytest.mark.parametrize("p", [1, 999, 99_999])
def test_rope_angles_are_exact_at_large_positions(p: int) -> None:
    """An angle computed in float32 would have an error of several thousandths here."""
    cosines, sines = rotary(2, 10_000.0, context=100_000).rotation(torch.tensor([p]))
    assert cosines[0].tolist() == pytest.approx([math.cos(p), math.cos(p)], abs=1e-7)
    assert sines[0].tolist() == pytest.approx([-math.sin(p), math.sin(p)], abs=1e-7)
    table = SinusoidalPosition(100_000, 2).add(torch.zeros(1, 1, 2), torch.tensor([p]))
    assert table.flatten().tolist() == pytest.approx([math.sin(p), math.cos(p)], abs=1e-7)


@pytest.mark.parametrize(
    "make", [lambda: rotary(4, 10_000.0), lambda: SinusoidalPosition(8, 4)], ids=["rope", "sinusoid"]
)
def test_precomputed_tables_are_not_in_the_state_dict(make) -> None:
    assert make().state_dict() == {}


@pytest.mark.parametrize(("width", "rotated"), [(8, 6), (8, 2), (5, 4)])
def test_partial_rope_rotates_the_first_features_of_each_head_and_keeps_the_others(width: int, rotated: int) -> None:
    x = torch.randn(2, 3, 7, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, RotaryPosition(7, rope_frequencies(rotated, 50.0), magnitude=1.25).rotation(torch.arange(7)))
    rates = [50.0 ** (-2 * pair / rotated) for pair in range(rotated // 2)]
    for p in range(7):
        expected = reference_parts.rotary_part(x[1, 2, p].numpy(), p, rates, 1.25)
        np.testing.assert_allclose(turned[1, 2, p].numpy(), expected, atol=1e-6)
    assert torch.equal(turned[..., rotated:], x[..., rotated:])


def test_local_layers_have_other_angles() -> None:
    plain, local = rotary(4, 100.0), rotary(4, 10.0)
    both = LocalRotaryPosition(1024, rope_frequencies(4, 100.0), local=local, local_layers=(0, 2))
    for positions in (torch.tensor([3, 5]), torch.tensor([[3, 5], [0, 9]])):
        found = both.rotations(positions, 4)
        for layer, expected in enumerate((local, plain, local, plain)):
            assert all(map(torch.equal, found[layer], expected.rotation(positions)))


def test_all_layers_share_the_tables_of_plain_rope() -> None:
    rotations = rotary(4, 100.0).rotations(torch.arange(3), 5)
    assert len(rotations) == 5 and len({id(rotation) for rotation in rotations}) == 1
