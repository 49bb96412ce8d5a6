"""Tokenizers, compared with the `tokenizers` library on the saved file and with a plain implementation of BPE."""

import importlib.metadata
import json
import random
import re
import sys
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tinylm.errors import TinyLMError, UsageError
from tinylm.run_config import SpecialTokens
from tinylm.text import gigatoken_bpe
from tinylm.text import tokenizer as t
from tinylm.text import tokenizer as tokenizer_module
from tinylm.text.corpus import rechunk
from tinylm.text.decoding import stream_decoder
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, describe_characters, train_bpe, train_char

SAMPLE = (
    "The cat's hat, the dog's log; they'll say we've 123 and 1234 of them, don't they?\r\n\r\n"
    "  Zwölf große Boxkämpfer\t\t日本語の文章と漢字 👩‍👩‍👧 e\u0301 naïve — “quoted”…\n\n\n    indented    text\n"
) * 3

BPE = train_bpe([SAMPLE], 400)

CONTRACTIONS = ["'", "'s", "'S", "'ll", "'re'", "don't", "the cat", END_OF_TEXT, "<|"]
LETTERS = [
    "a",
    "Z",
    "é",
    "e\u0301",
    "\u0301",
    "ß",
    "ſ",
    "İ",
    "漢字",
    "日本",
    "👩‍👩‍👧",
    "🇩🇪",
    "\U0010ffff",
    "\ue000",
    "\u0378",
]
DIGITS_AND_SYMBOLS = ["1", "42", "²", "½", "Ⅷ", "१२", "!", "_", "-", "$", "+", "<", ">"]
WHITE_SPACE = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x85", "\xa0", "\u2028", "\u3000"]
CONTROLS = ["\0", "\x1c", "\x1f", "\x7f", "\u180e", "\u200b", "\ufeff"]
EDGE_CASES = [*CONTRACTIONS, *LETTERS, *DIGITS_AND_SYMBOLS, *WHITE_SPACE, *CONTROLS]
texts = st.lists(st.sampled_from(EDGE_CASES) | st.text(max_size=4), max_size=12).map("".join)


def library_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The saved tokenizer, loaded by the `tokenizers` library alone."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    library.encode_special_tokens = True
    return library


BPE_LIBRARY = library_of(BPE)


def library_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(library.encode(text, add_special_tokens=False).ids)


@settings(max_examples=400)
@given(texts)
@example(SAMPLE)
def test_bpe_ids_equal_those_of_the_library_and_decode_to_the_text(text: str) -> None:
    ids = BPE.encode(text).tolist()
    assert ids == library_ids(BPE_LIBRARY, text)
    assert BPE.decode(ids) == text
    assert BPE.end_of_text_id not in ids


def test_bpe_ids_equal_those_of_the_library_around_every_character_of_the_first_two_planes() -> None:
    """gigatoken and the library have separate Unicode tables."""
    for start in range(0, 0x20000, 0x1000):
        block = [chr(c) for c in range(start, start + 0x1000) if not 0xD800 <= c < 0xE000]
        text = "".join(f"a{c}a {c}1{c}" for c in block)
        assert BPE.encode(text).tolist() == library_ids(BPE_LIBRARY, text)


@settings(max_examples=200)
@given(texts, st.data())
def test_character_ids_equal_those_of_the_library_and_decode_to_the_text(alphabet: str, data: st.DataObject) -> None:
    alphabet = "".join(dict.fromkeys(alphabet))
    tokenizer = train_char(alphabet)
    text = "".join(data.draw(st.lists(st.sampled_from(alphabet)))) if alphabet else ""
    ids = tokenizer.encode(text).tolist()
    assert ids == [1 + alphabet.index(c) for c in text] == library_ids(library_of(tokenizer), text)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.kind, tokenizer.vocab_size) == ("char", len(alphabet) + 1)


@pytest.mark.parametrize("tokenizer", [BPE, train_char(END_OF_TEXT + "ab")], ids=["bpe", "char"])
def test_text_that_looks_like_a_special_token_is_encoded_as_text(tokenizer: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.end_of_text_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end_of_text_id]) == text


def test_a_million_spaces_in_a_row_are_encoded() -> None:
    text = "a" + " " * 1_000_000 + "b"
    assert BPE.decode(BPE.encode(text)) == text


def test_the_word_cache_of_gigatoken_is_reset_after_a_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe([SAMPLE], 400)
    created: list[str] = []
    create = gigatoken.Tokenizer.from_json

    def create_and_count(file: str) -> gigatoken.Tokenizer:
        created.append(file)
        return create(file)

    monkeypatch.setattr(gigatoken_bpe, "RESET_AFTER", 100)
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", create_and_count)
    for text in ("cat " * 20, "dog " * 20, "hat " * 20, "cat"):
        assert tokenizer.encode(text).tolist() == library_ids(BPE_LIBRARY, text)
    assert len(created) == 2


def test_only_one_thread_at_a_time_calls_gigatoken(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = threading.Lock()

    class OneAtATime:
        def encode(self, text: str) -> np.ndarray:
            assert inside.acquire(blocking=False), "two threads at once"
            time.sleep(0.01)
            inside.release()
            return np.array([len(text)], dtype=np.uint32)

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda file: OneAtATime())
    tokenizer = train_bpe([SAMPLE], 400)
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(tokenizer.encode, ["a", "bc", "def", "g"]))
    assert [ids.tolist() for ids in encoded] == [[1], [2], [3], [1]]


# Fallbacks when gigatoken gives other ids, fails or is absent.


def faulty_gigatoken(monkeypatch: pytest.MonkeyPatch, encode: Callable[[str], list[int]]) -> Tokenizer:
    class Faulty:
        def encode(self, text: str) -> np.ndarray:
            return np.array(encode(text), dtype=np.uint32)

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda file: Faulty())
    return train_bpe([SAMPLE], 400)


def test_an_encoder_with_the_ids_of_the_library_is_kept() -> None:
    tokenizer = train_bpe([SAMPLE], 400)
    assert tokenizer.check_encoder(EDGE_CASES)
    assert tokenizer.encoder == f"gigatoken {importlib.metadata.version('gigatoken')}"
    assert train_char("ab").check_encoder(["ab"])
    assert train_char("ab").encoder == "table"
    assert Tokenizer(word_level()).check_encoder([SAMPLE])
    assert Tokenizer(word_level()).encoder == f"tokenizers {tokenizers.__version__}"


def test_after_a_difference_from_the_library_the_library_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_in_digits(text: str) -> list[int]:
        return [0] if "123" in text else library_ids(BPE_LIBRARY, text)

    tokenizer = faulty_gigatoken(monkeypatch, wrong_in_digits)
    assert tokenizer.check_encoder(["the cat", ""])
    assert tokenizer.encode("123").tolist() == [0]
    assert not tokenizer.check_encoder(["the cat", "1234", "the dog"])
    assert tokenizer.encode("123").tolist() == library_ids(BPE_LIBRARY, "123")
    assert (tokenizer.encoder, tokenizer.kind) == (f"tokenizers {tokenizers.__version__}", "bpe")
    assert tokenizer.check_encoder(["1234"])


class Panic(BaseException):
    """Like pyo3's PanicException: not a subclass of Exception, recognised by its module."""

    __module__ = "pyo3_runtime"


@pytest.mark.parametrize("error", [Panic("index out of bounds"), ValueError("no"), ImportError("no wheel")])
def test_an_error_in_gigatoken_falls_back_to_the_library(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> list[int]:
        raise error

    tokenizer = faulty_gigatoken(monkeypatch, fail)
    assert tokenizer.encode(SAMPLE).tolist() == library_ids(BPE_LIBRARY, SAMPLE)
    assert tokenizer.encoder == f"tokenizers {tokenizers.__version__}"


def test_without_gigatoken_the_library_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)  # importing it raises ImportError
    tokenizer = train_bpe([SAMPLE], 400)
    assert tokenizer.encode(SAMPLE).tolist() == library_ids(BPE_LIBRARY, SAMPLE)
    assert tokenizer.encoder == f"tokenizers {tokenizers.__version__}"
    assert tokenizer.check_encoder([SAMPLE])


def test_the_installed_gigatoken_has_the_verified_minor_version() -> None:
    """Its ids were compared with the library's for every code point (decisions 002 and 021)."""
    assert importlib.metadata.version("gigatoken").startswith("0.10.")


# Encoding in chunks.


def chunks_of(text: str, lengths: Iterable[int]) -> list[str]:
    chunks, start = [], 0
    for length in lengths:
        chunks.append(text[start : start + length])
        start += length
    return [*chunks, text[start:]]


@settings(max_examples=400)
@given(texts, st.lists(st.integers(1, 5), max_size=30))
@example(SAMPLE, [1] * len(SAMPLE))
@example("it's 'll and 'sa 'l'", [1] * 20)
def test_bpe_ids_do_not_depend_on_the_chunks(text: str, lengths: list[int]) -> None:
    chunks = [c for c in rechunk(iter(chunks_of(text, lengths)), BPE.safe_split_point, 1 << 30) if c is not None]
    assert "".join(chunks) == text
    assert [i for c in chunks for i in BPE.encode(c).tolist()] == library_ids(BPE_LIBRARY, text)


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("the cat", 3),
        ("cat123", 3),
        ("cat, dog", 4),
        ("cat!", 3),
        ("a  b", 1),
        ("cat", 0),
        ("  ", 0),
        ("", 0),
        ("don'", 3),
        ("!a", 0),
    ],
)
def test_bpe_may_be_split_before_white_space_and_after_letters_or_digits(text: str, end: int) -> None:
    assert BPE.safe_split_point(text) == end


@pytest.mark.parametrize("fast", [True, False])
def test_a_word_is_encoded_in_parts_of_bounded_length(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gigatoken holds the interpreter lock for 24 s on a word of 16 million letters. Other text is split at spaces."""
    monkeypatch.setattr(tokenizer_module, "MAX_ENCODED_WORD", 100)
    tokenizer = train_bpe([SAMPLE], 400)
    if not fast:
        monkeypatch.setattr(tokenizer._gigatoken, "encode", lambda text: None)
    word = "theword" * 50
    parts = [word[start : start + 100] for start in range(0, len(word), 100)]
    expected = [i for part in parts for i in library_ids(library_of(tokenizer), part)]
    assert tokenizer.encode(word).tolist() == expected
    assert tokenizer.decode(expected) == word
    assert tokenizer.encode(SAMPLE).tolist() == library_ids(library_of(tokenizer), SAMPLE)


def test_the_search_for_a_split_point_ends_in_a_long_word() -> None:
    """Otherwise a text of one word, which arrives in chunks, is searched from its start for each of them."""
    searched = "x" * (tokenizer_module.SPLIT_SEARCH - 1)
    assert BPE.safe_split_point(f"a {searched[2:]}") == 1
    assert BPE.safe_split_point(f"a {searched}") == 0


def test_a_long_text_is_encoded_without_the_interpreter_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = library_ids(BPE_LIBRARY, SAMPLE)
    monkeypatch.setattr(tokenizer_module, "LONG_TEXT", 10)
    assert BPE._encode_by_library(SAMPLE).tolist() == expected
    ids, _ = BPE.encode_with_special(SAMPLE)
    assert ids.tolist() == expected


def test_characters_may_be_split_anywhere() -> None:
    assert train_char("ab").safe_split_point("abba") == 4


# Streaming decoder.


def streamed(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    stream = stream_decoder(tokenizer)
    return [*(stream.decode([i]) for i in ids), stream.finish()]


@given(texts)
def test_streamed_text_equals_the_text_without_incomplete_characters(text: str) -> None:
    parts = streamed(BPE, BPE.encode(text).tolist())
    assert "".join(parts) == text
    assert parts[-1] == ""
    for before, after in pairwise(parts):  # an incomplete character would decode to U+FFFD
        assert ("\ufffd" in before + after) <= ("\ufffd" in text)


BYTE_TOKENIZER = train_bpe([""], 257)
BYTE_LIBRARY = library_of(BYTE_TOKENIZER)
MULTIBYTE_IDS = library_ids(BYTE_LIBRARY, "é漢👩a")


@settings(max_examples=400)
@given(st.lists(st.integers(0, 256) | st.sampled_from(MULTIBYTE_IDS), max_size=20))
def test_streaming_any_byte_ids_equals_decoding_them_at_once(ids: list[int]) -> None:
    assert "".join(streamed(BYTE_TOKENIZER, ids)) == BYTE_LIBRARY.decode(ids) == BYTE_TOKENIZER.decode(ids)


def test_streaming_a_character_tokenizer_returns_each_character_at_once() -> None:
    tokenizer = train_char("añ漢")
    assert streamed(tokenizer, tokenizer.encode("漢aña").tolist()) == ["漢", "a", "ñ", "a", ""]


def test_an_incomplete_last_character_is_returned_at_the_end() -> None:
    half = BYTE_TOKENIZER.encode("a漢").tolist()[:-1]
    assert streamed(BYTE_TOKENIZER, half)[:-1] == ["a", "", ""]
    assert "".join(streamed(BYTE_TOKENIZER, half)) == BYTE_LIBRARY.decode(half) != "a"


# Counting characters and bytes.


@given(texts)
def test_ids_have_the_character_and_byte_counts_of_their_text(text: str) -> None:
    for tokenizer in (BPE, train_char("".join(sorted(set(text)))), Tokenizer(metaspace_bpe())):
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
        assert tokenizer.decoded_size(ids) == (len(decoded), len(decoded.encode()))


@given(texts)
def test_a_character_of_several_ids_is_counted_once(text: str) -> None:
    ids = BYTE_TOKENIZER.encode(text).tolist()
    assert sum(BYTE_TOKENIZER.decoded_size([i])[0] for i in ids) == len(text)
    assert sum(BYTE_TOKENIZER.decoded_size([i])[1] for i in ids) == len(text.encode())


def test_many_ids_are_counted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t, "COUNT_CHUNK", 7)
    assert BPE.decoded_size(BPE.encode(SAMPLE)) == (len(SAMPLE), len(SAMPLE.encode()))


def test_a_character_counts_its_utf8_bytes_and_the_end_of_text_counts_nothing() -> None:
    tokenizer = train_char("aé漢👩")
    assert [tokenizer.decoded_size([i]) for i in range(5)] == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert BPE.decoded_size([BPE.end_of_text_id]) == (0, 0)
    assert BPE.decoded_size([]) == (0, 0)


# Characters without an id.


def test_unknown_characters_are_listed_once_each_in_order() -> None:
    tokenizer = train_char("bd")
    assert tokenizer.unknown_characters("bad 漢a\ndb") == "a 漢\n"
    with pytest.raises(UsageError, match=r"Unknown characters: 'c' \(U\+0063\)\."):
        tokenizer.encode("bcd")
    with pytest.raises(UsageError) as caught:
        tokenizer.encode("bad 漢a\ndb")
    assert "'a' (U+0061), ' ' (U+0020), '漢' (U+6F22), '\\n' (U+000A)." in str(caught.value)
    assert BPE.unknown_characters("漢\0\U0010ffff") == ""


def test_ten_of_many_characters_are_listed() -> None:
    assert describe_characters("abcdefghijkl").endswith("'j' (U+006A) and 2 more")
    assert describe_characters("abcdefghij").endswith("'j' (U+006A)")


# BPE training.


def reference_merges(text: str, number: int) -> list[tuple[str, str]]:
    """The algorithm of Sennrich et al. 2016 on ASCII text. The text must have no ties."""
    words = Counter(re.findall(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", text))
    split = {word: list(word.replace(" ", "Ġ").replace("\n", "Ċ")) for word in words}
    merges: list[tuple[str, str]] = []
    for _ in range(number):
        counts: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(split[word]):
                counts[pair] += times
        (best, most), (_, second) = counts.most_common(2)
        assert most > second, "a tie: choose another text"
        merges.append(best)
        for symbols in split.values():
            i = 0
            while i < len(symbols) - 1:
                if (symbols[i], symbols[i + 1]) == best:
                    symbols[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def test_merges_equal_those_of_a_plain_implementation() -> None:
    rng = random.Random(3)
    text = "".join(rng.choices("etaoin shr\n'1!", [19, 15, 14, 12, 11, 10, 30, 8, 7, 6, 3, 1, 3, 2], k=30_000))
    tokenizer = train_bpe([text], 257 + 30)
    merges = reference_merges(text, 30)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert library_of(tokenizer).get_vocab() == {
        token: i for i, token in enumerate([END_OF_TEXT, *characters, *(a + b for a, b in merges)])
    }
    assert (tokenizer.kind, tokenizer.vocab_size) == ("bpe", 287)


@pytest.mark.parametrize("letter", ["a", "\u0e01"])
def test_the_trainer_cuts_words_after_128_bytes(letter: str) -> None:
    """It takes quadratic time in the length of a word: eleven minutes for one of two million letters."""
    tokenizer = train_bpe([letter * 100_000], 1000)
    lengths = [len(token) for token in library_of(tokenizer).get_vocab() if token != END_OF_TEXT]  # in bytes
    assert max(lengths) == 128 if letter == "a" else max(lengths) <= 128
    assert tokenizer.kind == "bpe"  # the file has GPT-2's pre-tokenizer
    text = letter * 1001
    assert tokenizer.encode(text).tolist() == library_ids(library_of(tokenizer), text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_small_text_gives_a_small_vocabulary_of_at_least_all_bytes() -> None:
    assert train_bpe(["ab"], 5000).vocab_size == 258
    assert train_bpe([SAMPLE], 257).vocab_size == 257
    with pytest.raises(UsageError, match=r"`vocab_size` is 256.*257 or more"):
        train_bpe([SAMPLE], 256)


# Files that tinylm did not create.


def byte_level(**choices: bool) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **choices})
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library.train_from_iterator([SAMPLE], trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet))
    return library


def with_special_tokens() -> tokenizers.Tokenizer:
    library = byte_level()
    library.add_special_tokens(["<pad>", "<s>"])
    return library


def with_special_tokens_like_text() -> tokenizers.Tokenizer:
    """Their contents are texts that a byte token and a merged token stand for."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=["\n", "漢"], initial_alphabet=alphabet)
    library.train_from_iterator([SAMPLE], trainer)
    return library


def with_a_byte_as_special_token() -> tokenizers.Tokenizer:
    library = byte_level()
    library.add_special_tokens(["a"])
    return library


def with_a_merge_as_special_token() -> tokenizers.Tokenizer:
    library = byte_level()
    first, second = json.loads(library.to_str())["model"]["merges"][0]
    library.add_special_tokens([first + second])
    return library


def with_bos_and_eos() -> tokenizers.Tokenizer:
    library = with_special_tokens()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A <pad>", special_tokens=[(name, library.token_to_id(name)) for name in ("<s>", "<pad>")]
    )
    return library


def with_a_token_that_no_merge_produces() -> tokenizers.Tokenizer:
    """No merge produces the added token, so the library never gives its id, although it is a word of the text."""
    spec = json.loads(byte_level().to_str())
    assert " indented" in SAMPLE and "Ġindented" not in spec["model"]["vocab"]
    spec["model"]["vocab"]["Ġindented"] = len(spec["model"]["vocab"])
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def with_merges_in_any_order() -> tokenizers.Tokenizer:
    spec = json.loads(byte_level().to_str())
    random.Random(0).shuffle(spec["model"]["merges"])
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def without_a_byte() -> tokenizers.Tokenizer:
    spec = json.loads(byte_level().to_str())
    del spec["model"]["vocab"]["Ā"]
    spec["model"]["vocab"] = {token: i for i, token in enumerate(spec["model"]["vocab"])}
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def with_an_added_token_that_is_not_special() -> tokenizers.Tokenizer:
    library = byte_level()
    library.add_tokens([AddedToken("e cat's h", normalized=False)])
    return library


def with_another_alphabet() -> tokenizers.Tokenizer:
    characters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁"]
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def with_ids_out_of_order() -> tokenizers.Tokenizer:
    """The order of the merges differs from that of their ids: "the" is th, e by order and t, he by lowest id."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*characters, "he", "th"])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [("t", "h"), ("h", "e")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def with_a_suffix() -> tokenizers.Tokenizer:
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*characters, *(f"{c}</w>" for c in characters)])}
    library = tokenizers.Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library


def with_a_normalizer() -> tokenizers.Tokenizer:
    library = byte_level()
    library.normalizer = normalizers.NFC()
    return library


def with_truncation_and_padding() -> tokenizers.Tokenizer:
    library = word_level()
    library.enable_truncation(3)
    library.enable_padding(length=8)
    return library


def word_level() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, ",": 3}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library


def whitespace_bpe() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.train_from_iterator([SAMPLE], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    return library


def metaspace_bpe() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.train_from_iterator([SAMPLE], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"]))
    return library


def characters_with_unk_token() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1, "t": 2, " ": 3}, [], unk_token="<unk>"))


def characters_with_an_added_token_that_is_not_special() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(set(SAMPLE)))}, []))
    library.add_tokens([AddedToken("cat", normalized=False)])
    return library


def with_a_prefix_space() -> tokenizers.Tokenizer:
    return byte_level(add_prefix_space=True)


def without_splitting_at_words() -> tokenizers.Tokenizer:
    return byte_level(use_regex=False)


Make = Callable[[], tokenizers.Tokenizer]
FOREIGN: dict[Make, str] = {
    byte_level: "bpe",
    with_special_tokens: "bpe",
    with_special_tokens_like_text: "bpe",
    with_a_byte_as_special_token: "other",
    with_a_merge_as_special_token: "other",
    with_bos_and_eos: "bpe",
    with_a_token_that_no_merge_produces: "bpe",
    with_merges_in_any_order: "bpe",
    without_a_byte: "other",
    with_an_added_token_that_is_not_special: "other",
    with_another_alphabet: "other",
    with_ids_out_of_order: "bpe",
    with_a_suffix: "other",
    with_a_normalizer: "other",
    with_truncation_and_padding: "other",
    word_level: "other",
    whitespace_bpe: "other",
    metaspace_bpe: "other",
    characters_with_unk_token: "other",
    characters_with_an_added_token_that_is_not_special: "other",
    with_a_prefix_space: "other",
    without_splitting_at_words: "other",
}
every_foreign = pytest.mark.parametrize(("make", "kind"), FOREIGN.items(), ids=[make.__name__ for make in FOREIGN])


@every_foreign
def test_a_foreign_file_gives_the_ids_of_the_library(make: Make, kind: str, tmp_path: Path) -> None:
    library = make()
    library.save(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.kind == kind
    for text in (SAMPLE, "the cat, the cat's hat", "", "t", " the  cat <pad> <s>", f"ßat <unk> a{END_OF_TEXT}"):
        assert tokenizer.encode(text).tolist() == library_ids(library, text)
    assert tokenizer.end_of_text_id == library.get_vocab_size()
    assert tokenizer.decode([tokenizer.end_of_text_id]) == ""
    assert tokenizer.unknown_characters(SAMPLE) == ""


@every_foreign
def test_a_foreign_file_gives_the_same_ids_in_chunks(make: Make, kind: str) -> None:
    tokenizer = Tokenizer(make())
    chunks = list(rechunk(iter(SAMPLE.strip()), tokenizer.safe_split_point, 1 << 30))
    ids = [i for chunk in chunks if chunk is not None for i in tokenizer.encode(chunk).tolist()]
    assert ids == tokenizer.encode(SAMPLE.strip()).tolist()


def test_vocab_size_exceeds_every_id_of_a_vocabulary_with_gaps() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    tokenizer = Tokenizer(library)
    assert tokenizer.vocab_size > max(library_of(tokenizer).get_vocab().values())


def test_a_vocabulary_with_a_gap_in_which_the_end_of_text_gets_a_used_id_is_refused(tmp_path: Path) -> None:
    """The library uses the number of tokens as the id of a new token."""
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 2}, unk_token="a"))
    library.save(str(tmp_path / "gap.json"))
    with pytest.raises(TinyLMError, match=r"Cannot use .*gap\.json as a tokenizer: two of its tokens have the same id"):
        Tokenizer.load(tmp_path / "gap.json")


def test_characters_that_a_foreign_tokenizer_drops_are_unknown_except_white_space() -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "t": 1, "c": 2}, []))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(library)
    assert tokenizer.kind == "other"
    assert tokenizer.encode("a dog\n").tolist() == [0]
    assert tokenizer.unknown_characters("a dog\n") == "dog"


# Files.


def test_a_saved_tokenizer_loads_unchanged(tmp_path: Path) -> None:
    for tokenizer in (BPE, train_char("añ漢")):
        (tmp_path / "t.json").write_text(tokenizer.to_str(), encoding="utf-8")
        loaded = Tokenizer.load(tmp_path / "t.json")
        assert (loaded.sha256, loaded.kind, loaded.vocab_size) == (
            tokenizer.sha256,
            tokenizer.kind,
            tokenizer.vocab_size,
        )
        assert loaded.end_of_text_id == tokenizer.end_of_text_id


def test_different_tokenizers_have_different_hashes() -> None:
    assert len({t.sha256 for t in (BPE, train_char("ab"), train_char("ba"), train_bpe([SAMPLE], 300))}) == 4


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", BPE.to_str().encode()[:-9]])
def test_an_error_about_a_file_that_is_not_a_tokenizer_names_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(TinyLMError, match=r"Cannot use .*odd\.json as a tokenizer"):
        Tokenizer.load(tmp_path / "odd.json")
    with pytest.raises(TinyLMError, match=r"Cannot read the tokenizer .*absent\.json: No such file"):
        Tokenizer.load(tmp_path / "absent.json")


def test_the_edge_cases_contain_every_category_of_characters() -> None:
    categories = {unicodedata.category(c)[0] for c in "".join(EDGE_CASES)}
    assert categories == set("LMNPSZC")


@pytest.mark.parametrize("special", [{"end_of_text": "<end>"}, {"bos": "<start>"}, {"eos": ("<stop>",)}])
def test_a_special_token_that_is_not_in_the_vocabulary_is_an_error(special: dict[str, Any]) -> None:
    text = train_char("abc").to_str()
    with pytest.raises(TinyLMError, match=r"its special token '<\w+>' is not in the vocabulary"):
        Tokenizer.parse(text, SpecialTokens(**special), Path("tokenizer.json"))
