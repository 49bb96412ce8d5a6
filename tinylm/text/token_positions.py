"""Token ids with their byte positions in the text, to align the tokens of different tokenizers."""

from typing import NamedTuple

import numpy as np

from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import Stream, rechunk
from tinylm.text.token_files import MAX_CHUNK
from tinylm.text.tokenizer import Tokenizer


class PositionedTokens(NamedTuple):
    """Token ids with their positions in the text, in UTF-8 bytes. The separator of two documents counts as one byte.

    ids: (N,) of uint32. starts: (N,) of int64, the position where each token begins. documents: (D + 1,) of int64, the
    positions where the documents begin, and the length of the text as if a separator followed the last document.
    """

    ids: np.ndarray
    starts: np.ndarray
    documents: np.ndarray

    def boundaries(self) -> np.ndarray:
        """The positions in `starts` that are greater than all earlier ones, without the first: (M,), increasing.

        No token lies on both sides of such a position.
        """
        highest = np.maximum.accumulate(self.starts)
        return self.starts[1:][(self.starts[1:] > highest[:-1])]

    def first_tokens(self, places: np.ndarray) -> np.ndarray:
        """The index of the first token at each of the boundaries `places`, (M,) -> (M,); N for `documents[-1]`."""
        return np.searchsorted(np.maximum.accumulate(self.starts), places)


def encode_with_positions(stream: Stream, tokenizer: Tokenizer, progress: Progress = no_progress) -> PositionedTokens:
    """Encode a stream as `encode_stream` does, with positions. `progress` receives the number of characters encoded.

    Raises UsageError for characters without an id.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [np.array(begin, dtype=np.uint32)]
    starts = [np.zeros(len(begin), dtype=np.int64)]
    place = 0
    documents = [0]
    for chunk in rechunk(stream, tokenizer.safe_split_point, MAX_CHUNK):
        if chunk is None:
            ids.append(np.array([tokenizer.end_of_text_id, *begin], dtype=np.uint32))
            starts.append(place + np.array([0, *(1 for _ in begin)], dtype=np.int64))
            place += 1
            documents.append(place)
            continue
        part, part_starts = tokenizer.encode_with_starts(chunk)
        ids.append(part)
        starts.append(place + part_starts)
        place += len(chunk.encode())
        progress(len(chunk))
    return PositionedTokens(np.concatenate(ids), np.concatenate(starts), np.array([*documents, place + 1]))
