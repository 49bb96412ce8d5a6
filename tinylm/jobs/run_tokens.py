"""The tokens of a run: encode its text into token files, open these, or encode the text again."""

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinylm.config.jobs import rows_on
from tinylm.config.run import DataConfig, RunConfig, run_of
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.job import job_on
from tinylm.jobs.reading import ModelReader
from tinylm.reporter import Reporter, counted
from tinylm.system.files import private_folder
from tinylm.text.corpus import Corpus, find_corpus
from tinylm.text.file_selection import TextSource
from tinylm.text.files import SPOOL_FILE, STANDARD_INPUT, Progress, no_progress
from tinylm.text.parallel_encoding import Encoding
from tinylm.text.split import SplitCorpus
from tinylm.text.text_cache import scan_or_recall
from tinylm.text.token_files import SHARD_TOKENS, TokenFolder, Tokens, encode_to_folder, open_part, token_key
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.tokenizer_choice import corpus_without_unknown

MIN_TOKENS = {"train": 3, "val": 2}  # per part
MAX_COMPARED = 1 << 26  # tokens of a training text whose records are compared with those for validation

Warn = Callable[[str], None]


def encode_text(
    split: SplitCorpus, tokenizer: Tokenizer, staging: Path, reporter: Reporter
) -> tuple[TokenFolder, DataConfig]:
    """Encode both parts into the cache, or, for text from standard input, into tokens/ of the new run in `staging`.

    The copy of standard input there is deleted. Raises UsageError if either part is too short, and TinyLMError if
    the token files cannot be written.
    """
    # Encode
    piped = any(STANDARD_INPUT in corpus.paths for corpus in split.corpora)
    folder = staging / "tokens" if piped else None
    with reporter.counting("encoding", split.characters, "characters") as advance:
        try:
            tokens, data = encode_split(split, tokenizer, folder, advance, reporter.warn)
        except BaseException as error:
            if not isinstance(error, Exception) and _is_resumable(split, folder):
                reporter.note("Complete token files are kept: the same command continues the encoding.")
            raise
    if piped:
        (staging / SPOOL_FILE).unlink()
    job = job_on(split.corpus.kind)
    job.report_encoded(split, tokens, reporter)

    # Count the records for validation that are training records, too. The labels of texts may differ
    if split.corpus.is_records and not split.validates_on_itself and len(tokens.train) <= MAX_COMPARED:
        end = tokenizer.end_of_text_id
        train, val = (list(job.record_ids(part, split.corpus, end)) for part in (tokens.train, tokens.val))
        repeated = set(val).intersection(train)
        if count := sum(record in repeated for record in val):
            name = rows_on(split.corpus.kind)[0].records
            reporter.note(
                f"{count:,} of {len(val):,} {name} for validation are training {name}, too, and do not show what the "
                "model learns beyond these; leave out duplicates."
            )
    return tokens, data


def encode_split(
    split: SplitCorpus,
    tokenizer: Tokenizer,
    folder: Path | None = None,
    progress: Progress = no_progress,
    warn: Warn = lambda message: None,
    encoder: str | None = None,
) -> tuple[TokenFolder, DataConfig]:
    """Encode both parts into the token folder `folder`, by default one in the cache.

    `progress` receives the number of characters encoded, and `warn` a message if the ids of the encoder differ from
    those of the `tokenizers` library on a sample of the text. `encoder` replaces the name of the tokenizer's encoder in
    the key, to encode the text of a run again. Returns the token folder and the description of the text. Raises
    UsageError if either part is too short, and the errors of `encode_to_folder`.
    """
    # Encode
    corpus, stats, job = split.corpus, split.stats, job_on(split.corpus.kind)
    check_encoder(tokenizer, job.encoding, [text for each in split.all_stats for text in each.sample], warn)
    encoder = encoder or (tokenizer.encoder_with_special if job.encoding.has_special else tokenizer.encoder)
    val_fingerprint = split.val_stats.fingerprint if split.val_stats else None
    key = token_key(stats.fingerprint, val_fingerprint, split.train_characters, tokenizer, encoder, split.val_records)
    tokens = encode_to_folder(
        folder or private_folder("tokens") / key,
        key,
        split.documents,
        tokenizer,
        progress,
        encoding=job.encoding,
        # Windows cannot rename a folder that contains a mapped file, and a new run directory is renamed when complete.
        mapped=folder is None or os.name != "nt",
        resumable=_is_resumable(split, folder),
    )

    # Check the lengths
    sizes = {"train": len(tokens.train), "val": len(tokens.val)}
    if split.val_corpus not in (None, corpus) and sizes["val"] < MIN_TOKENS["val"]:
        raise UsageError(
            f"{split.val_corpus.name} has {sizes['val']} token, which is not scored; give more `val_data`."
        )
    for part, name in (("train", "training"), ("val", "validation")):
        if sizes[part] < MIN_TOKENS[part]:
            other = ", or another `val_fraction`" if split.val_corpus is None else ""
            raise UsageError(
                f"{corpus.name} leaves {counted(sizes[part], 'token')} for {name}, and at least {MIN_TOKENS[part]} are "
                f"needed; give more text{other}."
            )

    # Describe the text
    data = DataConfig(
        kind=corpus.kind,
        corpus=_absolute(corpus),
        val_corpus=_absolute(split.val_corpus) if split.val_corpus else (),
        text_key=corpus.text_key,
        encoding=corpus.encoding,
        format=corpus.format,
        exclude=corpus.exclude,
        skip_bad=corpus.skip_bad,
        unknown="error" if corpus.drop_unknown is None else "skip",
        train_characters=split.train_characters,
        val_records=split.val_records,
        fingerprint=stats.fingerprint,
        val_fingerprint=val_fingerprint,
        encoder=encoder,
        tokens_in_run=folder is not None,
        characters=stats.characters,
        bytes=stats.bytes,
        documents=stats.documents,
        line_breaks=stats.line_breaks,
        train_tokens=sizes["train"],
        val_tokens=sizes["val"],
        **job.recorded(tokens, corpus, tokenizer),
    )
    return tokens, data


def _is_resumable(split: SplitCorpus, folder: Path | None) -> bool:
    """Whether `encode_split`, if it is interrupted, continues when it is called again with the same arguments."""
    return folder is None and split.characters >= SHARD_TOKENS


def check_encoder(tokenizer: Tokenizer, encoding: Encoding, sample: Sequence[str], warn: Warn) -> None:
    """Compare the encoder with the `tokenizers` library on a sample; if any id differs, use the library, and warn."""
    encoder = tokenizer.encoder
    if not encoding.has_special and not tokenizer.check_encoder(sample):
        warn(
            f"The ids of {encoder} for this text differ from those of the tokenizers library. The text is encoded with "
            "the library, which is slower. Install the version of gigatoken that tinylm requires, or report a bug."
        )


def _absolute(corpus: Corpus) -> tuple[str, ...]:
    """The paths of a corpus as absolute paths; `-` is unchanged, and patterns follow the escaped current folder."""
    paths = []
    for path in corpus.paths:
        if glob.has_magic(path) and not os.path.lexists(path):
            paths.append(str(Path(glob.escape(str(Path.cwd())), path)))
        else:
            paths.append(path if path == STANDARD_INPUT else str(Path(path).absolute()))
    return tuple(paths)


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
            f"The encoded text of {run} is no longer in the cache; name its training text again to resume it (the run "
            f"recorded the path {recorded[:200]}), or another text to evaluate."
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
    run: Path, config: RunConfig, tokenizer: Tokenizer, paths: tuple[str, ...], val_data: str | None, reporter: Reporter
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
