"""Encode both parts of a split text into token files, and describe them for the configuration of a run."""

import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tinylm.config.jobs import rows_on
from tinylm.config.run import DataConfig
from tinylm.errors import UsageError
from tinylm.jobs.job import job_on
from tinylm.reporter import Reporter, counted
from tinylm.system.files import private_folder
from tinylm.text.compression import SPOOL_FILE, STANDARD_INPUT, Progress, no_progress
from tinylm.text.corpus import Corpus
from tinylm.text.parallel_encoding import Encoding
from tinylm.text.split import SplitCorpus
from tinylm.text.token_files import SHARD_TOKENS, TokenFolder, encode_to_folder, token_key
from tinylm.text.tokenizer import Tokenizer

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
    if split.val_corpus is not None and sizes["val"] < MIN_TOKENS["val"]:
        raise UsageError(
            f"{split.val_corpus.name} has {sizes['val']} token, which is not scored; give more `val_data`."
        )
    for part, name in (("train", "training"), ("val", "validation")):
        if sizes[part] < MIN_TOKENS[part]:
            raise UsageError(
                f"{corpus.name} leaves {counted(sizes[part], 'token')} for {name}, and at least {MIN_TOKENS[part]} are "
                "needed; give more text, or another `val_fraction`."
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
