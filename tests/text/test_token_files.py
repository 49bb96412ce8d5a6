"""Token files, compared with the ids of whole documents."""

import errno
import hashlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tinylm.errors import TinyLMError, UsageError
from tinylm.text import token_files
from tinylm.text.token_files import (
    STALE_SECONDS,
    UNFINISHED_SUFFIX,
    SplitDocuments,
    TokenFolder,
    encode_stream,
    encode_to_folder,
    smallest_dtype,
    token_key,
)
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

TRAIN: list[str | None] = ["the cat", " sat", None, "on the mat"]
VAL: list[str | None] = ["a do", None, "ran"]
DOCUMENTS = SplitDocuments(lambda: iter(TRAIN), lambda: iter(VAL))
CHAR_TOKENIZER = train_char("abcdeghmnorst ")
KEY = "0123456789abcdef"


def encoded(folder: Path, tokenizer: Tokenizer = CHAR_TOKENIZER) -> TokenFolder:
    return encode_to_folder(folder, KEY, DOCUMENTS, tokenizer, lambda size: None)


def reopened(folder: Path) -> TokenFolder:
    return TokenFolder.open(folder, KEY, CHAR_TOKENIZER.vocab_size)


def ids_of(tokenizer: Tokenizer, *documents: str) -> list[int]:
    """The ids of whole documents with the end-of-text id between them."""
    ids: list[int] = []
    for index, document in enumerate(documents):
        ids += [tokenizer.end_of_text_id] if index else []
        ids += tokenizer.encode(document).tolist()
    return ids


@pytest.mark.parametrize("tokenizer", [CHAR_TOKENIZER, train_bpe(["the cat sat on the mat"], 265)], ids=["char", "bpe"])
def test_documents_are_joined_by_the_end_of_text_id(tokenizer: Tokenizer, tmp_path: Path) -> None:
    in_memory = encode_stream(iter(TRAIN), tokenizer)
    assert in_memory.tolist() == ids_of(tokenizer, "the cat sat", "on the mat")
    assert encode_stream(iter([]), tokenizer).tolist() == []
    for tokens in (encoded(tmp_path / "t", tokenizer), TokenFolder.open(tmp_path / "t", KEY, tokenizer.vocab_size)):
        assert tokens.train.tolist() == ids_of(tokenizer, "the cat sat", "on the mat")
        assert tokens.val.tolist() == ids_of(tokenizer, "a do", "ran")
        assert not tokens.train.flags.writeable
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["t"]


def test_ids_are_stored_in_the_smallest_type() -> None:
    names = {2: "uint8", 256: "uint8", 257: "uint16", 65_536: "uint16", 65_537: "uint32", 1 << 20: "uint32"}
    assert {vocab_size: np.dtype(smallest_dtype(vocab_size)).name for vocab_size in names} == names


def test_progress_receives_the_characters_encoded(tmp_path: Path) -> None:
    progress: list[int] = []
    encode_to_folder(tmp_path / "t", KEY, DOCUMENTS, CHAR_TOKENIZER, progress.append)
    assert sum(progress) == len("the cat saton the mat" + "a doran")


def test_an_unknown_character_stops_encoding_without_leaving_files(tmp_path: Path) -> None:
    documents = SplitDocuments(lambda: iter(["axe"]), lambda: iter(VAL))
    with pytest.raises(UsageError, match=r"'x' \(U\+0078\)"):
        encode_to_folder(tmp_path / "t", KEY, documents, CHAR_TOKENIZER, lambda size: None)
    assert list(tmp_path.iterdir()) == []


# The cache.


def never() -> Iterator[str | None]:
    raise AssertionError("encoded a second time")


def test_token_files_are_reused(tmp_path: Path) -> None:
    first = encoded(tmp_path / "t")
    again = encode_to_folder(tmp_path / "t", KEY, SplitDocuments(never, never), CHAR_TOKENIZER, lambda size: None)
    assert again.train.tolist() == first.train.tolist()
    assert again.val.tolist() == first.val.tolist()


def test_old_unfinished_folders_are_deleted_and_recent_ones_stay(tmp_path: Path) -> None:
    for name, age in (("old", 2 * STALE_SECONDS), ("being-written", 2 * STALE_SECONDS), ("young", 60.0)):
        folder = tmp_path / f".{name}{UNFINISHED_SUFFIX}"
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"123")
        then = time.time() - age
        os.utime(folder / "train.bin", None if name == "being-written" else (then, then))
        os.utime(folder, (then, then))
    encoded(tmp_path / "t")
    assert {path.name.split(".")[-2] for path in tmp_path.iterdir() if path.name != "t"} == {"being-written", "young"}


def test_a_link_instead_of_a_token_folder_is_replaced_without_changing_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").write_text("kept")
    (tmp_path / "t").symlink_to(tmp_path / "target")
    assert encoded(tmp_path / "t").train.tolist() == ids_of(CHAR_TOKENIZER, "the cat sat", "on the mat")
    assert not (tmp_path / "t").is_symlink()
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]


def test_mapped_and_read_tokens_are_equal_and_those_of_another_text_are_refused(tmp_path: Path) -> None:
    first = encoded(tmp_path / "t")
    for mapped in (True, False):
        again = TokenFolder.open(tmp_path / "t", KEY, CHAR_TOKENIZER.vocab_size, mapped=mapped)
        assert isinstance(again.train, np.memmap) == mapped
        assert (again.train.tolist(), again.val.tolist()) == (first.train.tolist(), first.val.tolist())
    with pytest.raises(TinyLMError, match="it is the encoding of another text"):
        TokenFolder.open(tmp_path / "t", KEY[::-1], CHAR_TOKENIZER.vocab_size)


FILES = ("train.bin", "val.bin", "tokens.json")


def test_a_damaged_token_folder_is_refused_and_encoded_again(tmp_path: Path) -> None:
    first = encoded(tmp_path / "t")
    expected = (first.train.tolist(), first.val.tolist())
    for name in FILES:
        file = tmp_path / "t" / name
        content = file.read_bytes()
        structures = (b"[]", b"7", b'{"train": 1, "val": 2}', b'{"train": {}, "val": {}}')
        for damaged in (content[:-1], b"", content + b"\1", None, *(structures if name == "tokens.json" else ())):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with pytest.raises(TinyLMError, match=r"is damaged \(.*\); delete that folder"):
                reopened(tmp_path / "t")
            for tokens in (encoded(tmp_path / "t"), reopened(tmp_path / "t")):
                assert (tokens.train.tolist(), tokens.val.tolist()) == expected


def test_a_flipped_bit_in_a_token_folder_never_changes_a_token(tmp_path: Path) -> None:
    """60 bits per file, and the bit that turns the recorded number of validation tokens, 8, into 0."""
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


def test_an_id_outside_the_vocabulary_is_refused_at_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is forged: its index has the hash of the changed file. The ids are checked in chunks of four."""
    monkeypatch.setattr(token_files, "CHECK_CHUNK", 4)
    encoded(tmp_path / "t")
    file, index = tmp_path / "t" / "val.bin", tmp_path / "t" / "tokens.json"
    before, record = file.read_bytes(), index.read_text()
    assert len(before) == 8
    for place in range(8):
        after = before[:place] + bytes([CHAR_TOKENIZER.vocab_size]) + before[place + 1 :]
        file.write_bytes(after)
        index.write_text(record.replace(*(hashlib.sha256(content).hexdigest() for content in (before, after))))
        with pytest.raises(TinyLMError, match=r"val\.bin has an id that is not in the vocabulary"):
            reopened(tmp_path / "t")


def test_an_error_about_a_full_disk_names_the_cache_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TinyLMError, match=r"No space left on device.*TINYLM_CACHE"):
        encoded(tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["train.bin", "tokens.json", "t"])
def test_a_failure_of_the_system_does_not_delete_token_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = encoded(tmp_path / "t")
    for number in (errno.EMFILE, errno.ESTALE, errno.EACCES, errno.EIO):

        def failing(path: Path, number: int = number, **options: bool) -> os.stat_result:
            if path.name == name:
                raise OSError(number, os.strerror(number), str(path))
            return os.stat(path, **options)  # noqa: PTH116, `Path.stat` is replaced

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", failing)
            patch.setattr(Path, "lstat", lambda path, failing=failing: failing(path, follow_symlinks=False))
            with pytest.raises(TinyLMError, match=rf"Cannot read .*\({name}: {os.strerror(number)}\); it is kept"):
                encode_to_folder(tmp_path / "t", KEY, SplitDocuments(never, never), CHAR_TOKENIZER, lambda size: None)
    assert reopened(tmp_path / "t").train.tolist() == first.train.tolist()


def test_token_files_that_cannot_be_mapped_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded(tmp_path / "t")

    def no_memory(*arguments: object, **options: object) -> np.ndarray:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(np, "memmap", no_memory)
        with pytest.raises(TinyLMError, match=r"Cannot allocate memory\); it is kept"):
            encode_to_folder(tmp_path / "t", KEY, SplitDocuments(never, never), CHAR_TOKENIZER, lambda size: None)
    reopened(tmp_path / "t")


def test_a_damaged_token_folder_that_cannot_be_deleted_is_an_error_before_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded(tmp_path / "t")
    (tmp_path / "t" / "train.bin").write_bytes(b"")
    monkeypatch.setattr(token_files, "remove_tree", lambda path: None)
    with pytest.raises(TinyLMError, match=r"is damaged.*delete that folder"):
        encode_to_folder(tmp_path / "t", KEY, SplitDocuments(never, never), CHAR_TOKENIZER, lambda size: None)


def test_the_key_depends_on_text_split_tokenizer_and_encoder() -> None:
    arguments = ("f", None, 100, CHAR_TOKENIZER, "table")
    others = (
        ("g", *arguments[1:]),
        ("f", "g", *arguments[2:]),
        ("f", None, 101, *arguments[3:]),
        (*arguments[:3], train_char("abc"), "table"),
        (*arguments[:4], "gigatoken 0.10.0"),
    )
    assert len({token_key(*each) for each in (arguments, *others)}) == 6
    assert token_key(*arguments) == token_key(*arguments[:3], Tokenizer(CHAR_TOKENIZER._library), "table")
