"""Places of tokens, compared with the text that the tokens decode to."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from tinylm.text.corpus import Stream
from tinylm.text.decoding import decoded_stream
from tinylm.text.token_files import encode_stream
from tinylm.text.token_positions import encode_with_positions
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

TEXTS = ["The sea, the sea.", "é日本", "a b", "😀 the", " the  end\n"]
CHARACTERS = "".join(sorted({*"".join(TEXTS)}))


def metaspace() -> Tokenizer:
    """Of the kind "other": words with the space before them, and single characters."""
    words = ["▁the", "▁The", "▁sea", *CHARACTERS.replace(" ", "▁"), "▁"]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(words))}
    library = Library(models.WordLevel(vocabulary, unk_token="▁"))
    library.normalizer = normalizers.Replace(" ", "▁")
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    return Tokenizer(library)


TOKENIZERS = {
    "char": train_char(CHARACTERS),
    "bpe": train_bpe(TEXTS * 3, 290),
    "other": metaspace(),
}
documents = st.lists(st.text(CHARACTERS, min_size=1, max_size=30), min_size=1, max_size=4)


def stream(texts: list[str]) -> Stream:
    for number, text in enumerate(texts):
        if number:
            yield None
        yield text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(documents)
def test_text_between_two_boundaries_is_encoded_by_the_tokens_between_them(kind: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    tokens = encode_with_positions(stream(texts), tokenizer)
    np.testing.assert_array_equal(tokens.ids, encode_stream(stream(texts), tokenizer))
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


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(documents)
def test_decoding_a_stream_gives_the_text_that_was_encoded(kind: str, texts: list[str]) -> None:
    ids = encode_stream(stream(texts), TOKENIZERS[kind])
    assert "".join("\0" if part is None else part for part in decoded_stream(ids, TOKENIZERS[kind])) == "\0".join(texts)


def test_the_kinds_are_those_that_the_names_say() -> None:
    assert {kind: tokenizer.kind for kind, tokenizer in TOKENIZERS.items()} == {kind: kind for kind in TOKENIZERS}
    assert json.loads(TOKENIZERS["other"].to_str())["post_processor"] is not None
