"""Tokenizers of GGUF files, compared with llama.cpp's two algorithms (src/llama-vocab.cpp), reimplemented here."""

import itertools
import json
import math
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.gguf_files import BOS, LETTERS, tokenizer_metadata, write_file
from tests.formats.refusals import assert_refused
from tests.published import PATTERNS as PUBLISHED
from tinylm.config.run import SpecialTokens
from tinylm.formats.gguf_file import parse_header
from tinylm.formats.gguf_tokenizer import NO_TOKEN, PRE_TOKENIZERS, ReadTokenizer, read_tokenizer, write_tokenizer
from tinylm.text.tokenizer import train_bpe, train_char
from tinylm.text.tokenizer_file import validate_tokenizer

# Regular expressions by the names of pre-tokenizers.
PATTERNS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), (PUBLISHED["gpt2"],)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (PUBLISHED["llama3"],)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (PUBLISHED["qwen2"],)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (r"\p{N}", PUBLISHED["gpt2"])),
    "tekken": (PUBLISHED["tekken"],),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", PUBLISHED["gpt2"], r"\p{N}+", "[0-9][0-9][0-9]"),
}
WITH_NFC = ("qwen2", "olmo", "mpt")
IGNORES_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")

TEXTS = st.text(
    st.sampled_from("aehlotw THEL 'sSdmreLl 0123456789½٣ \n\r\t.,!?$+<=>^~|_-/()éßñ中文字符日本👍🏽\u200d\u00a0\u3000"),
    max_size=40,
)
EXAMPLES = (
    "hello the world",
    "HELLO 'S don't we'LL I've",
    "  two   spaces \n\n next\r\n\tline  ",
    "12345 3.14 ½ ٣٤٥ x2",
    "中文字符，日本語。 emoji 👍🏽🇫🇷",
    "<|end|><|begin|>",
    "a_b-c/d (e) $5+3=8 ~|^<>",
    "\u00a0\u3000 é ñ",
    "!!!\n\nok//\n",
)


def split(text: str, patterns: Sequence[str]) -> list[str]:
    """llama.cpp's unicode_regex_split: each pattern cuts the pieces of the one before into matches and the rest."""
    pieces = [text]
    for pattern in patterns:
        cut: list[str] = []
        for piece in pieces:
            position = 0
            for match in regex.finditer(pattern, piece):
                cut += [piece[position : match.start()], match.group()]
                position = match.end()
            cut.append(piece[position:])
        pieces = [piece for piece in cut if piece]
    return pieces


def byte_level_ids(text: str, metadata: dict[str, Any]) -> list[int]:
    """llama.cpp's llm_tokenizer_bpe_session, without special tokens."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    pre = metadata["tokenizer.ggml.pre"]
    found: list[int] = []
    for piece in split(text, PATTERNS[pre]):
        word = "".join(LETTERS[byte] for byte in piece.encode())
        if pre in IGNORES_MERGES and word in ids:
            found.append(ids[word])
            continue
        symbols = list(word)
        while pairs := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]:
            _, i = min(pairs)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        for symbol in symbols:
            found += [ids[symbol]] if symbol in ids else [ids[letter] for letter in symbol if letter in ids]
    return found


def encoder(text: str) -> Callable[[str], list[int]]:
    library = tokenizers.Tokenizer.from_str(text)
    library.encode_special_tokens = True
    return lambda value: library.encode(value, add_special_tokens=False).ids


def read(tmp_path: Path, values: dict[str, Any], family: str = "llama") -> ReadTokenizer:
    """The tokenizer in metadata that the package gguf writes."""
    write_file(tmp_path / "tokenizer.gguf", "none", values, {})
    return read_tokenizer(parse_header((tmp_path / "tokenizer.gguf").read_bytes()).metadata, family, 1 << 16)


# Byte-level BPE.


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_of_byte_level_tokenizers_equal_those_of_llama_cpp_and_are_written_back(pre: str, tmp_path: Path) -> None:
    values = bpe_metadata(pre)
    found = read(tmp_path, values)
    encode = encoder(found.text)
    for text in EXAMPLES:
        assert encode(text) == byte_level_ids(text, values), text

    @given(TEXTS)
    @settings(max_examples=40)
    def compare(text: str) -> None:
        if pre in WITH_NFC:  # which llama.cpp leaves out
            text = unicodedata.normalize("NFC", text)
        assert encode(text) == byte_level_ids(text, values)

    compare()
    written = write_tokenizer(json.loads(found.text), found.special, "{{ x }}", len(values["tokenizer.ggml.tokens"]))
    assert PATTERNS[written["tokenizer.ggml.pre"]] == PATTERNS[pre]
    for name in ("tokens", "token_type", "merges", "eos_token_id", "bos_token_id"):
        assert written[f"tokenizer.ggml.{name}"] == values[f"tokenizer.ggml.{name}"]
    assert written["tokenizer.chat_template"] == "{{ x }}"


def bpe_metadata(pre: str) -> dict[str, Any]:
    """A byte-level tokenizer with a few merges that cross the boundaries of all pre-tokenizers."""
    pairs = "h e,l l,he ll,hell o,Ġ t,Ġt h,Ġth e,1 2,12 3,123 4,' s,Ġ Ġ,Ċ Ċ,! !,a _,. Ċ,L L,' L,'L L,Ġ 1,/ /,// Ċ"
    pairs = [*pairs.split(","), "ä ¸", "ä¸ Ń", "ð Ł", "ðŁ ĳ", "ðŁĳ į"]
    tokens = [*LETTERS.values(), *dict.fromkeys(pair.replace(" ", "") for pair in pairs)]
    if pre in IGNORES_MERGES:
        tokens += ["world", "Ġspaces"]  # which no merges produce
    specials = ["<|end|>", "<|begin|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *specials],
        "tokenizer.ggml.token_type": [*[1] * len(tokens), 3, 3],
        "tokenizer.ggml.merges": pairs,
        "tokenizer.ggml.eos_token_id": len(tokens),
        "tokenizer.ggml.bos_token_id": len(tokens) + 1,
    }


def test_the_key_decides_about_the_bos_token_and_without_it_the_kind_of_tokenizer(tmp_path: Path) -> None:
    adds = {"gpt-2": False, "llama-bpe": True, "tekken": True, "qwen2": False, "smaug-bpe": False}
    assert {pre: read(tmp_path, bpe_metadata(pre)).special.add_bos for pre in adds} == adds
    assert read(tmp_path, sentencepiece_metadata()).special.add_bos
    for values in (bpe_metadata("llama-bpe"), sentencepiece_metadata()):
        for value in (False, True):
            assert read(tmp_path, {**values, "tokenizer.ggml.add_bos_token": value}).special.add_bos is value


def test_without_its_name_the_pre_tokenizer_is_known_for_some_families_only(tmp_path: Path) -> None:
    values = bpe_metadata("qwen2")
    del values["tokenizer.ggml.pre"]
    text = "it is 12345"
    assert encoder(read(tmp_path, values, "qwen3").text)(text) == byte_level_ids(text, bpe_metadata("qwen2"))


def test_the_types_of_tokens_decide_what_is_found_in_text_left_out_and_ends_generation(tmp_path: Path) -> None:
    values = tokenizer_metadata()
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tokens[-4:], types[-4:] = ["<think>", "<|im_end|>", "<|turn|>", "<|eot_id|>"], [4, 3, 3, 1]
    values["tokenizer.ggml.eot_token_id"] = 298
    found = read(tmp_path, values)
    assert found.special.eos == ("<|end|>", "<|turn|>", "<|im_end|>")
    spec, encode = json.loads(found.text), encoder(found.text)
    assert sorted(spec["model"]["vocab"].values()) == [*range(265), 296, 297, 298, 299]  # the others are unused
    added = ["<|end|>", "<|begin|>", "<|pad|>", "<think>", "<|im_end|>", "<|turn|>"]
    assert [token["content"] for token in spec["added_tokens"]] == added
    letter_ids = {chr(byte): i for i, byte in enumerate(LETTERS) if byte < 128}
    assert encode("a<think>b") == [letter_ids["a"], 296, letter_ids["b"]]
    assert 256 not in encode("<|end|>")


# SentencePiece.

PIECES = ["▁", *"helowrdt", "é", "中", "▁h", "he", "ll", "▁w", "hell", "hello", "▁hello", "or", "wor", "▁wor", "ld"]
PIECES += ["▁▁", "lo"]


def sentencepiece_metadata(*, prefix: bool = True) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 bytes, a user's token and PIECES with falling scores, longer pieces not always last."""
    order = sorted(range(len(PIECES)), key=lambda i: (i * 7) % 11)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[note]", *PIECES]
    scores = [0.0] * 260 + [float(-order.index(i)) for i in range(len(PIECES))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 4, *[1] * len(PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def sentencepiece_ids(text: str, values: dict[str, Any]) -> list[int]:
    """llama.cpp's llm_tokenizer_spm_session, with user-defined tokens and without control tokens."""
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    ids = {token: i for i, token in enumerate(tokens)}
    prefix = values["tokenizer.ggml.add_space_prefix"]
    found: list[int] = []
    after_special = True
    for part in regex.split(r"(\[note\])", text):
        if part == "[note]":
            found.append(ids[part])
            after_special = True
        elif part:
            found += _bigrams((" " if prefix and after_special else "") + part, ids, types, values)
            after_special = False
    return found


def _bigrams(text: str, ids: dict[str, int], types: list[int], values: dict[str, Any]) -> list[int]:
    scores = values["tokenizer.ggml.scores"]
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[i], position)
            for position, pair in enumerate(itertools.pairwise(symbols))
            if (i := ids.get("".join(pair))) is not None and types[i] == 1
        ]
        if not pairs:
            break
        _, position = min(pairs)
        symbols[position : position + 2] = ["".join(symbols[position : position + 2])]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_of_sentencepiece_tokenizers_equal_those_of_llama_cpp_and_are_written_back(
    prefix: bool, tmp_path: Path
) -> None:
    values = sentencepiece_metadata(prefix=prefix)
    found = read(tmp_path, values)
    encode = encoder(found.text)
    written = write_tokenizer(json.loads(found.text), found.special, None, len(values["tokenizer.ggml.tokens"]))
    for name in ("tokens", "token_type", "eos_token_id", "bos_token_id", "unknown_token_id", "add_space_prefix"):
        assert written[f"tokenizer.ggml.{name}"] == values[f"tokenizer.ggml.{name}"], name

    @given(
        st.text(st.sampled_from("helowrd  tz中é👍\n"), max_size=30)
        | st.sampled_from(["a[note] hello", "[note][note]x"])
    )
    @settings(max_examples=100)
    def compare(text: str) -> None:
        assert encode(text) == sentencepiece_ids(text, values) == sentencepiece_ids(text, written)

    compare()
    library = tokenizers.Tokenizer.from_str(found.text)
    for text in ("hello world", "  hello", "hé 中👍\n"):
        assert library.decode(library.encode(text, add_special_tokens=False).ids) == text


def test_the_id_minus_one_is_that_of_no_token(tmp_path: Path) -> None:
    values = sentencepiece_metadata()
    special = read(tmp_path, {**values, "tokenizer.ggml.padding_token_id": NO_TOKEN}).special
    assert special == read(tmp_path, values).special and special.pad is None


def test_keys_of_byte_level_tokenizers_have_no_effect_on_sentencepiece(tmp_path: Path) -> None:
    """As in llama.cpp, whose converters write `pre` for SentencePiece as well."""
    values = sentencepiece_metadata()
    more = {**values, "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": ["h e", "l l"]}
    assert read(tmp_path, more) == read(tmp_path, values)


def changed(name: str, index: int, value: Any) -> dict[str, Any]:
    """A change of one item of an array of the byte-level tokenizer, or of the scores of SentencePiece."""
    values = list((tokenizer_metadata() if index == BOS else sentencepiece_metadata())[f"tokenizer.ggml.{name}"])
    values[index] = value
    return {name: values}


MALFORMED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("gpt2", {"tokens": ["a", "a"], "token_type": [1, 1]}, "a token twice"),
    ("gpt2", changed("tokens", BOS, "<|be\0gin|>"), "its special tokens cannot be used: bos contains a NUL character"),
    ("gpt2", {"token_type": [1, 1]}, "one integer per token"),
    ("gpt2", {"merges": ["h e", "nospace"]}, "'nospace' is not a pair"),
    ("gpt2", {"merges": ["h e", "x y z"]}, "not a pair"),
    ("gpt2", {"merges": ["q q"]}, "not a token"),
    ("gpt2", {"merges": 5}, "an array of strings"),
    ("gpt2", {"eos_token_id": -2}, "eos_token_id"),
    ("gpt2", {"add_bos_token": 1}, "a boolean"),
    ("gpt2", {"pre": ...}, "lacks tokenizer.ggml.pre"),
    ("llama", changed("scores", 270, math.nan), "one finite number per token"),
    ("llama", changed("scores", 270, math.inf), "one finite number per token"),
    ("llama", {"scores": [True, False] * 142}, "one finite number per token"),
    ("llama", {"scores": ["x"] * 284}, "an array of numbers"),
    ("llama", changed("tokens", 270, "h" * 257), "too long: one may have 256 characters"),
    ("llama", {"eos_token_id": NO_TOKEN}, r"lacks tokenizer\.ggml\.eos_token_id"),
)


def test_malformed_tokenizers_are_refused(tmp_path: Path) -> None:
    bases = {"gpt2": tokenizer_metadata(), "llama": sentencepiece_metadata()}

    def attempt(row: tuple[str, dict[str, Any]]) -> None:
        values = bases[row[0]] | {f"tokenizer.ggml.{name}": value for name, value in row[1].items()}
        read(tmp_path, {name: value for name, value in values.items() if value is not ...})

    attempt(("llama", changed("tokens", 270, "h" * 256)))
    assert_refused([((kind, changes), message) for kind, changes, message in MALFORMED], attempt, ValueError)


# Writing.


def test_a_character_tokenizer_gives_llama_cpp_the_same_ids_and_is_the_same_after_import(tmp_path: Path) -> None:
    alphabet = "aehlotw THEL'sd0123456789½٣ \n\r\t.,!?<|end>中文字符日本👍🏽\u200d\0\x07"
    tokenizer = train_char("".join(dict.fromkeys(alphabet)))
    values = write_tokenizer(spec_of(tokenizer), SpecialTokens(), None, tokenizer.vocab_size + 3)
    for text in (alphabet, "the 中文 👍🏽\u200d!\n", "<|end|>", "\0\x07 \r\n"):
        assert byte_level_ids(text, values) == tokenizer.encode(text).tolist()
    found = read(tmp_path, values, "qwen3")
    before, after = spec_of(tokenizer), json.loads(found.text)
    assert after["model"]["vocab"] == before["model"]["vocab"]
    assert (after["model"]["merges"], after["decoder"], after["pre_tokenizer"]) == ([], {"type": "Fuse"}, None)
    assert found.special.end_of_text == "<|endoftext|>"


def test_missing_ids_become_unused_tokens_and_no_merges_one_that_never_applies() -> None:
    values = write_tokenizer(spec_of(train_char("ab")), SpecialTokens(), None, 6)
    assert {name.removeprefix("tokenizer.ggml."): value for name, value in values.items()} == {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["<|endoftext|>", "a", "b", "[PAD0]", "[PAD1]", "[PAD2]"],
        "token_type": [3, 1, 1, 5, 5, 5],
        "merges": [f"{LETTERS[0xC0]} {LETTERS[0xC1]}"],
        "eos_token_id": 0,
        "bos_token_id": 0,
        "add_bos_token": False,
    }


def test_a_trained_bpe_tokenizer_gives_llama_cpp_the_same_ids_also_without_merges(tmp_path: Path) -> None:
    for text, size in (("hello the world, don't 12345 中文字符 👍🏽 " * 20, 320), ("hello world", 257)):
        tokenizer = train_bpe([text], size)
        merges = [" ".join(pair) for pair in spec_of(tokenizer)["model"]["merges"]]
        assert bool(merges) == (size > 257)
        values = write_tokenizer(spec_of(tokenizer), SpecialTokens(), None, tokenizer.vocab_size)
        assert values["tokenizer.ggml.pre"] == "gpt-2"
        assert values["tokenizer.ggml.merges"] == (merges or [f"{LETTERS[0xC0]} {LETTERS[0xC1]}"])
        encode = encoder(read(tmp_path, values).text)
        for text in EXAMPLES:
            assert byte_level_ids(text, values) == tokenizer.encode(text).tolist() == encode(text)


def test_tokenizers_that_gguf_cannot_represent_are_refused(tmp_path: Path) -> None:
    bpe, characters = spec_of(train_bpe(["hello world " * 9], 270)), spec_of(train_char("ab"))
    pieces = json.loads(read(tmp_path, sentencepiece_metadata()).text)
    model, vocab, merges = pieces["model"], pieces["model"]["vocab"], pieces["model"]["merges"]
    end = {**characters["added_tokens"][0], "lstrip": True}
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    fewer = {token: i for token, i in vocab.items() if token != "<0x41>"}
    rows: list[tuple[dict[str, Any], str]] = [
        ({**bpe, "pre_tokenizer": {"type": "Whitespace"}}, "no name in GGUF"),
        ({**bpe, "normalizer": {"type": "Lowercase"}}, "no name in GGUF"),
        ({**bpe, "added_tokens": [end]}, "strips the spaces around it"),
        ({**characters, "model": words}, "it is a WordLevel model; tinylm writes"),
        ({**characters, "model": {**characters["model"], "vocab": {"a": 400}}}, "has the id 400, and the model"),
        ({**pieces, "model": {**model, "vocab": fewer}}, "it falls back to bytes, and has no token <0x41>"),
        ({**pieces, "model": {**model, "ignore_merges": True}}, "it ignores merges"),
        ({**pieces, "model": {**model, "merges": [*merges, merges[0]]}}, "not in the order of the scores"),
        ({**pieces, "normalizer": None}, "is not SentencePiece's"),
    ]
    assert_refused(rows, lambda spec: write_tokenizer(spec, SpecialTokens(), None, 400), ValueError)


def spec_of(tokenizer: Any) -> dict[str, Any]:
    return validate_tokenizer(tokenizer.to_str())
