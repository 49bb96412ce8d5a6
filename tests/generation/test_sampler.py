import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

import tinylm.generation.torch_engine as module
from tests.reference import softmax
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.engine import mix, sample_seed
from tinylm.generation.generation_config import GenerationConfig, SamplingConfig
from tinylm.generation.torch_engine import (
    MAX_UNIFORM,
    Sampler,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repeats,
)

Row = NDArray[np.float64]

rows = st.lists(st.floats(-9, 9), min_size=2, max_size=12).map(np.array)
fractions = st.floats(0.01, 0.99)


def kept(logits: torch.Tensor) -> list[int]:
    """The tokens of the only row whose logits are finite."""
    return logits[0].isfinite().nonzero().flatten().tolist()


def sampler(
    sampling: SamplingConfig, seed: int = 0, count: int = 1, vocab_size: int = 5, prompts: list[list[int]] | None = None
) -> Sampler:
    choose = Sampler(sampling, count, vocab_size)
    choose.start(seed)
    choose.see(prompts or [])
    return choose


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
    found = penalise_repeats(torch.tensor(logits[None]), torch.tensor([seen]), penalty)
    np.testing.assert_allclose(found[0], expected, rtol=1e-12)


@given(rows, st.integers(1, 15))
def test_top_k_keeps_the_k_largest_logits_and_ties(logits: Row, k: int) -> None:
    least = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    found = keep_top_k(torch.tensor(logits[None]), k)
    assert kept(found) == [i for i, score in enumerate(logits) if score >= least]
    np.testing.assert_array_equal(found[0][kept(found)], logits[kept(found)])


@given(rows, fractions)
def test_top_p_keeps_the_smallest_set_of_most_likely_tokens_that_reaches_p(logits: Row, p: float) -> None:
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    probabilities = softmax(logits)
    cumulative = np.cumsum(probabilities[order])
    assume(np.abs(cumulative - p).min() > 1e-9)
    count = 1 + int((cumulative < p).sum())
    found = keep_top_p(torch.tensor(logits[None]), p)
    assert kept(found) == sorted(order[:count])
    assert probabilities[kept(found)].sum() >= p
    np.testing.assert_array_equal(found[0][kept(found)], logits[kept(found)])


@given(rows, fractions)
def test_min_p_keeps_tokens_at_least_p_times_as_likely_as_the_most_likely_one(logits: Row, p: float) -> None:
    probabilities = softmax(logits)
    ratio = probabilities / probabilities.max()
    assume(np.abs(ratio - p).min() > 1e-9)
    found = keep_min_p(torch.tensor(logits[None]), p)
    assert kept(found) == [i for i in range(len(logits)) if ratio[i] >= p]
    np.testing.assert_array_equal(found[0][kept(found)], logits[kept(found)])


@given(rows, st.floats(0, 1, exclude_max=True))
def test_draw_returns_the_first_token_whose_cumulative_probability_exceeds_the_number(
    logits: Row, uniform: float
) -> None:
    total = 0.0
    expected = None
    for i, probability in enumerate(softmax(logits)):
        total += probability
        assume(abs(total - uniform) > 1e-9)
        if expected is None and total > uniform:
            expected = i
    assert draw(torch.tensor(np.exp(logits[None])), torch.tensor([[uniform]])).item() == expected


def test_draw_never_chooses_an_excluded_token() -> None:
    """Whatever the total of the weights, the largest number that is drawn gives the last token that is not excluded."""
    weights = torch.tensor([[-math.inf, -math.inf, 1.0, -math.inf, 0.5, -math.inf]] * 3).exp()
    numbers = torch.tensor([[0.0], [0.3], [MAX_UNIFORM]], dtype=torch.float64)
    assert draw(weights, numbers).tolist() == [[2], [2], [4]]
    for total in np.random.default_rng(0).random(500):
        assert draw(torch.tensor([[total, 0.0]]), numbers[2:]).item() == 0
    assert 1 - 2**-51 < MAX_UNIFORM < 1


@given(st.integers(500, 1200), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_a_draw_from_a_large_vocabulary_is_that_of_exact_sums(size: int, seed: int, uniform: float) -> None:
    """Most tokens are excluded; the reference is a fraction of integers."""
    generator = np.random.default_rng(seed)
    weights = generator.integers(0, 1000, size) * (generator.random(size) < 0.02)
    assume(weights.any())
    threshold = Fraction(uniform) * int(weights.sum())
    expected = next(i for i, total in enumerate(weights.cumsum().tolist()) if total > threshold)
    assume(all(abs(total - threshold) > 1e-6 for total in weights.cumsum().tolist()))
    rows = torch.tensor(np.array([weights[::-1], weights], dtype=np.float32))
    for number, wanted in ((uniform, expected), (MAX_UNIFORM, np.flatnonzero(weights)[-1])):
        found = draw(rows, torch.tensor([[0.5], [min(number, MAX_UNIFORM)]], dtype=torch.float64))
        assert found[1].item() == wanted


def test_rows_do_not_affect_each_other() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    for keep, value in ((keep_top_k, 2), (keep_top_p, 0.8), (keep_min_p, 0.3)):
        found = keep(logits, value)
        assert found.isfinite().tolist() == [[True, True, False, False], [False, False, True, True]]


# The distribution


def chi_square(counts: Counter[int], expected: Row) -> float:
    return sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))


CRITICAL = 18.47  # of 4 degrees of freedom: exceeded by chance once in a thousand


def test_first_draws_of_many_rows_follow_the_distribution_of_their_temperature() -> None:
    """Each row has its own random stream; the first numbers of all streams must be independent, too."""
    logits, count = np.array([1.0, 0.0, -1.0, 2.0, 0.5]), 1500
    for temperature in (0.5, 2.0, 100.0):
        choose = sampler(SamplingConfig(temperature=temperature), seed=5, count=count)
        drawn = choose(torch.tensor(logits).expand(count, -1))
        assert chi_square(Counter(drawn), softmax(logits / temperature) * count) < CRITICAL, temperature


def test_the_streams_of_adjacent_rows_and_seeds_are_independent() -> None:
    """Two tokens of equal probability make four pairs of equal probability, and no correlation."""
    logits = torch.zeros(1, 2)
    for seeds in ([(7, 0), (7, 1)], [(7, 0), (8, 0)], [(0, 1), (1, 0)]):
        pairs: Counter[int] = Counter()
        streams = [sampler(SamplingConfig(), seed, row + 1, 2) for seed, row in seeds]
        for _ in range(400):
            first, second = (stream(logits.expand(len(stream._streams), -1))[-1] for stream in streams)
            pairs[2 * first + second] += 1
        assert chi_square(pairs, np.full(4, 100.0)) < 16.27  # 3 degrees of freedom, once in a thousand


# The sampler


def test_the_uniform_numbers_are_those_of_the_mersenne_twister() -> None:
    """So that the texts of a seed do not change. The reference is numpy's generator, with the lower 32 bits as seed."""
    for seed in (0, 1, 2**31, 2**32 - 1, 2**32 + 7, 2**63 - 1):
        choose = Sampler(SamplingConfig(), 2, 5)
        choose.start(seed, first_stream=3)
        for row in range(2):
            reference = np.random.RandomState(mix(sample_seed(seed, 3 + row), 0) & 0xFFFFFFFF)
            high, low = reference.randint(0, 1 << 32, (150, 2), dtype=np.uint64).T
            expected = ((high << np.uint64(32) | low) & np.uint64((1 << 53) - 1)) * 2.0**-53
            choose.start(seed, first_stream=3)
            found = []
            for _ in range(150):
                choose.prepare()
                found.append(choose._numbers[row, choose._next].item())
                choose.sample(torch.zeros(2, 5))
            np.testing.assert_array_equal(found, expected)


def drawn(seed: int, count: int, steps: int = 20) -> list[list[int]]:
    choose = sampler(SamplingConfig(temperature=1.0), seed, count)
    return np.transpose([choose(torch.zeros(count, 5)) for _ in range(steps)]).tolist()


def test_equal_seeds_give_equal_tokens_at_any_number_of_rows_and_others_do_not() -> None:
    """The global random generator of torch is not used."""
    before = torch.get_rng_state()
    assert drawn(3, 5)[:2] == drawn(3, 2) and drawn(3, 1) == drawn(3, 2)[:1]
    assert len({tuple(row) for row in drawn(3, 5)}) == 5
    streams = {tuple(drawn(seed, 1)[0]) for seed in (-1, 0, 1, 2, 2**32, 2**63, 2**64 - 2)}
    assert len(streams) == 7
    assert drawn(2**63, 2) == drawn(2**63, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_temperature_0_and_tiny_temperatures_choose_the_most_likely_token() -> None:
    logits = torch.tensor([[80.0, 90.0, -90.0, 0.0, 89.9]])
    for temperature in (0.0, 1e-300, 1e-30):
        assert sampler(SamplingConfig(temperature=temperature))(logits) == [1]


def test_a_top_p_that_rounds_to_0_keeps_the_most_likely_token() -> None:
    for p in (5e-324, 1e-300, 1e-46, 1e-38):
        assert keep_top_p(torch.tensor([[1.0, 3.0, 2.0]]), p).tolist() == [[-math.inf, 3.0, -math.inf]]


def test_a_top_p_above_the_rounded_total_of_a_row_keeps_nearly_all_of_it() -> None:
    """In fp32, the probabilities of some of these rows add up to less than p."""
    logits = torch.randn(200, 1000)
    found = keep_top_p(logits, 1 - 2**-24)
    assert (logits.softmax(dim=-1) * found.isfinite()).sum(dim=-1).min() > 1 - 1e-5


def test_penalty_temperature_top_k_top_p_and_min_p_are_applied_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    filtered: list[torch.Tensor] = []
    monkeypatch.setattr(module, "draw", lambda weights, uniform: filtered.append(weights) or torch.tensor([[0]]))
    scores = np.random.default_rng(0).normal(size=30) * 2
    sampling = SamplingConfig(temperature=0.7, top_k=12, top_p=0.9, min_p=0.2, repeat_penalty=1.3)
    sampler(sampling, vocab_size=30, prompts=[[1, 4, 7]])(torch.tensor(scores[None]))
    expected = penalise_repeats(torch.tensor(scores[None]), torch.tensor(np.isin(range(30), (1, 4, 7))[None]), 1.3)
    likely = keep_top_p(keep_top_k(expected / 0.7, 12), 0.9)[0]
    expected = keep_min_p(likely[None], 0.2)[0]
    np.testing.assert_allclose(filtered[0][0], softmax(expected.numpy()), rtol=1e-5, atol=1e-6)
    assert 1 < expected.isfinite().sum() < likely.isfinite().sum() < 12  # each of the three leaves tokens out


def test_tokens_of_prompt_and_text_are_penalised_row_by_row() -> None:
    """The second prompt is empty."""
    choose = sampler(SamplingConfig(temperature=0.0, repeat_penalty=10.0), count=2, prompts=[[0], []])
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0, -1.0]]).expand(2, -1)
    assert choose(logits) == [1, 0]
    assert choose(logits) == [2, 1]


def test_a_value_out_of_range_is_an_error_that_names_the_setting() -> None:
    table = {
        "temperature": (-0.1, 100.1, math.inf, math.nan),
        "top_k": (-1, 2**31, 2**63),
        "top_p": (0.0, 1.01, math.nan),
        "min_p": (-0.01, 1.0, math.nan),
        "repeat_penalty": (0.0, 1e-300, -1.0, 1001.0, math.inf, math.nan),
    }
    for name, values in table.items():
        for value in values:
            with pytest.raises(UsageError, match=f"^`{name}` is {value}; it must be "):
                SamplingConfig(**{name: value})


@pytest.mark.parametrize("name", ["engine", "unknown"])
@pytest.mark.parametrize("value", [None, True, 3, [], "nonsense"])
def test_a_choice_of_generation_is_one_of_its_words(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^`{name}` is .*; it must be one of: "):
        GenerationConfig(**{name: value})


def test_a_stop_sequence_may_have_any_length_and_a_nul() -> None:
    stop = ("\0", "x" * 10_000, *map(str, range(2000)))
    assert GenerationConfig(stop=stop).stop == stop


def test_logits_that_are_no_finite_numbers_are_an_error_and_excluded_tokens_are_not() -> None:
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(temperature=temperature)
        for value in (math.nan, math.inf):
            with pytest.raises(TinyLMError, match="logits are not finite numbers"):
                sampler(sampling, count=2)(torch.tensor([[0.0] * 5, [0.0, 1.0, value, 0.0, 0.0]]))
        assert sampler(sampling)(torch.tensor([[-math.inf, -math.inf, 1.0, -math.inf, -math.inf]])) == [2]


def test_rows_that_pad_the_embedding_are_never_sampled() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 50.0, 60.0]]).expand(3, -1)
    for choices in ({"temperature": 0.0}, {}, {"top_k": 2, "repeat_penalty": 1.5}):
        choose = sampler(SamplingConfig(**choices), count=3, vocab_size=3)
        assert all(max(choose(logits)) < 3 for _ in range(20))


def test_rows_are_sampled_alike_in_parts_and_at_once() -> None:
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    found = []
    for part in (1 << 20, 22, 1):
        choose = sampler(SamplingConfig(top_p=0.9, repeat_penalty=1.5), count=7, vocab_size=11)
        found.append([choose(logits, part) for _ in range(5)])
    assert found[0] == found[1] == found[2]


def test_top_p_keeps_the_same_tokens_on_devices_with_a_fast_sort() -> None:
    """CPUs sort by numpy; a tensor that says that it is elsewhere is sorted by torch."""

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0], [0.5, 0.5, 0.5, 0.5, 0.5]])
    for p in (0.1, 0.5, 0.8, 0.999):
        assert torch.equal(
            keep_top_p(logits.as_subclass(Elsewhere), p).as_subclass(torch.Tensor), keep_top_p(logits, p)
        )
