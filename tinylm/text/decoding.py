"""Decode token ids into a stream of text: the inverse of `encode_stream`."""

import codecs

import numpy as np

from tinylm.text.corpus import Stream
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.tokenizer import Tokenizer

CHUNK_TOKENS = 1 << 20


def decoded_stream(ids: Tokens, tokenizer: Tokenizer) -> Stream:
    """The text of ids, (N,), as `encode_stream` encoded it: in chunks, with `None` between two documents."""
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
