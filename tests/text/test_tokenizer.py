"""Judge: the tokenizers library reading the file that tinylm wrote, and a plain trainer of merges."""

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

import gigatoken
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tinylm.errors import TinyLMError, UsageError
from tinylm.text import byte_pairs
from tinylm.text import tokenizer as t
from tinylm.text.corpus import rechunk
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, describe_characters, train_bpe, train_char

SAMPLE = (
    "The cat's hat, the dog's log; they'll say we've 123 and 1234 of them, don't they?\r\n\r\n"
    "  Zwölf große Boxkämpfer\t\t日本語の文章と漢字 👩‍👩‍👧 e\u0301 naïve — “quoted”…\n\n\n    indented    text\n"
) * 3

BPE = train_bpe([SAMPLE], 400)

CONTRACTED = ["'", "'s", "'S", "'ll", "'re'", "don't", "the cat", END_OF_TEXT, "<|"]
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
FIGURES = ["1", "42", "²", "½", "Ⅷ", "१२", "!", "_", "-", "$", "+", "<", ">"]
BLANKS = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x85", "\xa0", "\u2028", "\u3000"]
CONTROLS = ["\0", "\x1c", "\x1f", "\x7f", "\u180e", "\u200b", "\ufeff"]
AWKWARD = [*CONTRACTED, *LETTERS, *FIGURES, *BLANKS, *CONTROLS]
texts = st.lists(st.sampled_from(AWKWARD) | st.text(max_size=4), max_size=12).map("".join)


def library_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The saved file as anyone else would load it."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    library.encode_special_tokens = True
    return library


BPE_LIBRARY = library_of(BPE)


def library_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(library.encode(text, add_special_tokens=False).ids)


@settings(max_examples=400)
@given(texts)
@example(SAMPLE)
def test_bpe_gives_the_ids_of_its_saved_file_and_its_text_back(text: str) -> None:
    ids = BPE.encode(text).tolist()
    assert ids == library_ids(BPE_LIBRARY, text)
    assert BPE.decode(ids) == text
    assert BPE.end_of_text not in ids


def test_bpe_gives_the_ids_of_its_saved_file_around_every_character_of_the_first_planes() -> None:
    """Both libraries bring Unicode tables of their own."""
    for start in range(0, 0x20000, 0x1000):
        block = [chr(c) for c in range(start, start + 0x1000) if not 0xD800 <= c < 0xE000]
        text = "".join(f"a{c}a {c}1{c}" for c in block)
        assert BPE.encode(text).tolist() == library_ids(BPE_LIBRARY, text)


@settings(max_examples=200)
@given(texts, st.data())
def test_characters_give_the_ids_of_the_saved_file_and_the_text_back(alphabet: str, data: st.DataObject) -> None:
    alphabet = "".join(dict.fromkeys(alphabet))
    tokenizer = train_char(alphabet)
    text = "".join(data.draw(st.lists(st.sampled_from(alphabet)))) if alphabet else ""
    ids = tokenizer.encode(text).tolist()
    assert ids == [1 + alphabet.index(c) for c in text] == library_ids(library_of(tokenizer), text)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.kind, tokenizer.vocab_size) == ("char", len(alphabet) + 1)


@pytest.mark.parametrize("tokenizer", [BPE, train_char(END_OF_TEXT + "ab")], ids=["bpe", "char"])
def test_text_that_looks_like_a_special_token_stays_text(tokenizer: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == text


def test_a_million_blanks_in_a_row_are_encoded() -> None:
    text = "a" + " " * 1_000_000 + "b"
    assert BPE.decode(BPE.encode(text)) == text


def test_the_words_of_a_long_text_are_forgotten_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe([SAMPLE], 400)
    made: list[str] = []
    make = gigatoken.Tokenizer.from_json

    def count_and_make(file: str) -> gigatoken.Tokenizer:
        made.append(file)
        return make(file)

    monkeypatch.setattr(byte_pairs, "FORGET_AFTER", 100)
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", count_and_make)
    for text in ("cat " * 20, "dog " * 20, "hat " * 20, "cat"):
        assert tokenizer.encode(text).tolist() == library_ids(BPE_LIBRARY, text)
    assert len(made) == 2


def test_threads_use_gigatoken_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
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


# gigatoken checked, failing and absent.


def faulty_gigatoken(monkeypatch: pytest.MonkeyPatch, encode: Callable[[str], list[int]]) -> Tokenizer:
    class Faulty:
        def encode(self, text: str) -> np.ndarray:
            return np.array(encode(text), dtype=np.uint32)

    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda file: Faulty())
    return train_bpe([SAMPLE], 400)


def test_an_encoder_that_agrees_with_the_library_is_kept() -> None:
    tokenizer = train_bpe([SAMPLE], 400)
    assert tokenizer.check_encoder(AWKWARD)
    assert tokenizer.encoder == f"gigatoken {importlib.metadata.version('gigatoken')}"
    assert train_char("ab").check_encoder(["ab"])
    assert train_char("ab").encoder == "table"
    assert Tokenizer(words()).check_encoder([SAMPLE])
    assert Tokenizer(words()).encoder == f"tokenizers {tokenizers.__version__}"


def test_after_a_difference_the_library_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """As pyo3's PanicException: not an Exception, and known by its module."""

    __module__ = "pyo3_runtime"


@pytest.mark.parametrize("error", [Panic("index out of bounds"), ValueError("no"), ImportError("no wheel")])
def test_without_gigatoken_or_where_it_fails_the_ids_are_the_same(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(text: str) -> list[int]:
        raise error

    tokenizer = faulty_gigatoken(monkeypatch, fail)
    assert tokenizer.encode(SAMPLE).tolist() == library_ids(BPE_LIBRARY, SAMPLE)
    assert tokenizer.encoder == f"tokenizers {tokenizers.__version__}"


def test_gigatoken_can_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)  # importing it raises ImportError
    tokenizer = train_bpe([SAMPLE], 400)
    assert tokenizer.encode(SAMPLE).tolist() == library_ids(BPE_LIBRARY, SAMPLE)
    assert tokenizer.encoder == f"tokenizers {tokenizers.__version__}"
    assert tokenizer.check_encoder([SAMPLE])


def test_gigatoken_is_of_the_minor_version_that_was_checked() -> None:
    """Decisions 002 and 021: every code point was compared with the library's ids for this one."""
    assert importlib.metadata.version("gigatoken").startswith("0.10.")


# Encoding in chunks.


def chunks_of(text: str, lengths: Iterable[int]) -> list[str]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(text[start : start + length])
        start += length
    return [*pieces, text[start:]]


@settings(max_examples=400)
@given(texts, st.lists(st.integers(1, 5), max_size=30))
@example(SAMPLE, [1] * len(SAMPLE))
@example("it's 'll and 'sa 'l'", [1] * 20)
def test_bpe_in_any_chunks_gives_the_same_ids_as_in_one(text: str, lengths: list[int]) -> None:
    pieces = [p for p in rechunk(iter(chunks_of(text, lengths)), BPE.split_point, 1 << 30) if p is not None]
    assert "".join(pieces) == text
    assert [i for p in pieces for i in BPE.encode(p).tolist()] == library_ids(BPE_LIBRARY, text)


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
def test_a_chunk_of_bpe_ends_before_blanks_and_between_letters_digits_and_the_rest(text: str, end: int) -> None:
    assert BPE.split_point(text) == end


def test_a_chunk_of_characters_ends_anywhere() -> None:
    assert train_char("ab").split_point("abba") == 4


# Decoding a stream.


def streamed(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    stream = tokenizer.stream_decoder()
    return [*(stream.push(i) for i in ids), stream.finish()]


@given(texts)
def test_a_stream_of_a_text_adds_up_to_it_and_never_shows_half_a_character(text: str) -> None:
    parts = streamed(BPE, BPE.encode(text).tolist())
    assert "".join(parts) == text
    assert parts[-1] == ""
    for before, after in pairwise(parts):  # a replacement character would show here, unless the text has one
        assert ("\ufffd" in before + after) <= ("\ufffd" in text)


BYTES = train_bpe([""], 257)
BYTES_LIBRARY = library_of(BYTES)
BYTES_OF_CHARACTERS = library_ids(BYTES_LIBRARY, "é漢👩a")


@settings(max_examples=400)
@given(st.lists(st.integers(0, 256) | st.sampled_from(BYTES_OF_CHARACTERS), max_size=20))
def test_a_stream_of_any_ids_adds_up_to_the_whole(ids: list[int]) -> None:
    assert "".join(streamed(BYTES, ids)) == BYTES_LIBRARY.decode(ids) == BYTES.decode(ids)


@given(st.lists(st.integers(0, BPE.vocab_size - 1), max_size=12))
def test_a_stream_of_any_merged_ids_adds_up_to_the_whole(ids: list[int]) -> None:
    assert "".join(streamed(BPE, ids)) == BPE_LIBRARY.decode(ids)


def test_a_stream_of_characters_gives_each_at_once() -> None:
    tokenizer = train_char("añ漢")
    assert streamed(tokenizer, tokenizer.encode("漢aña").tolist()) == ["漢", "a", "ñ", "a", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    half = BYTES.encode("a漢").tolist()[:-1]
    assert streamed(BYTES, half)[:-1] == ["a", "", ""]
    assert "".join(streamed(BYTES, half)) == BYTES_LIBRARY.decode(half) != "a"


# Measuring.


@given(texts)
def test_the_characters_and_bytes_of_ids_are_those_of_their_text(text: str) -> None:
    for tokenizer in (BPE, train_char("".join(sorted(set(text)))), Tokenizer(metaspace_bpe())):
        ids = tokenizer.encode(text)
        written = tokenizer.decode(ids)
        assert tokenizer.measure(ids) == (len(written), len(written.encode()))


@given(texts)
def test_a_character_of_several_ids_is_counted_once(text: str) -> None:
    ids = BYTES.encode(text).tolist()
    assert sum(BYTES.measure([i])[0] for i in ids) == len(text)
    assert sum(BYTES.measure([i])[1] for i in ids) == len(text.encode())


def test_many_ids_are_counted_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t, "MEASURED_AT_ONCE", 7)
    assert BPE.measure(BPE.encode(SAMPLE)) == (len(SAMPLE), len(SAMPLE.encode()))


def test_a_character_is_measured_by_its_bytes_and_the_end_of_text_by_nothing() -> None:
    tokenizer = train_char("aé漢👩")
    assert [tokenizer.measure([i]) for i in range(5)] == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert BPE.measure([BPE.end_of_text]) == (0, 0)
    assert BPE.measure([]) == (0, 0)


# Characters without an id.


def test_unknown_characters_are_named_once_each_in_order() -> None:
    tokenizer = train_char("bd")
    assert tokenizer.unknown("bad 漢a\ndb") == "a 漢\n"
    with pytest.raises(UsageError, match=r"Unknown characters: 'c' \(U\+0063\)\."):
        tokenizer.encode("bcd")
    with pytest.raises(UsageError) as caught:
        tokenizer.encode("bad 漢a\ndb")
    assert "'a' (U+0061), ' ' (U+0020), '漢' (U+6F22), '\\n' (U+000A)." in str(caught.value)
    assert BPE.unknown("漢\0\U0010ffff") == ""


def test_of_many_characters_ten_are_named() -> None:
    assert describe_characters("abcdefghijkl").endswith("'j' (U+006A) and 2 more")
    assert describe_characters("abcdefghij").endswith("'j' (U+006A)")


# Learning merges.


def reference_merges(text: str, number: int) -> list[tuple[str, str]]:
    """Sennrich et al. 2016, on ASCII text; the text must have no ties."""
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


def test_merges_are_those_of_a_plain_trainer() -> None:
    rng = random.Random(3)
    text = "".join(rng.choices("etaoin shr\n'1!", [19, 15, 14, 12, 11, 10, 30, 8, 7, 6, 3, 1, 3, 2], k=30_000))
    tokenizer = train_bpe([text], 257 + 30)
    merges = reference_merges(text, 30)
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert library_of(tokenizer).get_vocab() == {
        token: i for i, token in enumerate([END_OF_TEXT, *characters, *(a + b for a, b in merges)])
    }
    assert (tokenizer.kind, tokenizer.vocab_size) == ("bpe", 287)


def test_a_small_text_makes_a_small_vocabulary_and_none_is_below_the_bytes() -> None:
    assert train_bpe(["ab"], 5000).vocab_size == 258
    assert train_bpe([SAMPLE], 257).vocab_size == 257
    with pytest.raises(UsageError, match=r"--vocab-size is 256.*257 or more"):
        train_bpe([SAMPLE], 256)


# Files of foreign make.


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
    """In UTF-8 they are what a byte's token stands for, and a merge's."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=["\n", "漢"], initial_alphabet=alphabet)
    library.train_from_iterator([SAMPLE], trainer)
    return library


def with_a_special_byte() -> tokenizers.Tokenizer:
    library = byte_level()
    library.add_special_tokens(["a"])
    return library


def with_a_special_merge() -> tokenizers.Tokenizer:
    library = byte_level()
    first, second = json.loads(library.to_str())["model"]["merges"][0]
    library.add_special_tokens([first + second])
    return library


def with_a_beginning_and_an_end() -> tokenizers.Tokenizer:
    library = with_special_tokens()
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A <pad>", special_tokens=[(name, library.token_to_id(name)) for name in ("<s>", "<pad>")]
    )
    return library


def with_a_token_that_no_merge_makes() -> tokenizers.Tokenizer:
    """Which the library never gives, though it is a word of the text."""
    layout = json.loads(byte_level().to_str())
    assert " indented" in SAMPLE and "Ġindented" not in layout["model"]["vocab"]
    layout["model"]["vocab"]["Ġindented"] = len(layout["model"]["vocab"])
    return tokenizers.Tokenizer.from_str(json.dumps(layout))


def with_merges_in_any_order() -> tokenizers.Tokenizer:
    layout = json.loads(byte_level().to_str())
    random.Random(0).shuffle(layout["model"]["merges"])
    return tokenizers.Tokenizer.from_str(json.dumps(layout))


def without_a_byte() -> tokenizers.Tokenizer:
    layout = json.loads(byte_level().to_str())
    del layout["model"]["vocab"]["Ā"]
    layout["model"]["vocab"] = {token: i for i, token in enumerate(layout["model"]["vocab"])}
    return tokenizers.Tokenizer.from_str(json.dumps(layout))


def with_an_ordinary_token() -> tokenizers.Tokenizer:
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
    """Merges in one order, their ids in the other: abc is ab, c by the list and a, bc by the lowest id."""
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


def normalised() -> tokenizers.Tokenizer:
    library = byte_level()
    library.normalizer = normalizers.NFC()
    return library


def truncating() -> tokenizers.Tokenizer:
    library = words()
    library.enable_truncation(3)
    library.enable_padding(length=8)
    return library


def words() -> tokenizers.Tokenizer:
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


def characters_with_unknown() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1, "t": 2, " ": 3}, [], unk_token="<unk>"))


def characters_with_an_ordinary_token() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(set(SAMPLE)))}, []))
    library.add_tokens([AddedToken("cat", normalized=False)])
    return library


def with_a_prefix_space() -> tokenizers.Tokenizer:
    return byte_level(add_prefix_space=True)


def without_words() -> tokenizers.Tokenizer:
    return byte_level(use_regex=False)


Make = Callable[[], tokenizers.Tokenizer]
FOREIGN: dict[Make, str] = {
    byte_level: "bpe",
    with_special_tokens: "bpe",
    with_special_tokens_like_text: "bpe",
    with_a_special_byte: "other",
    with_a_special_merge: "other",
    with_a_beginning_and_an_end: "bpe",
    with_a_token_that_no_merge_makes: "bpe",
    with_merges_in_any_order: "bpe",
    without_a_byte: "other",
    with_an_ordinary_token: "other",
    with_another_alphabet: "other",
    with_ids_out_of_order: "bpe",
    with_a_suffix: "other",
    normalised: "other",
    truncating: "other",
    words: "other",
    whitespace_bpe: "other",
    metaspace_bpe: "other",
    characters_with_unknown: "other",
    characters_with_an_ordinary_token: "other",
    with_a_prefix_space: "other",
    without_words: "other",
}
every_foreign = pytest.mark.parametrize(("make", "kind"), FOREIGN.items(), ids=[make.__name__ for make in FOREIGN])


@every_foreign
def test_a_foreign_file_gives_the_ids_that_the_library_gives(make: Make, kind: str, tmp_path: Path) -> None:
    library = make()
    library.save(str(tmp_path / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.kind == kind
    for text in (SAMPLE, "the cat, the cat's hat", "", "t", " the  cat <pad> <s>", f"ßat <unk> a{END_OF_TEXT}"):
        assert tokenizer.encode(text).tolist() == library_ids(library, text)
    assert tokenizer.end_of_text == library.get_vocab_size()
    assert tokenizer.decode([tokenizer.end_of_text]) == ""
    assert tokenizer.unknown(SAMPLE) == ""


@every_foreign
def test_a_foreign_file_gives_the_same_ids_in_chunks(make: Make, kind: str) -> None:
    tokenizer = Tokenizer(make())
    pieces = list(rechunk(iter(SAMPLE.strip()), tokenizer.split_point, 1 << 30))
    ids = [i for p in pieces if p is not None for i in tokenizer.encode(p).tolist()]
    assert ids == tokenizer.encode(SAMPLE.strip()).tolist()


def test_every_id_of_a_vocabulary_with_gaps_is_below_its_size() -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    tokenizer = Tokenizer(library)
    assert tokenizer.vocab_size > max(library_of(tokenizer).get_vocab().values())


def test_a_vocabulary_whose_gap_would_share_an_id_with_the_end_of_text_is_refused(tmp_path: Path) -> None:
    """The library gives a new token the number of tokens there are as its id."""
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 2}, unk_token="a"))
    library.save(str(tmp_path / "gap.json"))
    with pytest.raises(TinyLMError, match=r"gap\.json cannot be used: it gives one id to two tokens"):
        Tokenizer.load(tmp_path / "gap.json")


def test_what_a_foreign_tokenizer_leaves_out_is_unknown_but_for_white_space() -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "t": 1, "c": 2}, []))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(library)
    assert tokenizer.kind == "other"
    assert tokenizer.encode("a dog\n").tolist() == [0]
    assert tokenizer.unknown("a dog\n") == "dog"


# Files.


def test_a_saved_tokenizer_loads_as_the_same(tmp_path: Path) -> None:
    for tokenizer in (BPE, train_char("añ漢")):
        (tmp_path / "t.json").write_text(tokenizer.to_str(), encoding="utf-8")
        loaded = Tokenizer.load(tmp_path / "t.json")
        assert (loaded.sha256, loaded.kind, loaded.vocab_size) == (
            tokenizer.sha256,
            tokenizer.kind,
            tokenizer.vocab_size,
        )
        assert loaded.end_of_text == tokenizer.end_of_text


def test_tokenizers_differ_in_their_hashes() -> None:
    assert len({t.sha256 for t in (BPE, train_char("ab"), train_char("ba"), train_bpe([SAMPLE], 300))}) == 4


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", BPE.to_str().encode()[:-9]])
def test_a_file_that_is_no_tokenizer_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(TinyLMError, match=r"odd\.json is not a tokenizer"):
        Tokenizer.load(tmp_path / "odd.json")
    with pytest.raises(TinyLMError, match=r"Cannot read the tokenizer .*absent\.json: No such file"):
        Tokenizer.load(tmp_path / "absent.json")


def test_the_awkward_texts_are_awkward() -> None:
    categories = {unicodedata.category(c)[0] for c in "".join(AWKWARD)}
    assert categories == set("LMNPSZC")
