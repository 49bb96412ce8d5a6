"""Judge: the ids of the text encoded at once, and windows sliced from it one by one."""

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinylm.errors import TinyLMError, UsageError
from tinylm.text import dataset as d
from tinylm.text.dataset import Batch, TokenFolder, Windows, encode_corpus, encode_stream, evaluation_batches
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

TRAIN: list[str | None] = ["the cat", " sat", None, "on the mat"]
VAL: list[str | None] = ["a do", None, "ran"]
CHARACTERS = train_char("abcdeghmnorst ")
KEY = "0123456789abcdef"


def encoded(folder: Path, tokenizer: Tokenizer = CHARACTERS) -> TokenFolder:
    return encode_corpus(folder, KEY, lambda: iter(TRAIN), lambda: iter(VAL), tokenizer, lambda size: None)


def reopened(folder: Path) -> TokenFolder:
    return TokenFolder.open(folder, KEY, CHARACTERS.vocab_size)


def ids_of(tokenizer: Tokenizer, *documents: str) -> list[int]:
    """Whole documents, with the end of text between two of them."""
    ids: list[int] = []
    for index, document in enumerate(documents):
        ids += [tokenizer.end_of_text] if index else []
        ids += tokenizer.encode(document).tolist()
    return ids


@pytest.mark.parametrize("tokenizer", [CHARACTERS, train_bpe(["the cat sat on the mat"], 265)], ids=["char", "bpe"])
def test_the_two_parts_are_their_documents_joined_by_the_end_of_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for tokens in (encoded(tmp_path / "t", tokenizer), TokenFolder.open(tmp_path / "t", KEY, tokenizer.vocab_size)):
        assert tokens.train.tolist() == ids_of(tokenizer, "the cat sat", "on the mat")
        assert tokens.val.tolist() == ids_of(tokenizer, "a do", "ran")
        assert not tokens.train.flags.writeable
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["t"]


def test_a_stream_is_encoded_in_memory_alike_and_an_empty_one_to_nothing() -> None:
    assert encode_stream(iter(TRAIN), CHARACTERS).tolist() == ids_of(CHARACTERS, "the cat sat", "on the mat")
    assert encode_stream(iter([]), CHARACTERS).tolist() == []


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (1 << 20, "uint32")],
)
def test_ids_are_kept_in_the_fewest_bytes_that_hold_the_largest(vocab_size: int, dtype: str) -> None:
    assert np.dtype(d.smallest_dtype(vocab_size)).name == dtype
    assert np.iinfo(dtype).max >= vocab_size - 1


def test_the_largest_of_256_ids_survives_its_byte(tmp_path: Path) -> None:
    alphabet = "".join(map(chr, range(0x4E00, 0x4E00 + 255)))
    tokenizer = train_char(alphabet)
    tokens = encode_corpus(
        tmp_path / "t", KEY, lambda: iter([alphabet]), lambda: iter([]), tokenizer, lambda size: None
    )
    assert tokens.train.dtype == np.uint8
    assert tokens.train.tolist() == list(range(1, 256))
    assert tokens.val.tolist() == []


def test_encoding_tells_how_many_characters_it_has_done(tmp_path: Path) -> None:
    told: list[int] = []
    encode_corpus(tmp_path / "t", KEY, lambda: iter(TRAIN), lambda: iter(VAL), CHARACTERS, told.append)
    assert sum(told) == len("the cat saton the mat" + "a doran")


def test_more_pieces_than_are_encoded_ahead_stay_in_order() -> None:
    text = "abcdeghmnorst " * 200
    assert encode_stream(iter(text), CHARACTERS).tolist() == ids_of(CHARACTERS, text)


def test_a_character_without_an_id_stops_the_encoding_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'x' \(U\+0078\)"):
        encode_corpus(tmp_path / "t", KEY, lambda: iter(["axe"]), lambda: iter(VAL), CHARACTERS, lambda size: None)
    assert list(tmp_path.iterdir()) == []


# The cache.


def never() -> Iterator[str | None]:
    raise AssertionError("encoded a second time")


def test_token_files_are_used_again_without_encoding(tmp_path: Path) -> None:
    first = encoded(tmp_path / "t")
    again = encode_corpus(tmp_path / "t", KEY, never, never, CHARACTERS, lambda size: None)
    assert again.train.tolist() == first.train.tolist()
    assert again.val.tolist() == first.val.tolist()


def test_two_runs_that_encode_the_same_text_at_once_both_have_it(tmp_path: Path) -> None:
    """The one that is done later finds the folder there; two containers may have the same process id."""

    def slow() -> Iterator[str | None]:
        yield "the cat sat"
        encoded(tmp_path / "t")
        yield None
        yield "on the mat"

    late = encode_corpus(tmp_path / "t", KEY, slow, lambda: iter(VAL), CHARACTERS, lambda size: None)
    assert late.train.tolist() == ids_of(CHARACTERS, "the cat sat", "on the mat")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_what_killed_processes_left_is_deleted_and_what_is_being_written_stays(tmp_path: Path) -> None:
    for name, age in (("old", 2 * d.STALE_SECONDS), ("being-written", 2 * d.STALE_SECONDS), ("young", 60.0)):
        folder = tmp_path / f".{name}{d.UNFINISHED}"
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"123")
        then = time.time() - age
        os.utime(folder / "train.bin", None if name == "being-written" else (then, then))
        os.utime(folder, (then, then))
    encoded(tmp_path / "t")
    assert {path.name.split(".")[-2] for path in tmp_path.iterdir() if path.name != "t"} == {"being-written", "young"}


def test_a_link_in_the_place_of_a_cache_entry_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("kept")
    (tmp_path / "t").symlink_to(tmp_path / "target")
    assert encoded(tmp_path / "t").train.tolist() == ids_of(CHARACTERS, "the cat sat", "on the mat")
    assert not (tmp_path / "t").is_symlink()
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]


@pytest.mark.parametrize("mapped", [True, False])
def test_tokens_are_the_same_mapped_and_read(mapped: bool, tmp_path: Path) -> None:
    first = encoded(tmp_path / "t")
    again = TokenFolder.open(tmp_path / "t", KEY, CHARACTERS.vocab_size, mapped=mapped)
    assert isinstance(again.train, np.memmap) == mapped
    assert (again.train.tolist(), again.val.tolist()) == (first.train.tolist(), first.val.tolist())


def test_the_encoding_of_another_text_is_refused(tmp_path: Path) -> None:
    encoded(tmp_path / "t")
    with pytest.raises(TinyLMError, match="it is the encoding of another text"):
        TokenFolder.open(tmp_path / "t", KEY[::-1], CHARACTERS.vocab_size)


FILES = ("train.bin", "val.bin", "tokens.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed", "longer"])
def test_a_damaged_cache_is_refused_and_rebuilt(name: str, damage: str, tmp_path: Path) -> None:
    first = encoded(tmp_path / "t")
    expected = (first.train.tolist(), first.val.tolist())
    file = tmp_path / "t" / name
    content = file.read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes({"truncated": content[:-1], "emptied": b"", "longer": content + b"\1"}[damage])
    with pytest.raises(TinyLMError, match=r"is damaged \(.*\); delete that folder"):
        reopened(tmp_path / "t")
    again = encoded(tmp_path / "t")
    assert (again.train.tolist(), again.val.tolist()) == expected
    assert reopened(tmp_path / "t").val.tolist() == expected[1]


def test_no_flipped_bit_of_the_cache_changes_a_token(tmp_path: Path) -> None:
    """Some bits of each file; the count of the validation tokens, 8, is one bit away from 0."""
    first = encoded(tmp_path / "t")
    expected = (first.train.tolist(), first.val.tolist())
    for name in FILES:
        file = tmp_path / "t" / name
        content = file.read_bytes()
        bits = random.Random(0).sample(range(8 * len(content)), 60)
        bits += [8 * content.index(b": 8,") + 16 + 3] if name == "tokens.json" else []
        for bit in bits:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            try:
                tokens = reopened(tmp_path / "t")
            except TinyLMError:
                continue
            assert name == "tokens.json", bit
            assert (tokens.train.tolist(), tokens.val.tolist()) == expected
        file.write_bytes(content)


@pytest.mark.parametrize("content", ["[]", "7", '{"train": 1, "val": 2}', '{"train": {}, "val": {}}'])
def test_a_record_of_another_shape_is_damage(content: str, tmp_path: Path) -> None:
    encoded(tmp_path / "t")
    (tmp_path / "t" / "tokens.json").write_text(content)
    with pytest.raises(TinyLMError, match="is damaged"):
        reopened(tmp_path / "t")


def test_a_full_disk_is_an_error_that_names_the_cache_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TinyLMError, match=r"No space left on device.*TINYLM_CACHE"):
        encoded(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_the_key_changes_with_all_that_the_tokens_depend_on() -> None:
    other = train_char("abc")
    keys = [
        d.token_key("f", None, 100, CHARACTERS, "table"),
        d.token_key("g", None, 100, CHARACTERS, "table"),
        d.token_key("f", "g", 100, CHARACTERS, "table"),
        d.token_key("f", None, 101, CHARACTERS, "table"),
        d.token_key("f", None, 100, other, "table"),
        d.token_key("f", None, 100, CHARACTERS, "gigatoken 0.10.0"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == d.token_key("f", None, 100, Tokenizer(CHARACTERS._library), "table")


# What a BPE trainer learns from.


@given(st.lists(st.text("ab \n", min_size=1, max_size=40), max_size=8), st.integers(1, 40), st.integers(1, 200))
def test_a_sample_is_of_the_text_and_about_as_long_as_wanted(pieces: list[str], piece: int, most: int) -> None:
    text = "".join(pieces)
    sample = list(d.sample_for_tokenizer(iter(pieces), len(text), most, piece))
    position = 0
    for part in sample:
        position = text.index(part, position) + len(part)
    if most >= len(text):
        assert "".join(sample) == text


def test_a_sample_is_spread_over_the_text() -> None:
    text = "".join(f"line {i:04d}\n" for i in range(1000))
    sample = list(
        d.sample_for_tokenizer(iter([text[i : i + 100] for i in range(0, len(text), 100)]), 10_000, 2500, 100)
    )
    assert 2000 <= sum(map(len, sample)) <= 3000
    assert all(part.endswith("\n") for part in sample)
    assert min(int(part[5:9]) for part in sample) < 100
    assert max(int(part[5:9]) for part in sample) > 900


# Training windows.


@given(st.integers(1, 8), st.integers(0, 80), st.integers(1, 7), st.integers(0, 5))
def test_an_epoch_visits_every_window_once_and_each_starts_anew(
    context: int, extra: int, batch_size: int, seed: int
) -> None:
    tokens = np.arange(context + 1 + extra, dtype=np.uint16)
    windows = Windows(tokens, context, batch_size, seed)
    epochs = 3
    wanted = epochs * windows.per_epoch
    rows = [row for n in range(-(-wanted // batch_size)) for row in windows.batch(n).ids.tolist()][:wanted]
    assert windows.per_epoch == max(1, (len(tokens) - 1) // context - 1)
    for start in range(0, wanted, windows.per_epoch):
        epoch = rows[start : start + windows.per_epoch]
        first = min(row[0] for row in epoch)
        assert sorted(epoch) == [
            list(range(first + i * context, first + (i + 1) * context)) for i in range(windows.per_epoch)
        ]
        assert first <= min(context, len(tokens) - 1 - windows.per_epoch * context)


def test_the_target_of_a_token_is_the_token_after_it() -> None:
    tokens = np.random.default_rng(0).integers(0, 50, 100).astype(np.uint8)
    batch = Windows(tokens, 7, 5, seed=1).batch(3)
    assert batch.ids.shape == batch.targets.shape == (5, 7)
    assert batch.ids.dtype == batch.targets.dtype == torch.int64
    assert batch.mask is None
    places = {tuple(tokens[i : i + 8].tolist()) for i in range(93)}
    for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
        assert (*ids, targets[-1]) in places
        assert ids[1:] == targets[:-1]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_a_batch_depends_on_seed_and_number_alone(numbers: list[int]) -> None:
    tokens = np.arange(100, dtype=np.uint8)
    visited = Windows(tokens, 6, 4, seed=3)
    for number in numbers:
        assert torch.equal(visited.batch(number).ids, Windows(tokens, 6, 4, seed=3).batch(number).ids)


def test_epochs_differ_in_offset_and_order_and_so_do_seeds() -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    windows = Windows(tokens, 10, 98, seed=0)
    epochs = [windows.batch(n).ids for n in range(6)]
    offsets = {int(epoch.min()) for epoch in epochs}
    assert len(offsets) > 2
    orders = {tuple((epoch[:, 0] - epoch.min()).tolist()) for epoch in epochs}
    assert len(orders) == 6
    assert not torch.equal(Windows(tokens, 10, 98, seed=1).batch(0).ids, epochs[0])


def test_the_shortest_text_makes_a_window_and_a_shorter_one_none() -> None:
    assert Windows(np.arange(5), 4, 1, seed=0).batch(7).ids.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(TinyLMError, match="4 tokens hold no window of 4"):
        Windows(np.arange(4), 4, 1, seed=0)


# Evaluation windows.


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[int, int, int | None, int]:
    context = draw(st.integers(1, 12))
    return draw(st.integers(2, 60)), context, draw(st.none() | st.integers(1, context)), draw(st.integers(1, 9))


@given(evaluations())
def test_every_token_but_the_first_is_scored_once_with_what_came_before_it(
    evaluation: tuple[int, int, int | None, int],
) -> None:
    length, context, stride, batch_size = evaluation
    tokens = np.arange(length, dtype=np.uint8)
    scored: Counter[int] = Counter()
    for batch in evaluation_batches(tokens, context, batch_size, stride):
        assert 1 <= len(batch) <= batch_size
        assert batch.ids.shape[1] <= context
        assert torch.equal(batch.targets, batch.ids + 1)  # the tokens are their own places
        assert torch.equal(batch.ids, batch.ids[:, :1] + torch.arange(batch.ids.shape[1]))
        mask = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
        assert batch.scored == int(mask.sum()) > 0
        scored.update(batch.targets[mask].tolist())
        if stride is not None:  # what a token is predicted from: all there is, or context - stride and more
            seen = torch.arange(1, batch.ids.shape[1] + 1).expand_as(batch.ids)[mask]
            at = batch.targets[mask]
            assert bool(((seen == at) | (seen > context - stride)).all())
    assert scored == Counter(range(1, length))


def test_a_sample_of_the_validation_text_is_spread_and_always_the_same() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    first, second = (
        [int(row) for batch in evaluation_batches(tokens, 10, 4, most=200) for row in batch.ids[:, 0]] for _ in range(2)
    )
    assert first == second
    assert len(first) == len(set(first)) == 20
    assert (first[0], first[-1]) == (0, 990)
    assert all(40 <= after - before <= 60 for before, after in pairwise(first))
    everything = sum(batch.scored for batch in evaluation_batches(tokens, 10, 4, most=1000))
    assert everything == 1000


# Batches.


@given(st.integers(1, 20), st.integers(1, 25), st.booleans())
def test_micro_batches_are_the_batch_in_order(size: int, rows: int, masked: bool) -> None:
    ids = torch.arange(size * 3).reshape(size, 3)
    batch = Batch(ids, ids + 1, ids % 2 == 0 if masked else None)
    parts = list(batch.split(rows))
    assert [len(part) for part in parts] == [rows] * (size // rows) + [size % rows] * (size % rows > 0)
    assert torch.equal(torch.cat([part.ids for part in parts]), batch.ids)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    assert sum(part.scored for part in parts) == batch.scored == (int((ids % 2 == 0).sum()) if masked else size * 3)
    if batch.mask is not None:
        assert torch.equal(torch.cat([part.mask for part in parts if part.mask is not None]), batch.mask)


@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_moves_whole(masked: bool) -> None:
    ids = torch.arange(6).reshape(2, 3)
    moved = Batch(ids, ids + 1, ids > 2 if masked else None).to(torch.device("meta"))
    assert moved.ids.is_meta
    assert moved.targets.is_meta
    assert (moved.mask is not None and moved.mask.is_meta) == masked
