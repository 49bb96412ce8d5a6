"""Encode both parts of a corpus into token files, and describe them for the configuration of a run."""

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tinylm.config.run import DataConfig
from tinylm.errors import UsageError
from tinylm.jobs.job import job_on
from tinylm.reporter import counted
from tinylm.system.cache_directory import private_folder
from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import STANDARD_INPUT, Corpus
from tinylm.text.split import SplitCorpus
from tinylm.text.token_files import SHARD_TOKENS, SplitDocuments, TokenFolder, encode_to_folder, token_key
from tinylm.text.tokenizer import Tokenizer

MIN_TOKENS = {"train": 3, "val": 2}  # per part

Warn = Callable[[str], None]


def check_encoder(tokenizer: Tokenizer, sample: Sequence[str], warn: Warn) -> None:
    """Compare the encoder with the `tokenizers` library on a sample; if any id differs, use the library, and warn."""
    encoder = tokenizer.encoder
    if not tokenizer.check_encoder(sample):
        warn(
            f"The ids of {encoder} for this text differ from those of the tokenizers library. The text is encoded with "
            "the library, which is slower. Install the version of gigatoken that tinylm requires, or report a bug."
        )


def is_resumable(split: SplitCorpus, folder: Path | None) -> bool:
    """Whether `encode_split`, if it is interrupted, continues when it is called again with the same arguments."""
    return folder is None and split.characters >= SHARD_TOKENS


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
    job = job_on(split.corpus.kind)
    has_special = job.encoding.has_special
    if not has_special:
        val_sample = split.val_stats.sample if split.val_stats else ()
        check_encoder(tokenizer, [*split.stats.sample, *val_sample], warn)
    encoder = encoder or (tokenizer.encoder_with_special if has_special else tokenizer.encoder)
    val_fingerprint = split.val_stats.fingerprint if split.val_stats else None
    key = token_key(
        split.stats.fingerprint, val_fingerprint, split.train_characters, tokenizer, encoder, split.val_records
    )
    path = folder or private_folder("tokens") / key
    # Windows cannot rename a folder that contains a mapped file, and a new run directory is renamed when complete.
    mapped = folder is None or os.name != "nt"
    documents = SplitDocuments(split.train_documents, split.val_documents, job.encoding)
    resumable = is_resumable(split, folder)
    tokens = encode_to_folder(path, key, documents, tokenizer, progress, mapped=mapped, resumable=resumable)
    if split.val_corpus is not None and len(tokens.val) < MIN_TOKENS["val"]:
        raise UsageError(
            f"{split.val_corpus.name} has {len(tokens.val)} token, which is not scored; give more `val_data`."
        )
    for part, minimum, n_tokens in (
        ("training", MIN_TOKENS["train"], len(tokens.train)),
        ("validation", MIN_TOKENS["val"], len(tokens.val)),
    ):
        if n_tokens < minimum:
            raise UsageError(
                f"{split.corpus.name} leaves {counted(n_tokens, 'token')} for {part}, and at least {minimum} are "
                "needed; give more text, or another `val_fraction`."
            )
    data = DataConfig(
        kind=split.corpus.kind,
        corpus=_absolute(split.corpus),
        val_corpus=_absolute(split.val_corpus) if split.val_corpus else (),
        text_key=split.corpus.text_key,
        encoding=split.corpus.encoding,
        format=split.corpus.format,
        exclude=split.corpus.exclude,
        skip_bad=split.corpus.skip_bad,
        unknown="error" if split.corpus.drop_unknown is None else "skip",
        train_characters=split.train_characters,
        val_records=split.val_records,
        fingerprint=split.stats.fingerprint,
        val_fingerprint=val_fingerprint,
        encoder=encoder,
        tokens_in_run=folder is not None,
        characters=split.stats.characters,
        bytes=split.stats.bytes,
        documents=split.stats.documents,
        line_breaks=split.stats.line_breaks,
        train_tokens=len(tokens.train),
        val_tokens=len(tokens.val),
        **job.recorded(tokens, split.corpus, tokenizer),
    )
    return tokens, data


def _absolute(corpus: Corpus) -> tuple[str, ...]:
    """The paths of a corpus as absolute paths; `-` is unchanged."""
    return tuple(path if path == STANDARD_INPUT else _absolute_path(path) for path in corpus.paths)


def _absolute_path(path: str) -> str:
    """Make a path or glob pattern absolute; a pattern is prefixed with the escaped path of the current folder."""
    if glob.has_magic(path) and not os.path.lexists(path):
        return str(Path(glob.escape(str(Path.cwd())), path))
    return str(Path(path).absolute())
