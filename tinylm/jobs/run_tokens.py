"""The token files of an existing run: open them, or encode the text of the run again."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from tinylm.config.run import DataConfig, RunConfig, run_of
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.encoding import MIN_TOKENS, encode_split
from tinylm.jobs.job import job_on
from tinylm.jobs.reading import ModelReader
from tinylm.reporter import Reporter
from tinylm.system.files import private_folder
from tinylm.text.compression import STANDARD_INPUT
from tinylm.text.corpus import Corpus, find_corpus
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.source import TextSource
from tinylm.text.split import SplitCorpus
from tinylm.text.text_cache import scan_or_recall
from tinylm.text.token_files import TokenFolder, open_part, token_key
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.unknown_characters import corpus_without_unknown


def reopen_tokens(run: Path, data: DataConfig, tokenizer: Tokenizer) -> TokenFolder:
    """Open the token files of a run, in the run directory or in the cache.

    The corpus paths in `data` are not opened, since an untrusted run could name any file. Raises TinyLMError if the
    token files are missing or damaged.
    """
    train, val = (reopen_part(run, data, tokenizer, part) for part in ("train", "val"))
    return TokenFolder(_locate_tokens(run, data, tokenizer)[0], train, val)


def reopen_part(run: Path, data: DataConfig, tokenizer: Tokenizer, part: str) -> Tokens:
    """Open one part, "train" or "val", of the token files of a run: (N,), read-only.

    For conversations, the result is codes (see `tinylm.jobs.chat.corpus`), while `reopen_ids` returns ids. Raises
    TinyLMError if the part is missing or damaged.
    """
    folder, key = _locate_tokens(run, data, tokenizer)
    if not os.path.lexists(folder):
        recorded = ", ".join(("standard input" if path == STANDARD_INPUT else path) for path in data.corpus)
        raise TinyLMError(
            f"The encoded text of {run} is no longer in the cache; name its training text again, together with "
            f"`resume` (the run recorded the path {recorded[:200]})."
        )
    codes = job_on(data.kind).encoding.codes(tokenizer.vocab_size)
    ids = open_part(folder, part, key, codes)
    if len(ids) != (data.train_tokens if part == "train" else data.val_tokens) or len(ids) < MIN_TOKENS[part]:
        raise TinyLMError(f"The encoded text in {folder} does not belong to {run}; delete that folder.")
    return ids


def reopen_ids(run: Path, data: DataConfig, tokenizer: Tokenizer, part: str) -> Tokens:
    """The token ids of one part: (N,). Arguments and errors are those of `reopen_part`."""
    codes = reopen_part(run, data, tokenizer, part)
    codes_per_id = job_on(data.kind).encoding.codes_per_id
    return np.asarray(codes) // codes_per_id if codes_per_id > 1 else codes


def open_folder(folder: Path, data: DataConfig, tokenizer: Tokenizer) -> TokenFolder:
    """Open the token folder of a run at the path where another process of the same run has opened it.

    Raises TinyLMError if this machine has no such folder, or if it is damaged.
    """
    if not os.path.lexists(folder):
        raise TinyLMError(
            f"The encoded text in {folder} is not on this machine. All machines of a run need a file system in common: "
            "set TINYLM_CACHE to a folder on it."
        )
    return TokenFolder.open(folder, _key(data, tokenizer), job_on(data.kind).encoding.codes(tokenizer.vocab_size))


def _locate_tokens(run: Path, data: DataConfig, tokenizer: Tokenizer) -> tuple[Path, str]:
    """The token folder of a run and its key. Raises TinyLMError if the folder is in a cache that cannot be used."""
    key = _key(data, tokenizer)
    return (run_of(run) / "tokens" if data.tokens_in_run else private_folder("tokens") / key), key


def _key(data: DataConfig, tokenizer: Tokenizer) -> str:
    return token_key(
        data.fingerprint, data.val_fingerprint, data.train_characters, tokenizer, data.encoder, data.val_records
    )


def encode_recorded_text(
    run: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    paths: tuple[str, ...],
    val_data: str | None,
    reporter: Reporter,
) -> TokenFolder:
    """Encode the text of a run whose token files are no longer in the cache, into the same folder as before.

    The text is read from these paths with the recorded settings. Raises UsageError unless it is the text that the run
    was trained on, the errors of `find_corpus`, and TinyLMError for a run on conversations without a valid template, if
    the number of tokens differs from the recorded one, and if the token files cannot be written.
    """
    # Find the files
    if STANDARD_INPUT in (*paths, val_data):
        raise UsageError("With `resume`, the text is read from files; put standard input into a file.")
    data = config.data
    assert data is not None
    reader = ModelReader((data.kind,), config.labels, tokenizer, config.tokenizer.chat_template)
    job = job_on(data.kind)
    fields: dict[str, Any] = {"exclude": data.exclude, "skip_bad": data.skip_bad, "labels": config.labels}
    fields |= job.fields(TextSource(paths=paths, train_on=data.train_on), reader)
    if fields.get("chat") is not None and reader.chat_template is None:
        raise TinyLMError("The run was trained on conversations, but has no chat template.")
    corpora = []
    for part in [paths] if val_data is None else [paths, (val_data,)]:
        corpus = find_corpus(part, data.text_key, data.encoding, None, job.corpus, data.format, **fields)
        corpora.append(corpus_without_unknown(corpus, tokenizer) if data.unknown == "skip" else corpus)

    # Read them, and compare the text with that of the run
    with reporter.counting("reading", sum(corpus.size for corpus in corpora), "bytes") as advance:
        all_stats = [scan_or_recall(corpus, advance) for corpus in corpora]
    on_itself = val_data is None and data.val_fingerprint == data.fingerprint
    split = SplitCorpus(
        tuple(corpora), tuple(all_stats), data.train_characters, None, data.val_records, validates_on_itself=on_itself
    )
    for name, stats, recorded in (
        (split.corpus.name, split.stats, data.fingerprint),
        (split.val_corpus.name if split.val_corpus else "The validation text", split.val_stats, data.val_fingerprint),
    ):
        if (stats and stats.fingerprint) != recorded:
            raise UsageError(
                f"{name} is not the text that {run} was trained on, or has changed since. Restore it, or start a new "
                "run from the weights of this one."
            )
    if split.corpus.kind != Corpus.kind and split.val_corpus is None and not data.val_records:
        raise TinyLMError(
            f"{run} was trained by an older version, which split the text in another way. Start a new run from the "
            "weights of this one."
        )

    # Encode it
    folder = run / "tokens" if data.tokens_in_run else None
    with reporter.counting("encoding", split.characters, "characters") as advance:
        tokens, _ = encode_split(split, tokenizer, folder, advance, encoder=data.encoder)
    if (len(tokens.train), len(tokens.val)) != (data.train_tokens, data.val_tokens):
        raise TinyLMError(
            f"The text no longer has as many tokens as {run} recorded, which were encoded by {data.encoder}. Install "
            "that version, or start a new run from the weights of this one."
        )
    return tokens
