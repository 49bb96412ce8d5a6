"""Texts in files, and the documents of corpora that are read from them."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tinylm.errors import UsageError
from tinylm.jobs.pairs.corpus import PairCorpus
from tinylm.text.chat import KEYS, Conversation, parse_conversation
from tinylm.text.corpus import Stream, find_corpus
from tinylm.text.files import no_progress
from tinylm.text.readers import records
from tinylm.text.split import SplitCorpus, split_corpus

TEXT = "The cat sat on the mat, and the dog did not.\n" * 4
PAIRS = [("abc", "ij"), ("d", "hgf"), ("a b", "j"), ("efgh", "iiii")]


def write_file(path: Path, content: bytes | str) -> Path:
    """Write a file, and the folders that it is in; text is encoded as UTF-8. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def require_errors(
    function: Callable[..., object],
    rows: Iterable[tuple[Any, ...]],
    error: type[Exception] | tuple[type[Exception], ...] = UsageError,
) -> None:
    """For each row of arguments and a pattern, the function must raise an error with this pattern."""
    wrong, rows = [], list(rows)
    assert rows
    for *arguments, pattern in rows:
        try:
            wrong.append(f"{arguments!r:.200}: no error with {pattern}, but {function(*arguments)!r:.200}")
        except error as raised:
            if not re.search(pattern, str(raised)):
                wrong.append(f"{arguments!r:.200}: {raised} (expected: {pattern})")
    assert not wrong, "\n".join(wrong)


def documents_of(stream: Stream) -> list[str]:
    """The documents of a stream, which must have a separator between two documents and nowhere else."""
    documents, after_separator = [""], True
    for chunk in stream:
        if chunk is None:
            assert not after_separator
            documents.append("")
        else:
            assert chunk
            documents[-1] += chunk
        after_separator = chunk is None
    assert not after_separator or documents == [""]
    return documents if documents != [""] else []


def read_documents(*paths: Path, **settings: Any) -> list[str]:
    """The documents in files and folders; `settings` as for `find_corpus`."""
    return documents_of(find_corpus([str(path) for path in paths], **settings).stream())


def split_of(*files: Path, val: Path | None = None, fraction: float = 0.25) -> SplitCorpus:
    """The files as one corpus, split into training and validation text."""
    parts = [files, (val,)] if val else [files]
    return split_corpus([find_corpus(map(str, part)) for part in parts], fraction)


def write_pairs(path: Path, content: str) -> PairCorpus:
    """Write a file of pairs, as TSV or JSONL, and return its corpus."""
    corpus = find_corpus([str(write_file(path, content))], corpus_type=PairCorpus)
    assert isinstance(corpus, PairCorpus)
    return corpus


def read_conversations(file: Path) -> list[Conversation]:
    """The conversations of a JSON or Parquet file."""
    return [parse_conversation(record, location) for location, record in records(file, "utf-8", KEYS, no_progress)]


def tsv(pairs: list[tuple[str, str]]) -> str:
    """One line per pair."""
    return "".join(f"{source}\t{target}\n" for source, target in pairs)
