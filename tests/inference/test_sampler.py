import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import tinylm.inference.sampler as module
from tests.reference import softmax
from tinylm.errors import UsageError
from tinylm.inference.sampler import (
    Sampler,
    Sampling,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repeats,
)

Row = NDArray[np.float64]
CPU = torch.device("cpu")

rows = st.lists(st.floats(-9, 9), min_size=2, max_size=12).map(np.array)
shares = st.floats(0.01, 0.99)


def one(logits: Row) -> Tensor:
    return torch.from_numpy(logits).unsqueeze(0)


def kept(logits: Tensor) -> list[int]:
    """Which tokens of the only row are left; those must be as they were."""
    return torch.isfinite(logits[0]).nonzero().flatten().tolist()


def sampler(sampling: Sampling, seed: int = 0, count: int = 1, vocab_size: int = 5) -> Sampler:
    return Sampler(sampling, seed, count, CPU, vocab_size)


# Each function against its formula


@given(rows, st.floats(0.1, 5), st.data())
def test_a_repeat_penalty_divides_positive_logits_and_multiplies_negative_ones(
    logits: Row, penalty: float, data: st.DataObject
) -> None:
    seen = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    expected = [
        (score / penalty if score > 0 else score * penalty) if before else score
        for score, before in zip(logits, seen, strict=True)
    ]
    found = penalise_repeats(one(logits), torch.tensor([seen]), penalty)
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)


@given(rows, st.integers(1, 15))
def test_top_k_keeps_the_k_largest_and_what_ties_with_them(logits: Row, k: int) -> None:
    least = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    found = keep_top_k(one(logits), k)
    assert kept(found) == [i for i, score in enumerate(logits) if score >= least]
    np.testing.assert_array_equal(found[0][kept(found)], logits[kept(found)])


@given(rows, shares)
def test_top_p_keeps_the_fewest_likeliest_tokens_that_reach_p(logits: Row, p: float) -> None:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    probabilities = softmax(logits)
    together = np.cumsum(probabilities[order])
    assume(np.abs(together - p).min() > 1e-9)
    count = 1 + int((together < p).sum())
    found = keep_top_p(one(logits), p)
    assert kept(found) == sorted(order[:count])
    assert probabilities[kept(found)].sum() >= p
    np.testing.assert_array_equal(found[0][kept(found)], logits[kept(found)])


@given(rows, shares)
def test_min_p_keeps_tokens_at_least_p_times_as_likely_as_the_likeliest(logits: Row, p: float) -> None:
    probabilities = softmax(logits)
    ratio = probabilities / probabilities.max()
    assume(np.abs(ratio - p).min() > 1e-9)
    found = keep_min_p(one(logits), p)
    assert kept(found) == [i for i in range(len(logits)) if ratio[i] >= p]
    np.testing.assert_array_equal(found[0][kept(found)], logits[kept(found)])


@given(rows, st.floats(0, 1, exclude_max=True))
def test_draw_is_the_token_at_which_the_summed_probability_passes_the_number(logits: Row, uniform: float) -> None:
    total = 0.0
    expected = None
    for i, probability in enumerate(softmax(logits)):
        total += probability
        assume(abs(total - uniform) > 1e-9)
        if expected is None and total > uniform:
            expected = i
    assert draw(one(logits), torch.tensor([uniform], dtype=torch.float64)).item() == expected


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-53])
def test_draw_never_chooses_what_was_left_out(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, -math.inf, 1.0, -math.inf, 0.5, -math.inf]])
    assert draw(logits, torch.tensor([uniform], dtype=torch.float64)).item() in (2, 4)


def test_every_row_is_treated_by_itself() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    for keep, value in ((keep_top_k, 2), (keep_top_p, 0.8), (keep_min_p, 0.3)):
        found = keep(logits, value)
        assert torch.isfinite(found).tolist() == [[True, True, False, False], [False, False, True, True]]


# The distribution


def chi_square(counts: Counter[int], expected: Row) -> float:
    return sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))


CRITICAL = 18.47  # of 4 degrees of freedom: passed by chance once in a thousand


def test_draws_follow_the_distribution() -> None:
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5])
    count = 20_000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = draw(one(logits).expand(count, -1), uniform)
    assert chi_square(Counter(drawn.tolist()), softmax(logits) * count) < CRITICAL


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_first_draws_of_many_rows_follow_the_distribution(temperature: float) -> None:
    """Rows are streams of their own: taken across them, numbers are as random as along one."""
    logits = np.array([1.0, 0.0, -1.0, 2.0, 0.5])
    count = 3000
    drawn = sampler(Sampling(temperature=temperature), seed=5, count=count)(one(logits).expand(count, -1))
    assert chi_square(Counter(drawn.tolist()), softmax(logits / temperature) * count) < CRITICAL


def test_pairs_of_neighbouring_rows_and_seeds_are_independent() -> None:
    """Two tokens of equal probability make four pairs of equal probability, and no correlation."""
    logits = torch.zeros(1, 2)
    for seeds in ([(7, 0), (7, 1)], [(7, 0), (8, 0)], [(0, 1), (1, 0)]):
        pairs: Counter[int] = Counter()
        streams = [sampler(Sampling(), seed, row + 1, 2) for seed, row in seeds]
        for _ in range(400):
            first, second = (stream(logits.expand(len(stream._generators), -1))[-1].item() for stream in streams)
            pairs[2 * first + second] += 1
        assert chi_square(pairs, np.full(4, 100.0)) < 16.27  # 3 degrees of freedom, once in a thousand


# The sampler


def drawn(seed: int, count: int, steps: int = 20) -> list[list[int]]:
    choose = sampler(Sampling(temperature=1.0), seed, count)
    return torch.stack([choose(torch.zeros(count, 5)) for _ in range(steps)], dim=1).tolist()


def test_row_i_is_the_same_whatever_the_number_of_rows() -> None:
    assert drawn(3, 5)[:2] == drawn(3, 2)
    assert drawn(3, 1) == drawn(3, 2)[:1]
    assert len({tuple(row) for row in drawn(3, 5)}) == 5


def test_the_same_seed_repeats_and_others_do_not() -> None:
    streams = {tuple(drawn(seed, 1)[0]) for seed in (-1, 0, 1, 2, 2**32, 2**63, 2**64 - 2)}
    assert len(streams) == 7
    assert drawn(2**63, 2) == drawn(2**63, 2)


def test_it_leaves_torchs_own_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    drawn(1, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_0_takes_the_likeliest_and_a_tiny_one_does_so_without_overflow() -> None:
    logits = torch.tensor([[80.0, 90.0, -90.0, 0.0, 89.9]])
    for temperature in (0.0, 1e-300, 1e-30):
        assert sampler(Sampling(temperature=temperature))(logits).item() == 1


def test_the_highest_temperature_draws_almost_evenly() -> None:
    logits = torch.tensor([[5.0, 0.0, 0.0, 0.0, 0.0]]).expand(500, -1)
    drawn = sampler(Sampling(temperature=100.0), count=500)(logits)
    assert chi_square(Counter(drawn.tolist()), 500 * softmax(logits[0].numpy() / 100)) < CRITICAL


@pytest.mark.parametrize("p", [5e-324, 1e-300, 1e-46, 1e-38])
def test_a_top_p_that_rounds_to_0_keeps_the_likeliest_token(p: float) -> None:
    assert keep_top_p(torch.tensor([[1.0, 3.0, 2.0]]), p).tolist() == [[-math.inf, 3.0, -math.inf]]


def test_penalty_temperature_top_k_top_p_and_min_p_come_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Tensor] = []
    monkeypatch.setattr(
        module, "draw", lambda logits, uniform: shown.append(logits) or torch.zeros(1, dtype=torch.long)
    )
    scores = np.random.default_rng(0).normal(size=30) * 2
    choose = sampler(Sampling(temperature=0.7, top_k=12, top_p=0.9, min_p=0.05, repeat_penalty=1.3), vocab_size=30)
    choose.observe(0, [1, 4, 7])
    choose(one(scores))
    expected = scores.copy()
    for i in (1, 4, 7):
        expected[i] = expected[i] / 1.3 if expected[i] > 0 else expected[i] * 1.3
    expected = (expected - expected.max()) / 0.7
    expected[expected < np.sort(expected)[-12]] = -np.inf
    order = np.argsort(-expected, kind="stable")
    together = np.cumsum(softmax(expected)[order])
    expected[order[1 + int((together < 0.9).sum()) :]] = -np.inf
    probabilities = softmax(expected)
    expected[probabilities < 0.05 * probabilities.max()] = -np.inf
    np.testing.assert_allclose(shown[0][0], expected, rtol=1e-5, atol=1e-6)
    assert 1 < np.isfinite(expected).sum() < 12


def test_tokens_of_prompt_and_text_are_penalised_row_by_row() -> None:
    choose = sampler(Sampling(temperature=0.0, repeat_penalty=10.0), count=2)
    choose.observe(0, [0])
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0, -1.0]]).expand(2, -1)
    assert choose(logits).tolist() == [1, 0]
    assert choose(logits).tolist() == [2, 1]


def test_an_observed_prompt_may_be_empty() -> None:
    choose = sampler(Sampling(temperature=0.0, repeat_penalty=2.0))
    choose.observe(0, [])
    assert choose(torch.tensor([[1.0, 3.0, 2.0, 0.0, 0.0]])).item() == 1


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", (-0.1, 100.1, math.inf, math.nan)),
        ("top_k", (-1, 2**31, 2**63)),
        ("top_p", (0.0, 1.01, math.nan)),
        ("min_p", (-0.01, 1.0, math.nan)),
        ("repeat_penalty", (0.0, 1e-300, -1.0, 1001.0, math.inf, math.nan)),
    ],
)
def test_values_out_of_range_are_refused_by_their_flag(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} is {value}; it must be "):
            Sampling(**{name: value})
