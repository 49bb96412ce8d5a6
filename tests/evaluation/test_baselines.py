"""Baselines, compared with the decoder of PPMd, known entropies, the standard library's compressors and sacrebleu."""

import gzip
import lzma
import math
import random
from fractions import Fraction

import numpy as np
import pyppmd
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shell import story
from tinylm.jobs.pairs.job import baseline_bleu, nearest_targets
from tinylm.jobs.text.baselines import baseline_bits_per_byte, compression_bits_per_byte, ppmd_bits_per_byte
from tinylm.reporter import LogReporter
from tinylm.text.tokenizer import train_char


def decoded(compressed: bytes, size: int) -> bytes:
    decoder = pyppmd.Ppmd7Decoder(6, 1 << 24)
    text = decoder.decode(compressed, size)
    while len(text) < size:  # the encoder leaves out zero bytes at the end
        text += decoder.decode(b"\0" if decoder.needs_input else b"", size - len(text))
    return text


@settings(max_examples=50)
@given(st.text("abé漢", max_size=200), st.text("abcé", min_size=1, max_size=200))
def test_the_compressed_sizes_of_ppmd_are_those_of_data_from_which_its_decoder_restores_the_texts(
    training: str, text: str
) -> None:
    """Of order 6, by the classes of the library with a memory of their own."""
    sizes = []
    for content in ((training + text).encode(), training.encode()):
        encoder = pyppmd.Ppmd7Encoder(6, 1 << 24)
        compressed = encoder.encode(content) + encoder.flush()
        assert decoded(compressed, len(content)) == content
        sizes.append(len(compressed))
    assert ppmd_bits_per_byte(training, text) == 8 * (sizes[0] - sizes[1]) / len(text.encode())


def test_ppmd_adapts_to_the_training_text_and_to_the_text_that_it_scores() -> None:
    """Uniform digits have log2(10) bits each, whatever was read before; of a repeated text, little is new."""
    rng = random.Random(0)
    digits = "".join(rng.choices("0123456789", k=20_000))
    text = "".join(rng.choices("0123456789", k=20_000))
    assert math.log2(10) < ppmd_bits_per_byte(digits, text) < 1.1 * math.log2(10)
    assert ppmd_bits_per_byte(digits + text, text) < 0.5
    assert ppmd_bits_per_byte(digits, text + text) < 0.55 * ppmd_bits_per_byte(digits, text) + 0.2
    scored = story(3000, seed=1)
    bits = [ppmd_bits_per_byte(story(size, seed=2), scored) for size in (1, 1000, 10_000, 50_000)]
    assert bits == sorted(bits, reverse=True) and bits[-1] < 0.9 * bits[0]


def test_ppmd_has_memory_for_texts_that_need_the_most() -> None:
    """A model without room begins anew: random text would then have more bits than with a gigabyte."""
    rng = random.Random(0)
    text = "".join(map(chr, rng.choices(range(32, 0xD000), k=200_000)))
    encoder = pyppmd.Ppmd7Encoder(6, 1 << 30)
    size = len(encoder.encode(text.encode())) + len(encoder.flush())
    empty = len(pyppmd.Ppmd7Encoder(6, 1 << 20).flush())
    assert ppmd_bits_per_byte("", text) == 8 * (size - empty) / len(text.encode())


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
        assert found.keys() - {"PPMd"} == names
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
    expected = {"source itself": pytest.approx(copied), "target of the nearest training source": pytest.approx(nearest)}
    assert baseline_bleu(tokenizer, tokens(scored), tokens(training), LogReporter()) == expected
    assert baseline_bleu(tokenizer, tokens(scored), None, LogReporter()) == {"source itself": pytest.approx(copied)}
