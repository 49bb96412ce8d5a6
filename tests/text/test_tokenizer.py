"""Tokenizers, compared with the `tokenizers` library on the saved file and with a plain implementation of BPE."""

import importlib.metadata
import json
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gigatoken
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.text import tokenizer as tokenizer_module
from tinylm.text import tokenizer_libraries
from tinylm.text.corpus import rechunk
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, describe_characters, train_bpe, train_char

SAMPLE = (
    "The cat's hat, the dog's log; they'll say we've 123 and 1234 of them, don't they?\r\n\r\n"
    "  Zwölf große Boxkämpfer\t\t日本語の文章と漢字 👩‍👩‍👧 e\u0301 naïve — “quoted”…\n\n\n    indented    text\n"
) * 3

BPE = train_bpe([SAMPLE], 400)

CONTRACTIONS = ["'", "'s", "'S", "'ll", "'re'", "don't", "the cat", END_OF_TEXT, "<|"]
LETTERS = ["a", "Z", "é", "e\u0301", "\u0301", "ß", "ſ", "İ", "漢字", "日本", "👩‍👩‍👧", "🇩🇪"]
OTHERS = ["\U0010ffff", "\ue000", "\u0378"]
DIGITS_AND_SYMBOLS = ["1", "42", "²", "½", "Ⅷ", "१२", "!", "_", "-", "$", "+", "<", ">"]
WHITE_SPACE = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\x85", "\xa0", "\u2028", "\u3000"]
CONTROLS = ["\0", "\x1c", "\x1f", "\x7f", "\u180e", "\u200b", "\ufeff"]
EDGE_CASES = [*CONTRACTIONS, *LETTERS, *OTHERS, *DIGITS_AND_SYMBOLS, *WHITE_SPACE, *CONTROLS]
texts = st.lists(st.sampled_from(EDGE_CASES) | st.text(max_size=4), max_size=12).map("".join)


def library_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The saved tokenizer, loaded by the `tokenizers` library alone."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    library.encode_special_tokens = True
    return library


BPE_LIBRARY = library_of(BPE)


def library_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(library.encode(text, add_special_tokens=False).ids)


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


def test_the_word_cache_of_gigatoken_is_reset_after_a_number_of_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe([SAMPLE], 400)
    created: list[str] = []
    create = gigatoken.Tokenizer.from_json
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda file: created.append(file) or create(file))
    number = tokenizer_libraries.RESET_AFTER // 4
    for text in ("cat " * 20, "hat " * 20):
        assert tokenizer.encode(text).tolist() == library_ids(BPE_LIBRARY, text)
        dog, ids = library_ids(BPE_LIBRARY, " dog"), tokenizer.encode(" dog" * number)
        assert ids.tolist() == dog * number
    assert len(created) == 2
    assert tokenizer.encode("cat").tolist() == library_ids(BPE_LIBRARY, "cat")
    assert len(created) == 3


def faulty_gigatoken(monkeypatch: pytest.MonkeyPatch, encode: Callable[[str], list[int]]) -> Tokenizer:
    faulty = SimpleNamespace(encode=lambda text: np.array(encode(text), dtype=np.uint32))
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda file: faulty)
    return train_bpe([SAMPLE], 400)


def test_only_one_thread_at_a_time_calls_gigatoken(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = threading.Lock()

    def one_at_a_time(text: str) -> list[int]:
        assert inside.acquire(blocking=False), "two threads at once"
        time.sleep(0.01)
        inside.release()
        return [len(text)]

    tokenizer = faulty_gigatoken(monkeypatch, one_at_a_time)
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(tokenizer.encode, ["a", "bc", "def", "g"]))
    assert [ids.tolist() for ids in encoded] == [[1], [2], [3], [1]]


def test_the_encoder_is_verified_gigatoken_until_it_differs_from_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of gigatoken 0.10 were compared with the library's for every code point (decisions 002 and 021)."""
    library = f"tokenizers {tokenizers.__version__}"
    encoders = (
        (train_bpe([SAMPLE], 400), f"gigatoken {importlib.metadata.version('gigatoken')}"),
        (train_char("".join(dict.fromkeys("".join(EDGE_CASES)))), "table"),
        (Tokenizer(word_level()), library),
    )
    for tokenizer, name in encoders:
        assert tokenizer.check_encoder(EDGE_CASES) and tokenizer.encoder == name

    def wrong_in_digits(text: str) -> list[int]:
        return [0] if "123" in text else library_ids(BPE_LIBRARY, text)

    tokenizer = faulty_gigatoken(monkeypatch, wrong_in_digits)
    assert tokenizer.check_encoder(["the cat", ""]) and tokenizer.encode("123").tolist() == [0]
    assert not tokenizer.check_encoder(["the cat", "1234", "the dog"])
    assert tokenizer.encode("123").tolist() == library_ids(BPE_LIBRARY, "123")
    assert (tokenizer.encoder, tokenizer.kind) == (library, "bpe") and tokenizer.check_encoder(["1234"])
    assert importlib.metadata.version("gigatoken").startswith("0.10.")


class Panic(BaseException):
    """Like pyo3's PanicException: not a subclass of Exception, recognised by its module."""

    __module__ = "pyo3_runtime"


def test_an_error_in_gigatoken_or_its_absence_falls_back_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (Panic("index out of bounds"), ValueError("no"), ImportError("no wheel"), None):

        def fail(text: str, error: BaseException | None = error) -> list[int]:
            assert error is not None
            raise error

        with monkeypatch.context() as patch:
            if error is None:
                patch.setitem(sys.modules, "gigatoken", None)  # importing it raises ImportError
            tokenizer = train_bpe([SAMPLE], 400) if error is None else faulty_gigatoken(patch, fail)
            assert tokenizer.encode(SAMPLE).tolist() == library_ids(BPE_LIBRARY, SAMPLE)
            assert tokenizer.encoder == f"tokenizers {tokenizers.__version__}"
            assert tokenizer.check_encoder([SAMPLE])


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
def test_bpe_ids_equal_those_of_the_library_and_decode_to_the_text(text: str, lengths: list[int]) -> None:
    """At once and in chunks."""
    ids = library_ids(BPE_LIBRARY, text)
    assert (BPE.encode(text).tolist(), BPE.decode(ids)) == (ids, text) and BPE.end_of_text_id not in ids
    chunks = [c for c in rechunk(iter(chunks_of(text, lengths)), BPE.safe_split_point, 1 << 30) if c is not None]
    assert "".join(chunks) == text
    assert [i for c in chunks for i in BPE.encode(c).tolist()] == ids


def test_bpe_may_be_split_before_white_space_and_after_letters_or_digits() -> None:
    ends = {"the cat": 3, "cat123": 3, "cat, dog": 4, "cat!": 3, "a  b": 1}
    ends |= dict.fromkeys(("cat", "  ", "", "!a"), 0) | {"don'": 3}
    assert {text: BPE.safe_split_point(text) for text in ends} == ends
    assert train_char("ab").safe_split_point("abba") == 4
    # The search ends in a long word, which arrives in chunks and would be searched from its start for each of them.
    searched = "x" * (tokenizer_module.SPLIT_SEARCH - 1)
    assert (BPE.safe_split_point(f"a {searched[2:]}"), BPE.safe_split_point(f"a {searched}")) == (1, 0)


@pytest.mark.parametrize("fast", [True, False])
def test_a_word_is_encoded_in_parts_of_bounded_length(fast: bool) -> None:
    """gigatoken holds the interpreter lock for 24 s on a word of 16 million letters. Other text is split at spaces."""
    tokenizer, limit = train_bpe([SAMPLE], 400), tokenizer_module.MAX_ENCODED_WORD
    assert tokenizer._gigatoken is not None
    tokenizer._gigatoken.usable = fast
    word = "theword" * (limit // 6)
    expected = [i for part in (word[:limit], word[limit:]) for i in library_ids(BPE_LIBRARY, part)]
    assert (tokenizer.encode(word).tolist(), tokenizer.decode(expected)) == (expected, word)
    text = SAMPLE * ((limit if fast else tokenizer_module.LONG_TEXT) // len(SAMPLE) + 1)
    expected = library_ids(BPE_LIBRARY, text)
    for ids in (tokenizer.encode(text), tokenizer.encode_with_special(text)[0]):
        assert ids.tolist() == expected


@given(texts)
def test_ids_have_the_character_and_byte_counts_of_their_text(text: str) -> None:
    for tokenizer in (BPE, train_char("".join(sorted(set(text)))), Tokenizer(metaspace_bpe())):
        ids = tokenizer.encode(text)
        decoded = tokenizer.decode(ids)
        assert tokenizer.decoded_size(ids) == (len(decoded), len(decoded.encode()))


@given(st.lists(texts.filter(bool), min_size=1, max_size=4))
def test_the_size_of_documents_is_that_of_their_texts_also_if_each_begins_with_a_space_of_the_tokenizer(
    documents: list[str],
) -> None:
    for tokenizer in (BPE, Tokenizer(metaspace_bpe())):
        encoded = [tokenizer.encode(document) for document in documents]
        joined = "\n".join(map(tokenizer.decode, encoded))
        ids = [i for one in encoded for i in (tokenizer.end_of_text_id, *one)][1:]
        assert tokenizer.decoded_size(ids, "\n") == (len(joined), len(joined.encode()))


def test_a_character_counts_its_utf8_bytes_and_the_end_of_text_counts_nothing() -> None:
    of_bytes = train_bpe([""], 257)
    sizes = [of_bytes.decoded_size([i]) for i in library_ids(library_of(of_bytes), "é漢👩a")]
    assert sizes == [(characters, 1) for characters in (1, 0, 1, 0, 0, 1, 0, 0, 0, 1)]
    tokenizer = train_char("aé漢👩")
    assert [tokenizer.decoded_size([i]) for i in range(5)] == [(0, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert (BPE.decoded_size([BPE.end_of_text_id]), BPE.decoded_size([])) == ((0, 0), (0, 0))
    text = SAMPLE * (tokenizer_module.COUNT_CHUNK // 100)
    assert len(ids := BPE.encode(text)) > tokenizer_module.COUNT_CHUNK
    assert BPE.decoded_size(ids) == (len(text), len(text.encode()))


def test_unknown_characters_are_listed_once_each_in_order() -> None:
    tokenizer = train_char("bd")
    assert tokenizer.unknown_characters("bad 漢a\ndb") == "a 漢\n"
    with pytest.raises(UsageError, match=r"Unknown characters: 'c' \(U\+0063\)\. The model knows"):
        tokenizer.encode("bcd")
    with pytest.raises(UsageError) as caught:
        tokenizer.encode("bad 漢a\ndb")
    assert "'a' (U+0061), ' ' (U+0020), '漢' (U+6F22), '\\n' (U+000A)." in str(caught.value)
    assert BPE.unknown_characters("漢\0\U0010ffff") == ""
    assert describe_characters("abcdefghijkl").endswith("'j' (U+006A) and 2 more")
    assert describe_characters("abcdefghij").endswith("'j' (U+006A)")
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "t": 1, "c": 2}, []))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    foreign = Tokenizer(library)  # drops characters; white space by design
    assert (foreign.encode("a dog\n").tolist(), foreign.unknown_characters("a dog\n")) == ([0], "dog")


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
    tokens = [END_OF_TEXT, *characters, *(a + b for a, b in merges)]
    assert library_of(tokenizer).get_vocab() == {token: i for i, token in enumerate(tokens)}
    assert (tokenizer.kind, tokenizer.vocab_size) == ("bpe", 287)


def test_bpe_training_cuts_words_after_128_bytes_and_gives_a_small_text_a_vocabulary_of_at_least_all_bytes() -> None:
    """It takes quadratic time in the length of a word: eleven minutes for one of two million letters."""
    for letter in ("a", "\u0e01"):
        tokenizer = train_bpe([letter * 100_000], 1000)
        lengths = [len(token) for token in library_of(tokenizer).get_vocab() if token != END_OF_TEXT]  # in bytes
        assert max(lengths) == 128 if letter == "a" else max(lengths) <= 128
        assert tokenizer.kind == "bpe"  # the file has GPT-2's pre-tokenizer
        text = letter * 1001
        assert tokenizer.encode(text).tolist() == library_ids(library_of(tokenizer), text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (train_bpe(["ab"], 5000).vocab_size, train_bpe([SAMPLE], 257).vocab_size) == (258, 257)
    with pytest.raises(UsageError, match=r"`vocab_size` is 256.*257 or more"):
        train_bpe([SAMPLE], 256)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def trained(pre_tokenizer: Any, decoder: Any, *special: str, alphabet: list[str] = ALPHABET) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(unk_token=None if alphabet else special[0]))
    library.pre_tokenizer, library.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(vocab_size=350, special_tokens=list(special), initial_alphabet=alphabet)
    library.train_from_iterator([SAMPLE], trainer)
    return library


def byte_level(*special: str, **choices: bool) -> tokenizers.Tokenizer:
    splitter = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **choices})
    return trained(splitter, decoders.ByteLevel(), *special)


def metaspace_bpe() -> tokenizers.Tokenizer:
    return trained(pre_tokenizers.Metaspace(), decoders.Metaspace(), "<unk>", alphabet=[])


def word_level() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, ",": 3}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library


def of_tokens(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    """Byte-level BPE with these tokens and merges."""
    library = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, **options))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def foreign() -> Iterator[tuple[str, str, tokenizers.Tokenizer]]:
    """The name, the kind and the library's object of each tokenizer."""
    yield "byte level", "bpe", byte_level()
    yield "a prefix space", "other", byte_level(add_prefix_space=True)
    yield "no splits at words", "other", byte_level(use_regex=False)
    yield "special tokens like a byte token and a merged token", "bpe", byte_level("\n", "漢")
    first_merge = json.loads(byte_level().to_str())["model"]["merges"][0]
    for name, kind, special in (
        ("special tokens", "bpe", ("<pad>", "<s>")),
        ("a byte as special token", "other", ("a",)),
        ("a merge as special token", "other", ("".join(first_merge),)),
    ):
        library = byte_level()
        library.add_special_tokens(list(special))
        yield name, kind, library
    library = byte_level()
    library.add_special_tokens(["<pad>", "<s>"])
    ids = [(name, library.token_to_id(name)) for name in ("<s>", "<pad>")]
    library.post_processor = processors.TemplateProcessing(single="<s> $A <pad>", special_tokens=ids)
    yield "tokens at the ends of texts", "bpe", library
    library = byte_level()
    library.add_tokens([AddedToken("e cat's h", normalized=False)])
    yield "an added token that is not special", "other", library
    library = byte_level()
    library.normalizer = normalizers.NFC()
    yield "a normalizer", "other", library
    spec = json.loads(byte_level().to_str())
    assert " indented" in SAMPLE and "Ġindented" not in spec["model"]["vocab"]
    spec["model"]["vocab"]["Ġindented"] = len(spec["model"]["vocab"])
    yield "a token that no merge produces", "bpe", tokenizers.Tokenizer.from_str(json.dumps(spec))
    spec = json.loads(byte_level().to_str())
    del spec["model"]["vocab"]["Ā"]
    spec["model"]["vocab"] = {token: i for i, token in enumerate(spec["model"]["vocab"])}
    yield "no token for a byte", "other", tokenizers.Tokenizer.from_str(json.dumps(spec))
    yield "another alphabet", "other", of_tokens([*ALPHABET, "▁"], [])
    # "the" is th, e by the order of the merges and t, he by the lowest id.
    yield "ids out of order", "bpe", of_tokens([*ALPHABET, "he", "th"], [("t", "h"), ("h", "e")])
    suffixed = [*ALPHABET, *(f"{c}</w>" for c in ALPHABET)]
    yield "a suffix", "other", of_tokens(suffixed, [], end_of_word_suffix="</w>")
    library = word_level()
    library.enable_truncation(3)
    library.enable_padding(length=8)
    yield "truncation and padding", "other", library
    yield "metaspace", "other", metaspace_bpe()
    model = models.BPE({"<unk>": 0, "a": 1, "t": 2, " ": 3}, [], unk_token="<unk>")
    yield "characters with an unknown token", "other", tokenizers.Tokenizer(model)
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(set(SAMPLE)))}, []))
    library.add_tokens([AddedToken("cat", normalized=False)])
    yield "characters with an added token that is not special", "other", library


def test_a_foreign_file_gives_the_ids_of_the_library_also_in_chunks(tmp_path: Path) -> None:
    texts = (SAMPLE, "the cat, the cat's hat", "", "t", " the  cat <pad> <s>", f"ßat <unk> a{END_OF_TEXT}")
    for name, kind, library in foreign():
        library.save(str(tmp_path / "tokenizer.json"))
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
        assert tokenizer.kind == kind, name
        for text in texts:
            assert tokenizer.encode(text).tolist() == library_ids(library, text), (name, text)
        assert tokenizer.end_of_text_id == library.get_vocab_size(), name
        assert tokenizer.decode([tokenizer.end_of_text_id]) == tokenizer.unknown_characters(SAMPLE) == "", name
        chunks = list(rechunk(iter(SAMPLE.strip()), tokenizer.safe_split_point, 1 << 30))
        ids = [i for chunk in chunks if chunk is not None for i in tokenizer.encode(chunk).tolist()]
        assert ids == tokenizer.encode(SAMPLE.strip()).tolist(), name


def test_vocab_size_exceeds_every_id_and_a_gap_that_the_end_of_text_falls_into_is_refused(tmp_path: Path) -> None:
    """The library uses the number of tokens as the id of a new token."""
    gap = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(gap).vocab_size > max(library_of(Tokenizer(gap)).get_vocab().values())
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 2}, unk_token="a")).save(str(tmp_path / "gap.json"))
    with pytest.raises(TinyLMError, match=r"Cannot use .*gap\.json as a tokenizer: two of its tokens have the same id"):
        Tokenizer.load(tmp_path / "gap.json")


def test_tokenizers_are_the_same_if_their_ids_are_whatever_their_files_say() -> None:
    """Others differ in one step: merges in another order, a token, a pre-tokenizer, the case of a text."""

    def changed(tokenizer: Tokenizer, special: SpecialTokens = SpecialTokens(), **components: Any) -> Tokenizer:  # noqa: B008
        spec = json.loads(tokenizer.to_str())
        spec["model"] |= components.pop("model", {})
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec | components)), special)

    byte_level = json.loads(BPE.to_str())["pre_tokenizer"]
    model = json.loads(BPE.to_str())["model"]
    ends = {"decoder": {**byte_level, "use_regex": False}, "post_processor": byte_level}
    same = [
        (BPE, BPE),
        (BPE, changed(BPE, SpecialTokens(eos=(END_OF_TEXT,)), **ends)),
        (BPE, changed(BPE, SpecialTokens(bos=END_OF_TEXT))),
        (train_char("añ漢"), changed(train_char("añ漢"), post_processor=byte_level)),
    ]
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated", "invert": False}
    nouns = changed(BPE, model={"vocab": {**model["vocab"], "zz": len(model["vocab"])}})
    different = [
        (BPE, changed(BPE, SpecialTokens(bos=END_OF_TEXT, add_bos=True))),
        (BPE, changed(BPE, model={"merges": model["merges"][::-1]})),
        (BPE, changed(BPE, model={"merges": model["merges"][:-1]})),
        (BPE, changed(BPE, pre_tokenizer={**byte_level, "add_prefix_space": True})),
        (BPE, changed(BPE, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level]})),
        (BPE, changed(BPE, normalizer={"type": "Lowercase"})),
        (BPE, changed(BPE, normalizer={"type": "NFC"})),
        (BPE, nouns),
        (BPE, BPE.with_special_tokens(["<|im_end|>"], [END_OF_TEXT])),
        (train_char("ab"), train_char("ba")),
        (train_char("ab"), train_char("abc")),
    ]
    for pairs, expected in ((same, True), (different, False)):
        for number, (one, other) in enumerate(pairs):
            assert one.has_ids_of(other) == other.has_ids_of(one) == expected, (expected, number)


def test_a_saved_tokenizer_loads_unchanged_and_an_error_about_another_file_names_it(tmp_path: Path) -> None:
    for tokenizer in (BPE, train_char("añ漢")):
        (tmp_path / "t.json").write_text(tokenizer.to_str(), encoding="utf-8")
        loaded = Tokenizer.load(tmp_path / "t.json")
        for name in ("sha256", "kind", "vocab_size", "end_of_text_id"):
            assert getattr(loaded, name) == getattr(tokenizer, name)
    different = (BPE, train_char("ab"), train_char("ba"), train_bpe([SAMPLE], 300))
    assert len({tokenizer.sha256 for tokenizer in different}) == 4
    file = tmp_path / "odd.json"
    with pytest.raises(TinyLMError, match=r"Cannot read the tokenizer .*odd\.json: No such file"):
        Tokenizer.load(file)
    for content in (b"", b"{}", b"\xff\xfe", BPE.to_str().encode()[:-9]):
        file.write_bytes(content)
        with pytest.raises(TinyLMError, match=r"Cannot use .*odd\.json as a tokenizer"):
            Tokenizer.load(file)
    text = train_char("abc").to_str()
    for special in (SpecialTokens(end_of_text="<x>"), SpecialTokens(bos="<x>"), SpecialTokens(eos=("<x>",))):
        with pytest.raises(TinyLMError, match="its special token '<x>' is not in the vocabulary"):
            Tokenizer.parse(text, special, file)
