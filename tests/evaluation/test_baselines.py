"""The baselines, compared with the documented formula over dictionaries and with the standard library's compressors."""

import gzip
import lzma
import math
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.evaluation.baselines import ORDER, compression_bits_per_byte, ngram_bits_per_byte

RNG = random.Random(0)
WORDS = ["the", "cat", "sat", "café", "漢字", "on", "a", "mat.", "👩", "\n"]
TRAINING = " ".join(RNG.choices(WORDS, k=400))
SCORED = " ".join(RNG.choices([*WORDS, "Zebra!"], k=80))


def expected_bits(training: str, text: str, order: int) -> float:
    """p_k(c | h) = (count(hc) + kinds(h) p_{k-1}(c | h')) / (count(h) + kinds(h)), and p_{-1} is uniform."""
    following: dict[str, Counter[str]] = defaultdict(Counter)
    for length in range(order + 1):
        for i in range(length, len(training)):
            following[training[i - length : i]][training[i]] += 1
    uniform = 1 / len(set(training) | set(text))

    def probability(character: str, history: str) -> float:
        shorter = probability(character, history[1:]) if history else uniform
        after = following.get(history)
        if not after:
            return shorter
        return (after[character] + len(after) * shorter) / (after.total() + len(after))

    bits = -sum(math.log2(probability(c, text[max(0, i - order) : i])) for i, c in enumerate(text))
    return bits / len(text.encode())


@pytest.mark.parametrize("order", [0, 1, 2, 5, 8])
def test_the_ngram_model_equals_its_formula(order: int) -> None:
    expected = expected_bits(TRAINING, SCORED, order)
    assert ngram_bits_per_byte(TRAINING, SCORED, order) == pytest.approx(expected, rel=1e-9)


def test_the_default_order_is_five() -> None:
    assert ORDER == 5
    assert ngram_bits_per_byte(TRAINING, SCORED) == pytest.approx(expected_bits(TRAINING, SCORED, 5), rel=1e-9)


@settings(max_examples=200)
@given(st.text("abé漢", max_size=30), st.text("abcé", min_size=1, max_size=30), st.integers(0, 6))
def test_the_ngram_model_equals_its_formula_on_any_text(training: str, text: str, order: int) -> None:
    """Also if either text is shorter than the history, or the training text is empty."""
    expected = expected_bits(training, text, order)
    assert ngram_bits_per_byte(training, text, order) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.text("ab漢", min_size=1, max_size=12), st.integers(0, 4))
def test_the_probabilities_of_the_next_character_add_up_to_one(training: str, order: int) -> None:
    """The probability of a character follows from the bits that it adds to a text."""
    alphabet, history = "ab漢", "ab漢"

    def bits(text: str) -> float:
        return ngram_bits_per_byte(training + alphabet, text, order) * len(text.encode())

    assert sum(2 ** (bits(history) - bits(history + c)) for c in alphabet) == pytest.approx(1)


@pytest.mark.parametrize("text", [TRAINING * 20, "a", "漢字" * 50])
def test_the_compressors_are_those_of_the_standard_library_at_their_highest_level(text: str) -> None:
    data = text.encode()
    found = compression_bits_per_byte(text)
    assert found == {
        "gzip": 8 * len(gzip.compress(data, compresslevel=9)) / len(data),
        "xz": 8 * len(lzma.compress(data, preset=9)) / len(data),
    }
