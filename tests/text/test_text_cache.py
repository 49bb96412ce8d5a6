"""Statistics and tokenizers that are kept in the cache, and when they are not used."""

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.text.corpora import split_of, write_file, write_pairs
from tinylm.jobs.run_tokens import encode_split
from tinylm.system import files
from tinylm.system.files import cache_root
from tinylm.text import text_cache
from tinylm.text.corpus import Corpus, CorpusStats, find_corpus
from tinylm.text.text_cache import scan_or_recall
from tinylm.text.tokenizer import train_char
from tinylm.text.tokenizer_choice import choose_tokenizer, corpus_without_unknown


@pytest.fixture(autouse=True)
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are kept for texts of 100 bytes and more, also for files that were just written."""
    monkeypatch.setattr(text_cache, "KEEP_FROM", 100)
    monkeypatch.setattr(files, "SETTLED_SECONDS", -3600.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Corpus]:
    """The corpora that were read, one entry per pass."""
    passes: list[Corpus] = []
    stream = Corpus.stream

    def counted(corpus: Corpus, *arguments: Any) -> Iterator[str | None]:
        passes.append(corpus)
        return stream(corpus, *arguments)

    monkeypatch.setattr(Corpus, "stream", counted)
    return passes


def scanned(*paths: Path, **settings: Any) -> CorpusStats:
    return scan_or_recall(find_corpus([str(path) for path in paths], **settings), lambda size: None)


def kept() -> list[Path]:
    return sorted((cache_root() / "texts").glob("*.json"))


def test_the_second_scan_reads_nothing_and_reports_all_bytes(corpus: Path, reads: list[Corpus]) -> None:
    """Unless the result is damaged."""
    first = scanned(corpus)
    progress: list[int] = []
    again = scan_or_recall(find_corpus([str(corpus)]), progress.append)
    assert len(reads) == 1
    assert (again, again.sample) == (first, first.sample)
    assert sum(progress) == corpus.stat().st_size
    (file,) = kept()
    content = file.read_bytes()
    flipped = (content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in range(0, len(content), 7))
    for damaged in (b"", b"[]", b"7", b"null", content[:-1], b"\xff", *flipped):
        file.write_bytes(damaged)
        assert scanned(corpus) == first


def test_a_changed_text_is_read_again(corpus: Path, other: Path) -> None:
    first = scanned(corpus)
    for paths, settings, same in (
        ([other], {}, False),
        ([corpus, other], {}, False),
        ([corpus], {"format": "lines"}, False),
        ([corpus], {"encoding": "latin-1"}, True),
    ):
        expected = find_corpus([str(path) for path in paths], **settings).scan()
        assert scanned(*paths, **settings) == expected
        assert (expected == first) == same
    status = corpus.stat()
    for touch in (lambda: None, lambda: os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))):
        before = scanned(corpus)
        corpus.write_text(corpus.read_text()[::-1])  # of the same length
        touch()
        assert scanned(corpus) == find_corpus([str(corpus)]).scan() != before


def test_short_or_filtered_texts_are_read_again(corpus: Path, tmp_path: Path) -> None:
    for text in (
        find_corpus([str(write_file(tmp_path / "short.txt", "x" * 99))]),
        write_pairs(tmp_path / "p.tsv", "a\tb\n" * 99),
        corpus_without_unknown(find_corpus([str(corpus)]), train_char("Tthe c")),
        Corpus(("-",), (corpus,)),
    ):
        scan_or_recall(text, lambda size: None)
    assert kept() == []
    short = write_file(tmp_path / "a.txt.gz", gzip.compress(b"abc " * 1000))
    assert short.stat().st_size < 100  # but its content is long
    scanned(short)
    assert len(kept()) == 1


def test_without_a_usable_result_a_text_is_read_each_time(
    corpus: Path, reads: list[Corpus], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:  # a file just written could change once more within the resolution of its time
        patch.setattr(files, "SETTLED_SECONDS", 60.0)
        assert scanned(corpus) == scanned(corpus)
    assert len(reads) == 2
    assert scanned(corpus) == scanned(corpus) and len(reads) == 3
    (file,) = kept()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")  # is not followed
    assert scanned(corpus) and len(reads) == 4
    monkeypatch.setenv("TINYLM_CACHE", str(corpus / "cache"))  # cannot be created
    assert scanned(corpus) == scanned(corpus) and len(reads) == 6


def test_a_bpe_tokenizer_is_trained_once_for_a_text_and_its_settings(corpus: Path, reads: list[Corpus]) -> None:
    split = split_of(corpus)
    first = choose_tokenizer(split, "bpe", 290)
    tokens, data = encode_split(split, first)
    assert len(reads) == 4
    split = split_of(corpus)
    again = choose_tokenizer(split, "bpe", 290)
    assert again.sha256 == first.sha256
    tokens_again, data_again = encode_split(split, again)
    assert (tokens_again.train.tolist(), data_again) == (tokens.train.tolist(), data)
    assert len(reads) == 4  # a second run on an encoded text reads none of it
    assert choose_tokenizer(split, "bpe", 280).sha256 != first.sha256
    choose_tokenizer(split_of(corpus, fraction=0.5), "bpe", 290)
    assert len(reads) == 6
