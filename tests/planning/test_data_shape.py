"""The training sequences of each kind of data, in a plan."""

import dataclasses
from pathlib import Path

import numpy as np

from tests.planning.planned import data
from tinylm.planning.data_shape import SHAPES, Rows, data_shape
from tinylm.run_config import CORPUS_KINDS
from tinylm.text.chat_tokens import FIRST, SCORED
from tinylm.text.token_files import TokenFolder

END = 3


def rows_of(kind: str, tokens: list[int], context: int, pack: bool | None = None, pairs: int = 0) -> Rows:
    """The rows of encoded data that are both the training and the validation part."""
    part = np.array(tokens, dtype=np.uint16)
    described = dataclasses.replace(data(len(tokens)), kind=kind, train_pairs=pairs)
    shape = data_shape(described, TokenFolder(Path("unused"), part, part), END)
    assert shape.check_context(described, context, is_new=True) is not None
    return shape.rows(described, context, pack)


def test_every_kind_of_corpus_has_a_shape() -> None:
    assert SHAPES.keys() == set(CORPUS_KINDS)


def test_windows_of_plain_text_continue_in_the_next_epoch() -> None:
    rows = rows_of("text", [1] * 30, 4)
    assert (rows.count, rows.tokens, rows.longest, rows.constant) == (7.5, 4, 4, True)
    assert rows.steps_per_epoch(2) == 3.75


def test_pairs_that_fit_the_context_make_whole_batches() -> None:
    short, long = [1, 1, END, 1, END], [1, END, 1, 1, 1, 1, END]  # with the end-of-text id, contexts of 3 and 5
    rows = rows_of("pairs", short * 5 + long, 4, pairs=6)
    assert (rows.count, rows.longest, rows.constant) == (5, 8, False)
    assert rows.tokens == (5 * 5 + 7) / 6
    assert [rows.steps_per_epoch(size) for size in (2, 5, 100)] == [3, 1, 1]


def test_conversations_share_rows_if_they_are_packed() -> None:
    conversation = [4 + FIRST, 4 + SCORED, 4 + SCORED]  # two inputs
    alone, packed = (rows_of("chat", conversation * 10, 6, pack) for pack in (False, True))
    assert (alone.count, alone.tokens, alone.longest, alone.constant) == (10, 2, 2, False)
    assert (packed.count, packed.tokens, packed.longest, packed.constant) == (4, 5, 6, True)
    assert (alone.steps_per_epoch(4), packed.steps_per_epoch(4)) == (3, 1)
