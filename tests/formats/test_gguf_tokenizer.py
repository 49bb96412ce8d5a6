"""Tokenizers of GGUF files, compared with llama.cpp's two algorithms (src/llama-vocab.cpp), reimplemented here."""

import itertools
import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.gguf_files import add_value, bytes_to_letters, tokenizer_metadata, write_file
from tinylm.formats.gguf_header import Metadata, parse_header
from tinylm.formats.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer, write_tokenizer
from tinylm.run_config import SpecialTokens
from tinylm.text.tokenizer import train_bpe, train_char
from tinylm.text.tokenizer_file import validate_tokenizer

LETTERS = bytes_to_letters()
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's regular expressions by the names of pre-tokenizers; for Tekken, those of its tokenizer.json.
PATTERNS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), (GPT2,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), (r"\p{N}", GPT2)),
    "tekken": (TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
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


def metadata_of(tmp_path: Path, values: dict[str, Any]) -> Metadata:
    """Metadata with these values, written by the package gguf and read by tinylm."""
    write_file(tmp_path / "tokenizer.gguf", "none", values, {})
    return parse_header((tmp_path / "tokenizer.gguf").read_bytes()).metadata


def encoder(text: str) -> Callable[[str], list[int]]:
    library = tokenizers.Tokenizer.from_str(text)
    library.encode_special_tokens = True
    return lambda value: library.encode(value, add_special_tokens=False).ids


def read(tmp_path: Path, values: dict[str, Any], family: str = "llama") -> Any:
    return read_tokenizer(metadata_of(tmp_path, values), family, 1 << 16)


# Byte-level BPE.


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_of_byte_level_tokenizers_equal_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    values = bpe_metadata(pre)
    encode = encoder(read(tmp_path, values).text)
    for text in EXAMPLES:
        assert encode(text) == byte_level_ids(text, values), text

    @given(TEXTS)
    @settings(max_examples=60)
    def compare(text: str) -> None:
        if pre in WITH_NFC:  # which llama.cpp leaves out
            text = unicodedata.normalize("NFC", text)
        assert encode(text) == byte_level_ids(text, values)

    compare()


def bpe_metadata(pre: str) -> dict[str, Any]:
    """A byte-level tokenizer with a few merges that cross the boundaries of all pre-tokenizers."""
    pairs = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "Ġ t",
        "Ġt h",
        "Ġth e",
        "1 2",
        "12 3",
        "123 4",
        "' s",
        "Ġ Ġ",
        "Ċ Ċ",
        "! !",
    ]
    pairs += ["a _", ". Ċ", "L L", "' L", "'L L", "ä ¸", "ä¸ Ń", "ð Ł", "ðŁ ĳ", "ðŁĳ į", "Ġ 1", "/ /", "// Ċ"]
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


@pytest.mark.parametrize(("pre", "adds"), [("gpt-2", False), ("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_without_a_key_the_pre_tokenizer_decides_about_the_bos_token(pre: str, adds: bool, tmp_path: Path) -> None:
    assert read(tmp_path, bpe_metadata(pre)).special.add_bos is adds


@pytest.mark.parametrize("value", [False, True])
def test_the_key_decides_about_the_bos_token(value: bool, tmp_path: Path) -> None:
    values = {**bpe_metadata("llama-bpe"), "tokenizer.ggml.add_bos_token": value}
    assert read(tmp_path, values).special.add_bos is value


def test_without_its_name_the_pre_tokenizer_is_known_for_some_families_only(tmp_path: Path) -> None:
    values = bpe_metadata("qwen2")
    del values["tokenizer.ggml.pre"]
    text = "it is 12345"
    assert encoder(read(tmp_path, values, "qwen3").text)(text) == byte_level_ids(text, bpe_metadata("qwen2"))
    with pytest.raises(ValueError, match=r"lacks tokenizer.ggml.pre"):
        read(tmp_path, values, "llama")


def test_user_defined_tokens_are_found_in_text_and_control_tokens_are_not(tmp_path: Path) -> None:
    values = tokenizer_metadata()
    values["tokenizer.ggml.tokens"][-1], values["tokenizer.ggml.token_type"][-1] = "<think>", 4
    encode = encoder(read(tmp_path, values).text)
    assert encode("a<think>b") == [LETTER_IDS["a"], 299, LETTER_IDS["b"]]
    assert 256 not in encode("<|end|>")


LETTER_IDS = {chr(byte): i for i, byte in enumerate(LETTERS) if byte < 128}


def test_unused_tokens_are_left_out(tmp_path: Path) -> None:
    found = json.loads(read(tmp_path, tokenizer_metadata()).text)
    assert max(found["model"]["vocab"].values()) == 264
    assert [token["content"] for token in found["added_tokens"]] == ["<|end|>", "<|begin|>", "<|pad|>"]


def test_all_tokens_that_end_a_turn_end_generation(tmp_path: Path) -> None:
    values = tokenizer_metadata()
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tokens[-3:], types[-3:] = ["<|im_end|>", "<|turn|>", "<|eot_id|>"], [3, 3, 1]
    values["tokenizer.ggml.eot_token_id"] = 298
    assert read(tmp_path, values).special.eos == ("<|end|>", "<|turn|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token twice"),
        ({"token_type": [1, 1]}, "one integer per token"),
        ({"merges": ["h e", "nospace"]}, "'nospace' is not a pair"),
        ({"merges": ["h e", "x y z"]}, "not a pair"),
        ({"merges": ["q q"]}, "not a token"),
        ({"merges": 5}, "an array of strings"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"add_bos_token": 1}, "a boolean"),
    ],
)
def test_a_malformed_tokenizer_is_an_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = tokenizer_metadata()
    for name in changes:
        values.pop(f"tokenizer.ggml.{name}")
    path = tmp_path / "bad.gguf"
    writer = gguf.GGUFWriter(path, "none")
    for name, value in values.items():
        add_value(writer, name, value)
    for name, value in changes.items():
        if value == -1:
            writer.add_int32(f"tokenizer.ggml.{name}", -1)
        else:
            add_value(writer, f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=message):
        read_tokenizer(parse_header(path.read_bytes()).metadata, "llama", 1 << 16)


def test_a_special_token_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    values = tokenizer_metadata()
    values["tokenizer.ggml.tokens"][257] = "<|be\0gin|>"
    with pytest.raises(ValueError, match="its special tokens cannot be used: bos contains a NUL character"):
        read(tmp_path, values)


# SentencePiece.

PIECES = [
    "▁",
    *"helowrdt",
    "é",
    "中",
    "▁h",
    "he",
    "ll",
    "▁w",
    "hell",
    "hello",
    "▁hello",
    "or",
    "wor",
    "▁wor",
    "ld",
    "▁▁",
    "lo",
]


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
def test_ids_of_sentencepiece_tokenizers_equal_those_of_llama_cpp(prefix: bool, tmp_path: Path) -> None:
    values = sentencepiece_metadata(prefix=prefix)
    encode = encoder(read(tmp_path, values).text)

    @given(
        st.text(st.sampled_from("helowrd  tz中é👍\n"), max_size=30)
        | st.sampled_from(["a[note] hello", "[note][note]x"])
    )
    @settings(max_examples=200)
    def compare(text: str) -> None:
        assert encode(text) == sentencepiece_ids(text, values)

    compare()


@pytest.mark.parametrize("text", ["hello world", "  hello", "hé 中👍\n"])
@pytest.mark.parametrize("prefix", [True, False])
def test_texts_of_sentencepiece_tokenizers_come_back(text: str, prefix: bool, tmp_path: Path) -> None:
    library = tokenizers.Tokenizer.from_str(read(tmp_path, sentencepiece_metadata(prefix=prefix)).text)
    assert library.decode(library.encode(text, add_special_tokens=False).ids) == text


def test_a_sentencepiece_tokenizer_adds_bos_unless_its_key_says_otherwise(tmp_path: Path) -> None:
    values = sentencepiece_metadata()
    assert read(tmp_path, values).special.add_bos
    assert not read(tmp_path, {**values, "tokenizer.ggml.add_bos_token": False}).special.add_bos


def test_the_id_minus_one_is_that_of_no_token(tmp_path: Path) -> None:
    absent = 2**32 - 1  # -1 as the converters write it
    values = sentencepiece_metadata()
    special = read(tmp_path, {**values, "tokenizer.ggml.padding_token_id": absent}).special
    assert special == read(tmp_path, values).special and special.pad is None
    with pytest.raises(ValueError, match=r"lacks tokenizer\.ggml\.eos_token_id"):
        read(tmp_path, {**values, "tokenizer.ggml.eos_token_id": absent})


def test_keys_of_byte_level_tokenizers_have_no_effect_on_sentencepiece(tmp_path: Path) -> None:
    """As in llama.cpp, whose converters write `pre` for SentencePiece as well."""
    values = sentencepiece_metadata()
    more = {**values, "tokenizer.ggml.pre": "default", "tokenizer.ggml.merges": ["h e", "l l"]}
    assert read(tmp_path, more) == read(tmp_path, values)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_an_error(score: float, tmp_path: Path) -> None:
    values = sentencepiece_metadata()
    values["tokenizer.ggml.scores"][270] = score
    with pytest.raises(ValueError, match="one finite number per token"):
        read(tmp_path, values)


@pytest.mark.parametrize("scores", [[True, False] * 145, ["x"] * 290])
def test_scores_of_another_type_are_an_error(scores: list[Any], tmp_path: Path) -> None:
    values = sentencepiece_metadata()
    values["tokenizer.ggml.scores"] = scores[: len(values["tokenizer.ggml.tokens"])]
    with pytest.raises(ValueError, match=r"one finite number per token|an array of numbers"):
        read(tmp_path, values)


def test_a_very_long_piece_is_an_error(tmp_path: Path) -> None:
    values = sentencepiece_metadata()
    values["tokenizer.ggml.tokens"][270] = "h" * 5000
    with pytest.raises(ValueError, match="too long"):
        read(tmp_path, values)


# Writing.


def test_a_character_tokenizer_gives_llama_cpp_the_same_ids(tmp_path: Path) -> None:
    alphabet = "aehlotw THEL'sd0123456789½٣ \n\r\t.,!?<|end>中文字符日本👍🏽\u200d\0\x07"
    tokenizer = train_char("".join(dict.fromkeys(alphabet)))
    values = write_tokenizer(spec_of(tokenizer), special_of(), None, tokenizer.vocab_size)
    for text in (alphabet, "the 中文 👍🏽\u200d!\n", "<|end|>", "\0\x07 \r\n"):
        assert byte_level_ids(text, values) == tokenizer.encode(text).tolist()


def test_a_character_tokenizer_is_the_same_after_export_and_import(tmp_path: Path) -> None:
    tokenizer = train_char("abc 中👍é")
    values = write_tokenizer(spec_of(tokenizer), special_of(), None, tokenizer.vocab_size + 3)
    found = read(tmp_path, values, "qwen3")
    before, after = spec_of(tokenizer), json.loads(found.text)
    assert after["model"]["vocab"] == before["model"]["vocab"]
    assert (after["model"]["merges"], after["decoder"], after["pre_tokenizer"]) == ([], {"type": "Fuse"}, None)
    assert found.special.end_of_text == "<|endoftext|>"


def test_a_tokenizer_of_ascii_characters_has_a_merge_that_never_applies() -> None:
    tokenizer = train_char("abc")
    values = write_tokenizer(spec_of(tokenizer), special_of(), None, tokenizer.vocab_size)
    assert values["tokenizer.ggml.merges"] == [f"{LETTERS[0xC0]} {LETTERS[0xC1]}"]


def test_a_trained_bpe_tokenizer_gives_llama_cpp_the_same_ids(tmp_path: Path) -> None:
    tokenizer = train_bpe(["hello the world, don't 12345 中文字符 👍🏽 " * 20], 320)
    values = write_tokenizer(spec_of(tokenizer), special_of(), None, tokenizer.vocab_size)
    assert values["tokenizer.ggml.pre"] == "gpt-2"
    encode = encoder(read(tmp_path, values).text)
    for text in EXAMPLES:
        assert byte_level_ids(text, values) == tokenizer.encode(text).tolist() == encode(text)


def test_a_byte_level_tokenizer_without_merges_is_written_and_read_with_the_same_ids(tmp_path: Path) -> None:
    spec = spec_of(train_bpe(["hello world"], 257))
    assert spec["model"]["merges"] == []
    values = write_tokenizer(spec, special_of(), None, 257)
    assert values["tokenizer.ggml.merges"] == [f"{LETTERS[0xC0]} {LETTERS[0xC1]}"]
    encode, before = encoder(read(tmp_path, values).text), encoder(json.dumps(spec))
    for text in EXAMPLES:
        assert byte_level_ids(text, values) == encode(text) == before(text)


def test_a_tokenizer_that_falls_back_to_bytes_that_it_lacks_is_refused(tmp_path: Path) -> None:
    spec = json.loads(read(tmp_path, sentencepiece_metadata()).text)
    del spec["model"]["vocab"]["<0x41>"]
    with pytest.raises(ValueError, match="it falls back to bytes, and has no token <0x41>"):
        write_tokenizer(validate_tokenizer(json.dumps(spec)), SpecialTokens(end_of_text="</s>"), None, 400)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_an_imported_byte_level_tokenizer_is_written_with_the_same_ids(pre: str, tmp_path: Path) -> None:
    found = read(tmp_path, bpe_metadata(pre))
    values = write_tokenizer(
        json.loads(found.text), found.special, "{{ x }}", len(bpe_metadata(pre)["tokenizer.ggml.tokens"])
    )
    assert PATTERNS[values["tokenizer.ggml.pre"]] == PATTERNS[pre]
    for name in ("tokens", "token_type", "merges", "eos_token_id", "bos_token_id"):
        assert values[f"tokenizer.ggml.{name}"] == bpe_metadata(pre)[f"tokenizer.ggml.{name}"]
    assert values["tokenizer.chat_template"] == "{{ x }}"


@pytest.mark.parametrize("prefix", [True, False])
def test_an_imported_sentencepiece_tokenizer_is_written_with_the_same_ids(prefix: bool, tmp_path: Path) -> None:
    before = sentencepiece_metadata(prefix=prefix)
    found = read(tmp_path, before)
    values = write_tokenizer(json.loads(found.text), found.special, None, len(before["tokenizer.ggml.tokens"]))
    for name in ("tokens", "token_type", "eos_token_id", "bos_token_id", "unknown_token_id", "add_space_prefix"):
        assert values[f"tokenizer.ggml.{name}"] == before[f"tokenizer.ggml.{name}"], name
    for text in ("hello world", "  hello wor ld", "é 中👍 llhello", "a[note] hello"):
        assert sentencepiece_ids(text, values) == sentencepiece_ids(text, before)


def test_missing_ids_become_unused_tokens_with_names_of_their_own() -> None:
    tokenizer = train_char("ab")
    values = write_tokenizer(spec_of(tokenizer), special_of(), None, 6)
    assert values["tokenizer.ggml.tokens"] == ["<|endoftext|>", "a", "b", "[PAD0]", "[PAD1]", "[PAD2]"]
    assert values["tokenizer.ggml.token_type"] == [3, 1, 1, 5, 5, 5]


def test_bos_and_eos_are_always_written_and_bos_is_not_added() -> None:
    values = write_tokenizer(spec_of(train_char("ab")), special_of(), None, 3)
    names = ("eos_token_id", "bos_token_id", "add_bos_token")
    assert [values[f"tokenizer.ggml.{name}"] for name in names] == [0, 0, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "no name in GGUF"),
        ({"normalizer": {"type": "Lowercase"}}, "no name in GGUF"),
    ],
)
def test_a_tokenizer_without_a_name_in_gguf_is_refused(change: dict[str, Any], message: str) -> None:
    spec = {**spec_of(train_bpe(["hello world " * 9], 270)), **change}
    with pytest.raises(ValueError, match=message):
        write_tokenizer(spec, special_of(), None, 400)


def test_another_kind_of_model_is_refused() -> None:
    spec = spec_of(train_char("ab"))
    spec["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    with pytest.raises(ValueError, match="it is a WordLevel model"):
        write_tokenizer(spec, special_of(), None, 400)


def spec_of(tokenizer: Any) -> dict[str, Any]:
    return validate_tokenizer(tokenizer.to_str())


def special_of() -> SpecialTokens:
    return SpecialTokens()
