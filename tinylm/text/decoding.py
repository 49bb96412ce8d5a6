"""Decode token ids to text a few at a time: generated ids after a prompt, or the stored ids of documents.

`stream_decoder` gives the text of all ids without the text of the context before them, as two calls of the library's
`decode` do. The library's own `DecodeStream` raises an error where bytes turn out not to be UTF-8, returns the text of
a context that ends inside a character, and cannot return the rest at the end (tokenizers 0.23).
"""

import codecs
import functools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tinylm.text.corpus import Stream
from tinylm.text.token_files import Tokens
from tinylm.text.tokenizer import TokenBytes, Tokenizer

CHUNK_TOKENS = 1 << 20  # ids decoded at a time
BYTE_TOKEN = re.compile("<0x[+0-9A-Fa-f][0-9A-Fa-f]>")
MAX_CHARACTER_BYTES = 4  # in UTF-8
# The steps that change each token by itself, or depend on whether it is the first or the last, except that ByteFallback
# joins adjacent byte tokens.
TOKEN_STEPS = frozenset({"BPEDecoder", "ByteFallback", "Metaspace", "Replace", "WordPiece"})


def stream_decoder(tokenizer: Tokenizer, context: Sequence[int] = ()) -> "_ByteDecoder | _WindowDecoder":
    """A decoder for the ids that follow `context`, whose text is not returned.

    Its method `decode` adds ids and returns the text that they complete, which later ids do not change; the beginning
    of a character, for example, is held back. `finish` returns the text that is held back, after the last id. Both
    raise TinyLMError if the `tokenizers` library fails.
    """
    token_bytes = tokenizer.token_bytes
    return _WindowDecoder(tokenizer, context) if token_bytes is None else _ByteDecoder(token_bytes, context)


def decode_after(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    """The text of ids that follow `context`. Raises TinyLMError if the `tokenizers` library fails."""
    decoder = stream_decoder(tokenizer, context)
    return decoder.decode(ids) + decoder.finish()


class TokenTexts(dict[int, bytes]):
    """The UTF-8 bytes of each id inside a text, computed at first use: a token keeps the space that it begins with, and
    may be a part of a character. Special tokens have their names.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._falls_back = any(step["type"] == "ByteFallback" for step in tokenizer.decoder_steps)
        self._before = next(([i] for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).isalnum()), [])

    def __missing__(self, i: int) -> bytes:
        tokenizer, token = self._tokenizer, self._tokenizer.decoded_token(i)
        if token is None:
            self[i] = tokenizer.decode([i], skip_special_tokens=False).encode()
        elif tokenizer.token_bytes is not None:
            self[i] = tokenizer.token_bytes[i]
        elif self._falls_back and BYTE_TOKEN.fullmatch(token):
            self[i] = bytes([int(token[3:5], 16)])
        else:
            self[i] = decode_after(tokenizer, self._before, [i]).encode()
        return self[i]

    def text(self, i: int) -> str:
        """The text of an id; of a part of a character its bytes, as in OpenAI's API: `bytes:\\xe2\\x80`."""
        try:
            return self[i].decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self[i])


class _ByteDecoder:
    """Decodes ids that have the same bytes in every context."""

    def __init__(self, token_bytes: TokenBytes, context: Sequence[int]) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.decode(context)  # it may end inside a character

    def decode(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes.__getitem__, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes ids together with the last ids before them, and removes the text of those.

    The window is long enough (`_window_size`) that the first id with its special treatment is in it, and the text of
    new ids is the same as after all ids. An id is open if later ids can change its text. It is decoded together with
    the next id that is not open.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._size = _window_size(tokenizer)
        self._is_open = _open_ids(tokenizer)
        self._ids: list[int] = []
        self._add(context)
        self._shorten()

    def decode(self, ids: Sequence[int]) -> str:
        self._add(ids)
        if not self._ids or self._is_open(self._ids[-1]):
            return ""
        text = self.finish()
        self._shorten()
        return text

    def finish(self) -> str:
        return self._tokenizer.decode(self._ids)[self._shown :]

    def _add(self, ids: Sequence[int]) -> None:
        self._ids += [i for i in map(int, ids) if self._tokenizer.decoded_token(i) is not None]

    def _shorten(self) -> None:
        """Drop the ids before the window. All ids that remain count as shown."""
        start = len(self._ids)
        while start and self._is_open(self._ids[start - 1]):
            start -= 1
        self._ids = self._ids[max(0, start - self._size) :]
        self._shown = len(self._tokenizer.decode(self._ids))


def _window_size(tokenizer: Tokenizer) -> int:
    """Number of ids, before open ones, whose text contains all effects of the beginning of a text.

    WordPiece and Metaspace treat the first token in a special way. Strip removes up to `start` characters: the last id
    has at least one, and each id before it at least one byte.
    """
    stripped = sum(step["start"] for step in tokenizer.decoder_steps if step["type"] == "Strip")
    return 1 + MAX_CHARACTER_BYTES * max(0, stripped - 1)


def _open_ids(tokenizer: Tokenizer) -> Callable[[int], bool]:
    """Whether an id is open: with ByteFallback, a token of one byte, since the library decodes adjacent ones together,
    and all of them to U+FFFD if they are not UTF-8. For other decoders than those of published tokenizers, every id.
    """
    steps = tokenizer.decoder_steps
    kinds = [step["type"] for step in steps]
    is_stripped = kinds[-2:] == ["Fuse", "Strip"]
    before = kinds[: -2 if is_stripped else -1 if kinds[-1:] == ["Fuse"] else None]
    never_empty = {"ByteFallback", "Replace"} if all(step.get("content", " ") for step in steps) else set()
    if not set(before) <= (never_empty if is_stripped else TOKEN_STEPS):
        return lambda i: True
    if "ByteFallback" not in before:
        return lambda i: False
    return functools.cache(lambda i: BYTE_TOKEN.fullmatch(tokenizer.decoded_token(i) or "") is not None)


def decoded_stream(ids: Tokens, tokenizer: Tokenizer) -> Stream:
    """Yield the text of ids, (N,), of `encode_in_memory`, up to changes by a normalizer: in chunks, with `None` between
    two documents.

    Raises TinyLMError if the `tokenizers` library fails.
    """
    decoder = stream_decoder(tokenizer)
    for at in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[at : at + CHUNK_TOKENS]
        start = 0
        for end in [*np.flatnonzero(chunk == tokenizer.end_of_text_id).tolist(), len(chunk)]:
            if text := decoder.decode(chunk[start:end].tolist()):
                yield text
            if end < len(chunk):
                if text := decoder.finish():
                    yield text
                yield None
                decoder = stream_decoder(tokenizer)
            start = end + 1
    if text := decoder.finish():
        yield text
