"""What is computed from texts and kept in the cache of the user: statistics and tokenizers of long texts, JSON values.

The key of cached statistics contains the paths, sizes, times and inodes of the files; that of a tokenizer, the
fingerprint of the text. So a run on a text that was encoded before starts without reading the text (decision 029).
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tokenizers

from tinylm import __version__
from tinylm.config.run import SpecialTokens
from tinylm.config.validation import from_json
from tinylm.errors import TinyLMError
from tinylm.system.files import file_state, is_settled, private_folder, read_json, write_text
from tinylm.text.corpus import Corpus, CorpusStats
from tinylm.text.files import STANDARD_INPUT, Progress
from tinylm.text.tokenizer import Tokenizer

KEEP_FROM = 1 << 26  # bytes in UTF-8; shorter texts are read again
MAX_BYTES = 1 << 26  # of a file in the cache


def scan_or_recall(corpus: Corpus, progress: Progress) -> CorpusStats:
    """The statistics of `corpus.scan`, from the cache if no file has changed since.

    Statistics of a text below KEEP_FROM bytes are not cached, nor are those of pairs, conversations, standard input or
    a corpus that drops unknown characters. `progress` and errors as for `Corpus.stream`.
    """
    if type(corpus) is not Corpus or corpus.drop_unknown is not None or STANDARD_INPUT in corpus.paths:
        return corpus.scan(progress)
    identity, settled = _identity(corpus)
    if (found := _recall(identity)) is not None:
        with contextlib.suppress(TypeError, ValueError):
            stats: CorpusStats = from_json(CorpusStats, found)
            progress(corpus.size)
            return stats
    stats = corpus.scan(progress)
    if stats.bytes >= KEEP_FROM and settled and _identity(corpus)[0] == identity:
        _keep(identity, asdict(stats))
    return stats


def train_or_recall(stats: CorpusStats, settings: list[Any], train: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer that `train` returns, or an equal one from the cache, for a text of KEEP_FROM bytes or more.

    settings: JSON values on which the tokenizer depends besides the text.
    """
    if stats.bytes < KEEP_FROM:
        return train()
    identity = ["tokenizer", tokenizers.__version__, stats.fingerprint, *settings]
    file = remember(identity, lambda: train().to_str())
    return Tokenizer.parse(file, SpecialTokens(), Path("tokenizer.json"))


def remember(identity: list[Any], compute: Callable[[], Any]) -> Any:
    """The JSON value that `compute` returns, or an equal one from the cache. identity: JSON values it depends on."""
    identity = [__version__, *identity]
    value = _recall(identity)
    if value is None:
        value = compute()
        _keep(identity, value)
    return value


def _identity(corpus: Corpus) -> tuple[list[Any], bool]:
    """The identity of the scanned files and settings, as JSON values, and whether all files are settled."""
    files = [(os.path.abspath(file), file.stat()) for file in corpus.files]  # noqa: PTH100, keeps links
    states = [(name, file_state(status)) for name, status in files]
    settings = [corpus.text_key, corpus.encoding, corpus.format]
    return ["text with line feeds", __version__, settings, states], all(is_settled(status) for _, status in files)


def _file(identity: list[Any]) -> Path:
    """The path of the cache file of an identity. Raises TinyLMError if the cache cannot be used."""
    return private_folder("texts") / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]}.json"


def _recall(identity: list[Any]) -> Any:
    """The cached value, or `None` if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, TinyLMError):
        content = read_json(_file(identity), MAX_BYTES)
        text = json.dumps(content["value"])
        if content["sha256"] == hashlib.sha256(text.encode()).hexdigest():
            return content["value"]
    return None


def _keep(identity: list[Any], value: Any) -> None:
    """Write a JSON value to the cache; errors are ignored."""
    digest = hashlib.sha256(json.dumps(value).encode()).hexdigest()
    with contextlib.suppress(OSError, TinyLMError):
        write_text(_file(identity), json.dumps({"sha256": digest, "value": value}))
