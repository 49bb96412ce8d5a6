"""Decode token ids into a stream of text: the inverse of `encode_stream`, up to changes by a normalizer."""

import codecs

import numpy as np

from tinylm.text.corpus import Stream
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.tokenizer import Tokenizer

CHUNK_TOKENS = 1 << 20  # ids decoded at a time


def decoded_stream(ids: Tokens, tokenizer: Tokenizer) -> Stream:
    """Yield the text of ids, (N,), from `encode_stream`: in chunks, with `None` between two documents.

    Raises TinyLMError if the `tokenizers` library fails.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for at in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[at : at + CHUNK_TOKENS]
        start = 0
        for end in [*np.flatnonzero(chunk == tokenizer.end_of_text_id).tolist(), len(chunk)]:
            if text := decoder.decode(tokenizer.decode_bytes(chunk[start:end])):
                yield text
            if end < len(chunk):
                if text := decoder.decode(b"", final=True):
                    yield text
                yield None
            start = end + 1
    if text := decoder.decode(b"", final=True):
        yield text
