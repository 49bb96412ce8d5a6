"""Token files, in one or several shards, compared with the ids of the library, and the resumption of an encoding."""

import errno
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.shell import ROOT, child_process, default_signals
from tests.text.corpora import split_of, write_file
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.run_tokens import encode_text
from tinylm.reporter import LogReporter
from tinylm.system.files import private_folder
from tinylm.text import parallel_encoding, token_files
from tinylm.text.parallel_encoding import TEXT_ENCODING, TextBatch, encode_batches, encode_in_memory, text_batches
from tinylm.text.split import SplitCorpus
from tinylm.text.token_files import ShardedTokens, TokenFolder, encode_to_folder, shard_name
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

KEY = "0123456789abcdef"
WORDS = random.Random(0).choices(["the", "cat", "sat", "on", "a", "mat,", "été", "1999", "\n"], k=3000)
DOCUMENTS = [" ".join(WORDS[start : start + 250]) for start in range(0, len(WORDS), 250)]
VAL = ["a do", "ran"]
ALPHABET = "".join(sorted(set("".join(DOCUMENTS + VAL))))
BPE, CHARACTERS = train_bpe(DOCUMENTS, 280), train_char(ALPHABET)


# Batches of 200 characters, in shards of 1,000 ids.
SMALL = TEXT_ENCODING._replace(batches=functools.partial(text_batches, size=200))
SHARD_TOKENS = 1000


def stream(documents: list[str] = DOCUMENTS, chunk: int = 300) -> Iterator[str | None]:
    """The documents in chunks of text."""
    for index, document in enumerate(documents):
        if index:
            yield None
        yield from (document[start : start + chunk] for start in range(0, len(document), chunk))


def ids_by_the_library(tokenizer: Tokenizer = BPE, documents: list[str] = DOCUMENTS) -> list[int]:
    """The ids of whole documents, each encoded at once by the tokenizers library, with the end-of-text id between."""
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    ids: list[int] = []
    for index, document in enumerate(documents):
        ids += [tokenizer.end_of_text_id] if index else []
        ids += library.encode(document).ids
    return ids


def encoded(
    folder: Path, train: Iterator[str | None] | None = None, tokenizer: Tokenizer = BPE, resumable: bool = True
) -> TokenFolder:
    parts = {"train": stream() if train is None else train, "val": stream(VAL)}
    options: Any = {"encoding": SMALL, "resumable": resumable, "shard_tokens": SHARD_TOKENS}
    return encode_to_folder(folder, KEY, parts.__getitem__, tokenizer, lambda size: None, **options)


def not_encoded(folder: Path, tokenizer: Tokenizer = BPE) -> TokenFolder:
    """The tokens of an existing folder; encoding is an error."""
    return encode_to_folder(folder, KEY, lambda part: pytest.fail("encoded again"), tokenizer, lambda size: None)


def reopened(folder: Path) -> TokenFolder:
    return TokenFolder.open(folder, KEY, BPE.vocab_size)


def contents(tokens: TokenFolder) -> tuple[list[int], list[int]]:
    return np.asarray(tokens.train).tolist(), np.asarray(tokens.val).tolist()


EXPECTED = (ids_by_the_library(), ids_by_the_library(documents=VAL))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(-35, 35), st.integers(-35, 35))
def test_slices_and_ids_equal_those_of_one_array(sizes: list[int], start: int, stop: int) -> None:
    ids = np.arange(100, 100 + sum(sizes), dtype=np.uint16)
    tokens = ShardedTokens(sizes, ids.dtype, np.split(ids, np.cumsum(sizes)[:-1]).__getitem__)
    assert len(tokens) == len(ids)
    for part in (slice(start, stop), slice(start, None), slice(None, stop)):
        assert (tokens[part].tolist(), tokens[part].dtype) == (ids[part].tolist(), ids.dtype)
    assert np.asarray(tokens).tolist() == ids.tolist()
    if -len(ids) <= start < len(ids):
        assert tokens[start] == ids[start]
    else:
        with pytest.raises(IndexError):
            tokens[start]


@pytest.mark.parametrize("tokenizer", [BPE, CHARACTERS], ids=["bpe", "char"])
def test_documents_are_joined_by_the_end_of_text_id_with_the_librarys_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    expected = (ids_by_the_library(tokenizer), ids_by_the_library(tokenizer, VAL))
    assert encode_in_memory(stream(), tokenizer).tolist() == expected[0]
    assert encode_in_memory(iter([]), tokenizer).tolist() == []
    first = encoded(tmp_path / "new", tokenizer=tokenizer)
    (tmp_path / "new").rename(tmp_path / "t")  # as a new run directory when its first save is complete
    again = not_encoded(tmp_path / "t", tokenizer)
    read = TokenFolder.open(tmp_path / "t", KEY, tokenizer.vocab_size, mapped=False)
    for tokens in (first, again, read):
        assert contents(tokens) == expected
        assert isinstance(tokens.train, ShardedTokens) == isinstance(tokens.val, np.memmap) == (tokens is not read)
        assert not tokens.val.flags.writeable
    names = {shard_name("train", number) for number in range(len(list((tmp_path / "t").glob("train*"))))}
    assert {path.name for path in (tmp_path / "t").iterdir()} == {"tokens.json", *names, "val.bin"} and len(names) > 2
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    with pytest.raises(TinyLMError, match="it is the encoding of another text"):
        TokenFolder.open(tmp_path / "t", KEY[::-1], tokenizer.vocab_size)


def test_ids_are_stored_in_the_smallest_type() -> None:
    names = {2: "uint8", 256: "uint8", 257: "uint16", 65_536: "uint16", 65_537: "uint32", 1 << 20: "uint32"}
    assert {vocab_size: np.dtype(parallel_encoding.smallest_dtype(vocab_size)).name for vocab_size in names} == names


def test_an_unknown_character_stops_encoding_without_leaving_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'x' \(U\+0078\)"):
        encoded(tmp_path / "t", iter(["axe"]), CHARACTERS, resumable=False)
    assert list(tmp_path.iterdir()) == []


def test_old_unfinished_folders_and_links_are_replaced_and_recent_folders_and_targets_stay(tmp_path: Path) -> None:
    for name, age in (
        ("old", 2 * token_files.STALE_SECONDS),
        ("being-written", 2 * token_files.STALE_SECONDS),
        ("young", 60.0),
    ):
        folder = tmp_path / f".{name}{token_files.UNFINISHED_SUFFIX}"
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"123")
        then = time.time() - age
        os.utime(folder / "train.bin", None if name == "being-written" else (then, then))
        os.utime(folder, (then, then))
    encoded(tmp_path / "t")
    assert {path.name.split(".")[-2] for path in tmp_path.iterdir() if path.name != "t"} == {"being-written", "young"}
    write_file(tmp_path / "target" / "file", "kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert contents(encoded(tmp_path / "link")) == EXPECTED and not (tmp_path / "link").is_symlink()
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]


def test_a_damaged_token_folder_is_refused_and_encoded_again(tmp_path: Path) -> None:
    encoded(tmp_path / "t")
    for name in ("train.bin", "train-00002.bin", "val.bin", "tokens.json"):
        file = tmp_path / "t" / name
        content = file.read_bytes()
        structures = (b"", b"[]", b"7", b'{"train": 1, "val": 2}', b'{"train": {}, "val": {}}')
        changes = (content[:-1], content[:-2], content + b"\1\1", None, "link")
        for change in (*changes, *(structures if name == "tokens.json" else ())):
            file.unlink()
            if change == "link":
                file.symlink_to(write_file(tmp_path / "elsewhere", content))
            elif change is not None:
                file.write_bytes(change)
            with pytest.raises(TinyLMError, match=r"is damaged \(.*\); delete that folder"):
                reopened(tmp_path / "t")
            if change in (None, "link", b"[]"):
                encoded(tmp_path / "t")
            else:
                file.write_bytes(content)
            assert contents(reopened(tmp_path / "t")) == EXPECTED


def test_a_flipped_bit_in_a_token_folder_never_changes_a_token(tmp_path: Path) -> None:
    """40 bits per file, and the bit that turns the recorded number of validation tokens, 8, into 0."""
    encoded(tmp_path / "t")
    for name in ("train.bin", "train-00001.bin", "val.bin", "tokens.json"):
        file = tmp_path / "t" / name
        content = file.read_bytes()
        bits = random.Random(0).sample(range(8 * len(content)), 40)
        bits += [8 * content.index(b": 8,") + 16 + 3] if name == "tokens.json" else []
        for bit in bits:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            try:
                found = contents(reopened(tmp_path / "t"))
            except TinyLMError:
                continue
            assert (name, found) == ("tokens.json", EXPECTED), bit
        file.write_bytes(content)


def test_an_id_outside_the_vocabulary_is_refused_at_any_place(tmp_path: Path) -> None:
    """The folder is forged: its index has the hash of the changed file. The ids are checked in chunks."""
    tokenizer = train_char("abc")
    documents = {"train": "abc", "val": "abc" * (token_files.CHECK_CHUNK // 3 + 2)}
    encode_to_folder(tmp_path / "t", KEY, lambda part: iter([documents[part]]), tokenizer, lambda size: None)
    file, index = tmp_path / "t" / "val.bin", tmp_path / "t" / "tokens.json"
    before, record = file.read_bytes(), index.read_text()
    assert len(before) > token_files.CHECK_CHUNK
    for place in (0, token_files.CHECK_CHUNK - 1, token_files.CHECK_CHUNK, len(before) - 1):
        after = before[:place] + bytes([tokenizer.vocab_size]) + before[place + 1 :]
        file.write_bytes(after)
        index.write_text(record.replace(*(hashlib.sha256(content).hexdigest() for content in (before, after))))
        with pytest.raises(TinyLMError, match=r"val\.bin has an id that is not in the vocabulary"):
            TokenFolder.open(tmp_path / "t", KEY, tokenizer.vocab_size)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ids of each token file that was hashed."""
    sizes: list[int] = []
    digest = hashlib.file_digest

    def counted(file: BinaryIO, kind: str) -> Any:
        sizes.append(os.fstat(file.fileno()).st_size // 2)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    return sizes


def test_a_shard_is_hashed_again_only_if_it_has_changed(hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder("tokens") / KEY
    encoded(folder)
    file = folder / "train-00001.bin"
    hashed.clear()
    expected = EXPECTED[0]
    assert np.asarray(reopened(folder).train).tolist() == expected
    assert hashed == [len(EXPECTED[1])]  # validation is one file
    os.utime(file, ns=(1, 1))
    hashed.clear()
    monkeypatch.setattr(token_files, "MAX_OPEN_SHARDS", 1)
    tokens = reopened(folder).train
    for _ in range(3):
        assert [tokens[0], tokens[1500]] == [expected[0], expected[1500]]
    assert len(hashed) == 2
    os.utime(file, ns=(2, 2))
    assert (tokens[0], tokens[1500], len(hashed)) == (expected[0], expected[1500], 3)
    status = file.stat()  # a changed content with the old modification time
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(TinyLMError, match=r"SHA-256 of train-00001\.bin differs"):
        np.asarray(reopened(folder).train)
    assert reopened(folder).train[:900].tolist() == expected[:900]  # a shard is checked when it is first read


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_shards_elsewhere_or_in_a_cache_that_others_can_write_are_hashed(tmp_path: Path, hashed: list[int]) -> None:
    folder = private_folder("tokens") / KEY
    for path in (folder, tmp_path / "t"):
        encoded(path)
    for path, writable in ((folder, folder.parent), (folder, folder), (tmp_path / "t", None)):
        if writable is not None:
            writable.chmod(0o777)
        hashed.clear()
        np.asarray(reopened(path).train)
        assert len(hashed) == 1 + len(list(folder.glob("train*")))
        if writable is not None:
            writable.chmod(0o700)


@pytest.mark.parametrize("name", ["val.bin", "tokens.json", "t"])
def test_a_failure_of_the_system_keeps_token_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded(tmp_path / "t")
    for number in (errno.EMFILE, errno.ESTALE, errno.EACCES, errno.EIO):

        def failing(path: Path, number: int = number, **options: bool) -> os.stat_result:
            if path.name == name:
                raise OSError(number, os.strerror(number), str(path))
            return os.stat(path, **options)  # noqa: PTH116, `Path.stat` is replaced

        with monkeypatch.context() as patch:
            patch.setattr(Path, "stat", failing)
            patch.setattr(Path, "lstat", lambda path, failing=failing: failing(path, follow_symlinks=False))
            with pytest.raises(TinyLMError, match=rf"Cannot read .*\({name}: {os.strerror(number)}\); it is kept"):
                not_encoded(tmp_path / "t")
    assert contents(reopened(tmp_path / "t")) == EXPECTED
    (tmp_path / "t" / "train.bin").write_bytes(b"")
    monkeypatch.setattr(token_files, "remove_tree", lambda path: None)
    with pytest.raises(TinyLMError, match=r"is damaged.*delete that folder"):
        not_encoded(tmp_path / "t")


def test_a_full_disk_keeps_complete_shards_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a failure of the system at the next attempt keeps them as well."""
    fsync, calls = os.fsync, 0

    def too_many(path: Path) -> BinaryIO:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:  # a shard and its index take two
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TinyLMError, match=r"No space left on device.*run the command again.*continues"):
            encoded(tmp_path / "t")
        assert {path.name for path in unfinished(tmp_path / "t").glob("*.bin")} >= {"train.bin", "train-00001.bin"}
        with pytest.raises(TinyLMError, match=r"No space left on device.*TINYLM_CACHE"):
            encoded(tmp_path / "once", resumable=False)
    assert [path.name for path in tmp_path.iterdir() if "once" in path.name] == []
    files = {file: file.stat().st_mtime_ns for file in unfinished(tmp_path / "t").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(token_files, "open_regular", too_many)
        with pytest.raises(TinyLMError, match="Too many open files"):
            encoded(tmp_path / "t")
    assert {file: file.stat().st_mtime_ns for file in unfinished(tmp_path / "t").iterdir()} == files
    assert contents(encoded(tmp_path / "t")) == EXPECTED


def test_the_key_depends_on_text_split_tokenizer_and_encoder() -> None:
    arguments = ("f", None, 100, CHARACTERS, "table")
    others = (
        ("g", *arguments[1:]),
        ("f", "g", *arguments[2:]),
        ("f", None, 101, *arguments[3:]),
        (*arguments[:3], train_char("abc"), "table"),
        (*arguments[:4], "gigatoken 0.10.0"),
    )
    assert len({token_files.token_key(*each) for each in (arguments, *others)}) == 6
    again = token_files.token_key(*arguments[:3], Tokenizer(CHARACTERS._library), "table")
    assert token_files.token_key(*arguments) == again


def interrupted(chunks: int) -> Iterator[str | None]:
    """The first chunks of the stream, then an interruption."""
    for number, chunk in enumerate(stream()):
        if number == chunks:
            raise KeyboardInterrupt
        yield chunk


def unfinished(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{token_files.UNFINISHED_SUFFIX}")


def test_an_interrupted_encoding_continues_after_its_last_complete_shard_or_starts_again(tmp_path: Path) -> None:
    for chunks, shards in ((10, 0), (25, 1), (47, 2)):
        folder = tmp_path / str(chunks) / "t"
        with pytest.raises(KeyboardInterrupt):
            encoded(folder, interrupted(chunks))
        index = unfinished(folder) / "tokens.json"
        complete = json.loads(index.read_text())["train"] if index.exists() else []
        assert len(complete) >= shards
        names = {shard_name("train", number) for number in range(len(complete))}
        assert {path.name for path in index.parent.glob("*.bin")} == names
        times = [(index.parent / name).stat().st_mtime_ns for name in sorted(names)]
        assert contents(encoded(folder)) == EXPECTED
        assert [(folder / name).stat().st_mtime_ns for name in sorted(names)] == times
        assert [path.name for path in folder.parent.iterdir()] == ["t"]
    for change in ("key", "version", "size", "count", "nonsense"):
        folder = tmp_path / change
        with pytest.raises(KeyboardInterrupt):
            encoded(folder, interrupted(47))
        index = unfinished(folder) / "tokens.json"
        record = json.loads(index.read_text())
        if change in ("key", "version"):
            record[change] += "x"
        elif change == "count":
            record["train"][1]["batches"] = "7"
        elif change == "size":
            (index.parent / "train.bin").write_bytes(b"")
        index.write_text("[" if change == "nonsense" else json.dumps(record))
        assert contents(encoded(folder)) == EXPECTED, change


class Interrupted(SplitCorpus):
    """A text of any length whose reading is interrupted."""

    def stream(self, part: str) -> Iterator[str | None]:
        return interrupted(47)


def test_an_interrupted_run_says_that_it_will_continue_if_its_text_is_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    split = split_of(write_file(tmp_path / "text.txt", "\n".join(DOCUMENTS)))
    caplog.set_level(logging.INFO)
    for characters in (token_files.SHARD_TOKENS - 1, token_files.SHARD_TOKENS):
        assert caplog.messages == []
        stats = replace(split.stats, characters=characters)
        with pytest.raises(KeyboardInterrupt):
            encode_text(Interrupted(split.corpora, (stats,), 1, 0.5), BPE, tmp_path / "run", LogReporter())
    assert caplog.messages == ["Complete token files are kept: the same command continues the encoding."]


def test_another_process_with_the_same_text_does_not_share_the_unfinished_folder(tmp_path: Path) -> None:
    def slow() -> Iterator[str | None]:
        for number, chunk in enumerate(stream()):
            if number == 30:
                encoded(tmp_path / "t")
            yield chunk

    assert np.asarray(encoded(tmp_path / "t", slow()).train).tolist() == EXPECTED[0]
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
def test_a_lock_file_deleted_while_locked_permits_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held the lock deletes the file after this one has opened it, and a third process locks anew."""
    import fcntl

    flock, third = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not third:
            (tmp_path / ".t.lock").unlink()
            third.append((tmp_path / ".t.lock").open("w"))
            flock(third[0], fcntl.LOCK_EX)
        flock(descriptor, operation)

    def text() -> Iterator[str | None]:
        assert not unfinished(tmp_path / "t").exists()
        yield from stream()

    monkeypatch.setattr(fcntl, "flock", late)
    assert np.asarray(encoded(tmp_path / "t", text()).train).tolist() == EXPECTED[0]
    third[0].close()


def test_the_ids_do_not_depend_on_the_number_of_processes() -> None:
    """Once gigatoken has given other ids than the library on a sample, no process uses it."""
    checked = Tokenizer(tokenizers.Tokenizer.from_str(BPE.to_str()))
    assert checked._gigatoken is not None
    checked._gigatoken.usable = False
    copy = checked.__reduce__()[0](*checked.__reduce__()[1])
    assert copy._gigatoken is not None and not copy._gigatoken.usable
    assert (copy.sha256, copy.encoder) == (checked.sha256, checked.encoder)
    for tokenizer in (BPE, checked):
        batches = SMALL.batches(stream(), tokenizer)  # processes encode all but the first
        encoded = encode_batches(batches, SMALL.encode, tokenizer, np.uint16, workers=2, processes_from=1)
        assert np.concatenate([ids for ids, _ in encoded]).tolist() == ids_by_the_library(tokenizer)
    assert not multiprocessing.active_children()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_killed_process_is_an_error_and_not_a_hang() -> None:
    class Deadly:
        """Ends the process that receives it, as the out-of-memory killer does."""

        def __reduce__(self) -> Any:
            return signal.raise_signal, (signal.SIGKILL,)

    batches = iter([TextBatch(["text"], 1), *[TextBatch(Deadly(), 1)] * 3])
    with pytest.raises(TinyLMError, match="was killed, probably because memory ran out"):
        list(encode_batches(batches, SMALL.encode, BPE, np.uint16, workers=2, processes_from=1))
    assert not multiprocessing.active_children()


# It has no guard of its main module: new processes do not import it, which would start it again.
SCRIPT = """
import functools, sys, time
from pathlib import Path
from tests.text.test_token_files import BPE, KEY, SMALL, stream
from tinylm.system.process_signals import run_with_signal_handlers
from tinylm.text import parallel_encoding, token_files
by_processes = functools.partial(parallel_encoding.encode_batches, workers=2, processes_from=1)
token_files.encode_batches = by_processes

def endless():
    while True:
        yield from stream()
        yield None
        time.sleep(0.01)
        print("more", flush=True)

def encode():
    options = {"encoding": SMALL, "resumable": True, "shard_tokens": 1000}
    token_files.encode_to_folder(Path(sys.argv[1]), KEY, lambda part: endless(), BPE, lambda n: None, **options)

run_with_signal_handlers(encode)
"""


def processes_of(parent: int) -> set[int]:
    """The ids of the child processes of a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{parent}/task").glob("*/children"):
        found |= set(map(int, task.read_text().split()))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize("to", ["parent", "all"])
def test_the_processes_end_with_their_parent_and_its_shards_stay(to: str, tmp_path: Path) -> None:
    """Killed, or interrupted with Ctrl-C, which all processes of a terminal receive."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "t")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_process(command, cwd=ROOT, preexec_fn=default_signals, **pipes) as child:
        assert child.stdout is not None
        while not (index := unfinished(tmp_path / "t") / "tokens.json").exists():
            assert child.stdout.readline()
        assert len(processes_of(child.pid)) >= 2
        if to == "parent":
            child.kill()
        else:
            os.killpg(child.pid, signal.SIGINT)
        child.stdout.read()  # ends when no process has it open
        assert child.wait(timeout=60) == -(signal.SIGKILL if to == "parent" else signal.SIGINT)
        assert child.stderr is not None and "Traceback" not in child.stderr.read()
    assert json.loads(index.read_text())["train"]
