"""Baselines of translation: the nearest training source, and BLEU of what they give."""

from fractions import Fraction

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from tinylm.evaluation.pair_baselines import baseline_bleu, nearest_targets
from tinylm.reporter import LogReporter
from tinylm.text.tokenizer import train_char

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
    training = [
        ("a dog runs on grass", "ein hund rennt auf gras"),
        ("a man eats a red apple", "ein mann isst einen apfel"),
    ]
    scored = [("a red dog runs on grass", "ein roter hund rennt auf gras"), ("the man eats now", "der mann isst jetzt")]
    tokenizer = train_char("".join(sorted({c for pair in training + scored for side in pair for c in side})))
    end = [tokenizer.end_of_text_id]

    def tokens(pairs: list[tuple[str, str]]) -> np.ndarray:
        ids = [[*map(int, tokenizer.encode(side)), *end] for pair in pairs for side in pair]
        return np.concatenate(ids)

    found = baseline_bleu(tokenizer, tokens(scored), tokens(training), LogReporter())
    references = [[target for _, target in scored]]
    copied = sacrebleu.corpus_bleu([source for source, _ in scored], references, force=True).score
    nearest = sacrebleu.corpus_bleu([target for _, target in training], references, force=True).score
    assert found == {
        "source itself": pytest.approx(copied),
        "target of the nearest training source": pytest.approx(nearest),
    }
    assert nearest > copied
    assert baseline_bleu(tokenizer, tokens(scored), None, LogReporter()) == {"source itself": pytest.approx(copied)}
