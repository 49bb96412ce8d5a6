"""Ids decoded one at a time after a context, compared with the library's `decode`; the places of tokens in a text."""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tests.published import TEXT, published
from tinylm.analysis.comparison import encode_with_positions
from tinylm.text.corpus import Stream
from tinylm.text.decoding import BYTE_TOKEN, TokenTexts, decode_after, decoded_stream, stream_decoder
from tinylm.text.parallel_encoding import encode_in_memory
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

SPACES = decoders.Replace("▁", " ")
BYTES, FUSE, STRIP = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
STREAMED: dict[str, Any] = {
    "none": None,
    "fuse": FUSE,
    "byte level": decoders.ByteLevel(),
    "metaspace, first": decoders.Metaspace("▁", "first"),
    "metaspace, always": decoders.Metaspace("▁", "always"),
    "metaspace, never": decoders.Metaspace("▁", "never"),
    "word pieces": decoders.WordPiece("##", cleanup=False),
    "word pieces, cleaned": decoders.WordPiece("##", cleanup=True),
    "end of word": decoders.BPEDecoder("</w>"),
    "llama": decoders.Sequence([SPACES, BYTES, FUSE, STRIP]),
    "gemma": decoders.Sequence([SPACES, BYTES, FUSE]),
    "strip of several": decoders.Sequence([SPACES, BYTES, decoders.Sequence([FUSE, decoders.Strip(" ", 3, 0)])]),
    "bytes and metaspace": decoders.Sequence([BYTES, decoders.Metaspace("▁", "first")]),
}
BUFFERED: dict[str, Any] = {
    "ctc": decoders.CTC("a", "▁", True),
    "replacement across tokens": decoders.Sequence([SPACES, FUSE, decoders.Replace(" .", ".")]),
    "word pieces, fused before": decoders.Sequence([FUSE, decoders.WordPiece("##", cleanup=True)]),
    "strip of each token": decoders.Sequence([decoders.Metaspace("▁", "first"), decoders.Strip("a", 2, 0)]),
    "strip of texts that may be empty": decoders.Sequence([decoders.Replace("a", ""), FUSE, decoders.Strip("b", 1, 0)]),
}
TOKENS = ["▁", "▁▁", "▁a", "a", "b", ".", "'", "n't", "do", "##s", "##", "a</w>", "</w>", "ab</w>", "\ufffd", "日"]
BYTE_TOKENS = ["<0xE6>", "<0x97>", "<0xa5>", "<0xFF>", "<0x0A>", "<0x20>", "<0x61>"]
BYTE_LETTERS = ["Ġ", "æ", "Ĺ", "¥", "æĹ¥", "ÿ", "ĊĊ"]


def library_of(decoder: Any) -> tokenizers.Tokenizer:
    words = ["<unk>", *TOKENS, *BYTE_TOKENS, *BYTE_LETTERS]
    vocabulary = {token: i for i, token in enumerate(words)} | {"é": 40}  # ids 36 to 39 have no token
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    library.add_special_tokens([AddedToken("<s>", special=True)])
    library.add_tokens([AddedToken("▁[X]", special=False)])
    library.decoder = decoder
    return library


LIBRARIES = {name: library_of(decoder) for name, decoder in (STREAMED | BUFFERED).items()}
TOKENIZERS = {name: Tokenizer(library_of(decoder)) for name, decoder in (STREAMED | BUFFERED).items()}
CHARACTER = [TOKENIZERS["none"].encode(token).item() for token in BYTE_TOKENS[:3]]
ids = st.lists(st.integers(0, 1 + TOKENIZERS["none"].vocab_size), max_size=12)


def streamed(tokenizer: Tokenizer, context: list[int], following: list[int]) -> str:
    decoder = stream_decoder(tokenizer, context)
    return "".join([*(decoder.decode([i]) for i in following), decoder.finish()])


def is_open(tokenizer: Tokenizer, i: int) -> bool:
    """Whether later ids may change the text of this one."""
    return BYTE_TOKEN.fullmatch(tokenizer.decoded_token(i) or "") is not None


@pytest.mark.parametrize("name", STREAMED)
@settings(max_examples=300)
@given(context=ids, following=ids)
@example(context=CHARACTER * 3, following=[*CHARACTER, 4])  # adjacent byte tokens are decoded together
def test_streamed_text_is_that_of_all_ids_after_a_context(name: str, context: list[int], following: list[int]) -> None:
    library, tokenizer = LIBRARIES[name], TOKENIZERS[name]
    if name == "byte level" and library.decode(context).endswith("\ufffd"):
        context = []  # whether the rest of a character belongs to the context is no question of decoders
    start = len(library.decode(context))
    decoder, text = stream_decoder(tokenizer, context), ""
    for count, i in enumerate(following, start=1):
        text += decoder.decode([i])
        expected = library.decode(context + following[:count])[start:]
        if name == "byte level":  # without an incomplete character
            assert text in (expected, expected.removesuffix("\ufffd"))
        elif not is_open(tokenizer, i) and tokenizer.decoded_token(i) is not None:
            assert text == expected
    assert text + decoder.finish() == library.decode(context + following)[start:]


@pytest.mark.parametrize("name", BUFFERED)
@given(context=ids, following=ids)
@example(context=[5], following=[*[4] * 9, 5])  # b, and a, which is removed
def test_text_that_later_ids_can_change_comes_at_the_end(name: str, context: list[int], following: list[int]) -> None:
    expected = LIBRARIES[name].decode(context + following)[len(LIBRARIES[name].decode(context)) :]
    assert streamed(TOKENIZERS[name], context, following) == expected


def test_published_tokenizers_stream_any_part_of_a_text() -> None:
    for model, spec in published().items():
        library = tokenizers.Tokenizer.from_str(json.dumps(spec))
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)))
        encoded = library.encode(TEXT, add_special_tokens=False).ids
        for cut in range(len(encoded)):
            before = library.decode(encoded[:cut])
            if not before.endswith("\ufffd"):
                expected = library.decode(encoded)[len(before) :]
                assert streamed(tokenizer, encoded[:cut], encoded[cut:]) == expected, (model, cut)
                assert decode_after(tokenizer, encoded[:cut], encoded[cut:]) == expected, (model, cut)


class Counting(Tokenizer):
    """Keeps the number of ids that are decoded at once."""

    lengths: ClassVar[list[int]] = []

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(ids)
        self.lengths.append(len(ids))
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("name", STREAMED)
def test_the_cost_of_an_id_does_not_grow_with_the_ids_before_it(name: str) -> None:
    tokenizer = Counting(library_of(STREAMED[name]))
    Counting.lengths[:] = [0]
    repeated = [0, tokenizer.encode("▁")[0], *(tokenizer.encode(token)[0] for token in ("\ufffd", "ÿ"))]
    for i in map(int, repeated):
        decoder = stream_decoder(tokenizer, [i] * 100)
        assert len("".join(decoder.decode([i]) for _ in range(100)) + decoder.finish()) >= 97
    assert max(Counting.lengths) < 20


TEXTS = ["The sea, the sea.", "é日本", "a b", "😀 the", " the  end\n"]
CHARACTERS = "".join(sorted({*"".join(TEXTS)}))


def metaspace() -> Tokenizer:
    """Of the kind "other": words with the space before them, and single characters."""
    words = ["▁the", "▁The", "▁sea", *CHARACTERS.replace(" ", "▁"), "▁"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(words))}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="▁"))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    return Tokenizer(library)


ENCODERS = {"char": train_char(CHARACTERS), "bpe": train_bpe(TEXTS * 3, 290), "other": metaspace()}
documents = st.lists(st.text(CHARACTERS, min_size=1, max_size=30), min_size=1, max_size=4)


def stream(texts: list[str]) -> Stream:
    for number, text in enumerate(texts):
        if number:
            yield None
        yield text


@pytest.mark.parametrize("kind", ENCODERS)
@given(documents)
def test_text_between_two_boundaries_is_encoded_by_the_tokens_between_them_and_decoded_as_a_stream(
    kind: str, texts: list[str]
) -> None:
    tokenizer = ENCODERS[kind]
    tokens = encode_with_positions(stream(texts), tokenizer)
    np.testing.assert_array_equal(tokens.ids, encode_in_memory(stream(texts), tokenizer))
    data = b"\xff".join(text.encode() for text in texts) + b"\xff"
    assert tokens.documents.tolist() == [0, *(i + 1 for i, byte in enumerate(data) if byte == 0xFF)]
    places = [*tokens.boundaries().tolist(), len(data)]
    edges = tokens.first_tokens(np.array(places))
    for (start, stop), (first, last) in zip(pairwise(places), pairwise(edges.tolist()), strict=True):
        part = data[start:stop].replace(b"\xff", b"")
        ids = tokens.ids[first:last].tolist()
        token_bytes = tokenizer.token_bytes
        decoded = tokenizer.decode(ids).encode() if token_bytes is None else b"".join(token_bytes[i] for i in ids)
        assert decoded.decode(errors="replace") == part.decode(errors="replace")
    decoded = decoded_stream(tokens.ids, tokenizer)
    assert "".join("\0" if part is None else part for part in decoded) == "\0".join(texts)


@pytest.mark.parametrize("name", ["llama", "gemma", "metaspace, first", "byte level", "word pieces, cleaned"])
def test_the_texts_of_tokens_are_those_inside_of_a_text(name: str) -> None:
    """With the space that a token begins with; a part of a character is its bytes, and a special token its name."""
    tokenizer = TOKENIZERS[name]
    texts = TokenTexts(tokenizer)

    def text(token: str) -> str:
        return texts.text(LIBRARIES[name].token_to_id(token))

    assert text("<s>") == "<s>" and text("ab</w>") == ("ab</w>" if name != "word pieces, cleaned" else " ab</w>")
    if name == "byte level":
        assert [text(token) for token in BYTE_LETTERS[:5]] == [" ", "bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5", "日"]
    elif name == "word pieces, cleaned":
        assert [text(token) for token in ("a", "##s")] == [" a", "s"]
    else:
        assert [text(token) for token in ("▁a", "a", "▁", "日")] == [" a", "a", " ", "日"]
    if name in ("llama", "gemma"):
        assert [text(token) for token in ("<0xE6>", "<0x0A>")] == ["bytes:\\xe6", "\n"]
