"""Baselines, compared with their formulas over dictionaries, the standard library's compressors and sacrebleu."""

import gzip
import lzma
import math
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from tinylm.jobs.pairs.job import baseline_bleu, nearest_targets
from tinylm.jobs.text.baselines import (
    ORDER,
    baseline_bits_per_byte,
    compression_bits_per_byte,
    ngram_bits_per_byte,
)
from tinylm.reporter import LogReporter
from tinylm.text.tokenizer import train_char


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


@settings(max_examples=200)
@given(st.text("abé漢", max_size=30), st.text("abcé", min_size=1, max_size=30), st.integers(0, 6))
def test_the_ngram_model_equals_its_formula_on_any_text(training: str, text: str, order: int) -> None:
    """Also if either text is shorter than the history, or the training text is empty. The default order is five."""
    expected = expected_bits(training, text, order)
    assert ngram_bits_per_byte(training, text, order) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert order != ORDER == 5 or ngram_bits_per_byte(training, text) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_compressors_are_those_of_the_standard_library_at_their_highest_level() -> None:
    for text in ("The café sat on 漢字. 👩\n" * 400, "a"):
        data = text.encode()
        assert compression_bits_per_byte(text) == {
            "gzip": 8 * len(gzip.compress(data, compresslevel=9)) / len(data),
            "xz": 8 * len(lzma.compress(data, preset=9)) / len(data),
        }


def test_a_compressor_that_makes_the_text_larger_is_no_baseline() -> None:
    """Regression: two bytes were said to have 240 bits per byte with xz, which are its header."""
    tokenizer = train_char("ab")
    for text, names in (("ab", set()), ("ab" * 15, {"gzip"}), ("ab" * 40, {"gzip", "xz"})):
        ids = np.asarray(tokenizer.encode(text))
        found = baseline_bits_per_byte(tokenizer, ids, ids, LogReporter())
        assert found.keys() - {"order-5 characters"} == names
        assert all(found[name] == compression_bits_per_byte(text)[name] < 8 for name in names)


SENTENCES = st.lists(st.lists(st.sampled_from("abcde"), max_size=5).map(" ".join), min_size=1, max_size=8)


@given(SENTENCES, SENTENCES)
def test_the_nearest_source_has_the_largest_dice_coefficient_and_is_the_first_of_equals(
    sources: list[str], training: list[str]
) -> None:
    def dice(one: str, other: str) -> Fraction:
        a, b = set(one.split()), set(other.split())
        return Fraction(2 * len(a & b), max(1, len(a) + len(b)))

    found = nearest_targets(sources, training, [f"target {index}" for index in range(len(training))])
    for source, target in zip(sources, found, strict=True):
        scores = [dice(source, other) for other in training]
        assert target == f"target {scores.index(max(scores))}"


def test_bleu_of_baselines_is_that_of_sacrebleu_on_their_targets() -> None:
    training = [("a dog runs on grass", "ein hund rennt auf gras"), ("a man eats a red apple", "ein mann isst einen")]
    scored = [("a red dog runs on grass", "ein roter hund rennt auf gras"), ("the man eats now", "der mann isst jetzt")]
    tokenizer = train_char("".join(sorted({c for pair in training + scored for side in pair for c in side})))

    def tokens(pairs: list[tuple[str, str]]) -> np.ndarray:
        sides = [tokenizer.encode(side) for pair in pairs for side in pair]
        return np.concatenate([np.append(side, tokenizer.end_of_text_id) for side in sides])

    references = [[target for _, target in scored]]
    copied = sacrebleu.corpus_bleu([source for source, _ in scored], references, force=True).score
    nearest = sacrebleu.corpus_bleu([target for _, target in training], references, force=True).score
    assert nearest > copied
    expected = {
        "source itself": pytest.approx(copied),
        "target of the nearest training source": pytest.approx(nearest),
    }
    assert baseline_bleu(tokenizer, tokens(scored), tokens(training), LogReporter()) == expected
    assert baseline_bleu(tokenizer, tokens(scored), None, LogReporter()) == {"source itself": pytest.approx(copied)}
