"""The token files of an existing run: open them, or encode the text of the run again."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinylm.config.run import DataConfig, RunConfig, run_of
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.encoding import MIN_TOKENS, encode_split
from tinylm.jobs.job import job_on
from tinylm.reporter import Reporter
from tinylm.system.cache_directory import private_folder
from tinylm.text.corpus import STANDARD_INPUT, Corpus, find_corpus
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.source import TextSource
from tinylm.text.split import SplitCorpus, corpus_without_unknown, scan_corpus
from tinylm.text.token_files import TokenFolder, open_part, token_key
from tinylm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RunReader:
    """A Reader of the text of a run, with its recorded settings, its chat template and its labels."""

    config: RunConfig
    tokenizer: Tokenizer
    adds_tokens: bool = False

    @property
    def data(self) -> DataConfig:
        """The recorded text."""
        assert self.config.data is not None
        return self.config.data

    @property
    def labels(self) -> tuple[str, ...]:
        """Those of the model."""
        return self.config.labels

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """The kind of the run's data."""
        return (self.data.kind,)

    @property
    def chat_template(self) -> str:
        """That of the run, if its data are conversations. Raises TinyLMError for a run without one."""
        if self.config.tokenizer.chat_template is None:
            raise TinyLMError("The run was trained on conversations, but has no chat template.")
        return self.config.tokenizer.chat_template


def find_run_corpus(paths: tuple[str, ...], reader: RunReader) -> Corpus:
    """Find the corpus at `paths`, to be read with the recorded settings of a run.

    Raises the errors of `find_corpus`, and TinyLMError for a run on conversations without a valid template.
    """
    data, job = reader.data, job_on(reader.data.kind)
    own = job.fields(TextSource(paths=paths, train_on=data.train_on), reader)
    fields = {"exclude": data.exclude, "skip_bad": data.skip_bad, "labels": reader.labels, **own}
    corpus = find_corpus(paths, data.text_key, data.encoding, None, job.corpus, data.format, **fields)
    return corpus_without_unknown(corpus, reader.tokenizer) if data.unknown == "skip" else corpus


def reopen_tokens(run: Path, data: DataConfig, tokenizer: Tokenizer) -> TokenFolder:
    """Open the token files of a run, in the run directory or in the cache.

    The corpus paths in `data` are not opened, since an untrusted run could name any file. Raises TinyLMError if the
    token files are missing or damaged.
    """
    train, val = (reopen_part(run, data, tokenizer, part) for part in ("train", "val"))
    return TokenFolder(_locate_tokens(run, data, tokenizer)[0], train, val)


def reopen_part(run: Path, data: DataConfig, tokenizer: Tokenizer, part: str, *, trust_mtime: bool = False) -> Tokens:
    """Open one part, "train" or "val", of the token files of a run: (N,), read-only. `trust_mtime`: see `open_part`.

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
    ids = open_part(folder, part, key, codes, trust_mtime=trust_mtime)
    if len(ids) != (data.train_tokens if part == "train" else data.val_tokens) or len(ids) < MIN_TOKENS[part]:
        raise TinyLMError(f"The encoded text in {folder} does not belong to {run}; delete that folder.")
    return ids


def reopen_ids(run: Path, data: DataConfig, tokenizer: Tokenizer, part: str, *, trust_mtime: bool = False) -> Tokens:
    """As `reopen_part`, but returns token ids in place of codes."""
    codes = reopen_part(run, data, tokenizer, part, trust_mtime=trust_mtime)
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


def has_tokens(run: Path, data: DataConfig, tokenizer: Tokenizer) -> bool:
    """Whether the token folder of a run exists; its content is not checked."""
    try:
        return _locate_tokens(run, data, tokenizer)[0].is_dir()
    except TinyLMError:  # the cache cannot be used
        return False


def _locate_tokens(run: Path, data: DataConfig, tokenizer: Tokenizer) -> tuple[Path, str]:
    """The token folder of a run and its key. Raises TinyLMError if the folder is in a cache that cannot be used."""
    key = _key(data, tokenizer)
    return (run_of(run) / "tokens" if data.tokens_in_run else private_folder("tokens") / key), key


def _key(data: DataConfig, tokenizer: Tokenizer) -> str:
    return token_key(
        data.fingerprint, data.val_fingerprint, data.train_characters, tokenizer, data.encoder, data.val_records
    )


def encode_again(
    run: Path,
    data: DataConfig,
    tokenizer: Tokenizer,
    corpus: Corpus,
    val_corpus: Corpus | None,
    reporter: Reporter,
) -> TokenFolder:
    """Encode the text of a run whose token files are no longer in the cache, into the same folder as before.

    Raises UsageError unless `corpus` and `val_corpus` are the texts that the run was trained on, and TinyLMError if the
    number of tokens differs from the recorded one or the token files cannot be written.
    """
    with reporter.counting("reading", corpus.size + (val_corpus.size if val_corpus else 0), "bytes") as advance:
        stats = scan_corpus(corpus, advance)
        val_stats = scan_corpus(val_corpus, advance) if val_corpus else None
    for name, part_stats, recorded in (
        (corpus.name, stats, data.fingerprint),
        (val_corpus.name if val_corpus else "The validation text", val_stats, data.val_fingerprint),
    ):
        if (part_stats.fingerprint if part_stats else None) != recorded:
            raise UsageError(
                f"{name} is not the text that {run} was trained on, or has changed since. Restore it, or start a new "
                "run from the weights of this one."
            )
    if corpus.kind != Corpus.kind and val_corpus is None and not data.val_records:
        raise TinyLMError(
            f"{run} was trained by an older version, which split the text in another way. Start a new run from the "
            "weights of this one."
        )
    split = SplitCorpus(corpus, stats, val_corpus, val_stats, data.train_characters, val_records=data.val_records)
    folder = run / "tokens" if data.tokens_in_run else None
    with reporter.counting("encoding", split.characters, "characters") as advance:
        tokens, _ = encode_split(split, tokenizer, folder, advance, encoder=data.encoder)
    if (len(tokens.train), len(tokens.val)) != (data.train_tokens, data.val_tokens):
        raise TinyLMError(
            f"The text no longer has as many tokens as {run} recorded, which were encoded by {data.encoder}. Install "
            "that version, or start a new run from the weights of this one."
        )
    return tokens


def encode_recorded_text(
    run: Path, reader: RunReader, paths: tuple[str, ...], val_data: str | None, reporter: Reporter
) -> TokenFolder:
    """Encode the text of a run whose token files are no longer in the cache, from these paths.

    Raises UsageError unless they are the text that the run was trained on, and TinyLMError as `encode_again` does.
    """
    if STANDARD_INPUT in (*paths, val_data):
        raise UsageError("With `resume`, the text is read from files; put standard input into a file.")
    data = reader.data
    corpus = find_run_corpus(paths, reader)
    val_corpus = None if val_data is None else find_run_corpus((val_data,), reader)
    if val_corpus is None and data.val_fingerprint == data.fingerprint:
        val_corpus = corpus
    return encode_again(run, data, reader.tokenizer, corpus, val_corpus, reporter)
