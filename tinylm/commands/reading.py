"""Reading and encoding a text with progress, to learn from or to be scored; shared by the commands that take one."""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tinylm.commands.groups import typed
from tinylm.commands.model import OpenModel
from tinylm.commands.options import TextOptions, UnknownOptions, ValidationOptions
from tinylm.config import DataConfig
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from tinylm.text.corpus import Corpus
    from tinylm.text.dataset import TokenFolder
    from tinylm.text.prepare import Reading
    from tinylm.text.tokenizer import Tokenizer

VAL_FRACTION = 0.1


def read_text(
    invocation: typer.Context,
    console: Console,
    corpus: Sequence[str],
    text: TextOptions,
    validation: ValidationOptions,
    spool: Path,
    kind: str = "text",
) -> "Reading":
    """Find and read the corpus, and what it is validated on. Standard input is kept in the folder `spool`.

    `kind` is text, or pairs.
    """
    from tinylm.text.corpus import STANDARD_INPUT
    from tinylm.text.prepare import read_corpus

    if validation.val_data is not None and validation.val_fraction is not None:
        raise UsageError("--val-data and --val-fraction contradict each other; give one of them.")
    if validation.val_data == STANDARD_INPUT and STANDARD_INPUT in corpus:
        raise UsageError("Standard input cannot be both the text and --val-data; put one of them into a file.")
    names = [corpus] if validation.val_data is None else [corpus, [validation.val_data]]
    found, *val_found = _find(invocation, console, names, text, spool, kind)
    fraction = VAL_FRACTION if validation.val_fraction is None else validation.val_fraction
    with console.counting("reading", sum(part.size for part in (found, *val_found)), "bytes") as advance:
        return read_corpus(found, val_found[0] if val_found else None, fraction, advance)


def _find(
    invocation: typer.Context,
    console: Console,
    names: Sequence[Sequence[str]],
    text: TextOptions,
    spool: Path,
    kind: str,
) -> list["Corpus"]:
    """A corpus for each list of names; what is left out of them is said.

    Raises UsageError for an option that was typed and that means nothing for these texts.
    """
    from tinylm.text.corpus import find_corpus
    from tinylm.text.prepare import CORPORA

    chosen = typed(invocation, text)
    format = text.format
    if format in (("text", "lines") if kind == "pairs" else ("pairs",)):
        if "format" in chosen:
            other = "an encoder-decoder takes pairs" if kind == "pairs" else "only an encoder-decoder takes them"
            raise UsageError(f"--format {format} does not fit the model: {other}. Leave it out.")
        format = "auto"  # the environment and --config speak of every run
    if kind == "pairs" and "text_key" in chosen:
        raise UsageError("--text-key is for documents; of a pair, JSONL has the texts under 'source' and 'target'.")
    text_key = "text" if text.text_key is None else text.text_key
    found = [find_corpus(some, text_key, text.encoding, spool, CORPORA[kind], format) for some in names]
    if "text_key" in chosen and not any(corpus.has_json for corpus in found):
        raise UsageError(
            "--text-key is for JSONL, and none of the texts is; leave it out, or name what they hold with "
            "--format jsonl."
        )
    for corpus in found:
        _say_what_is_left_out(console, corpus)
    return found


def _say_what_is_left_out(console: Console, corpus: "Corpus") -> None:
    """A warning where it is most of the text."""
    from tinylm.text.selection import describe_left_out, megabytes

    for folder in dict.fromkeys(one.folder for one in corpus.left_out):
        some = [one for one in corpus.left_out if one.folder == folder]
        say = console.warn if sum(one.size for one in some) > corpus.size else console.note
        say(f"Left out of {folder}: {describe_left_out(some)}. Read: {megabytes(corpus.size)}.")


def known_text(
    console: Console,
    reading: "Reading",
    tokenizer: "Tokenizer",
    unknown: UnknownOptions,
    who: str,
    otherwise: str | None,
) -> "Reading":
    """The text, or with --unknown skip what is left of it without the characters that have no id.

    Raises UsageError for such characters without it; the message names `who`, and `otherwise` as what can be done.
    """
    from tinylm.text.prepare import require_known, skip_unknown

    unseen = tokenizer.unknown(reading.alphabet)
    if not unseen:
        return reading
    if not unknown.skip:
        require_known(tokenizer, reading.alphabet, who, otherwise)
    parts = [part for part in (reading.corpus, reading.val_corpus) if part]
    with console.counting("reading", sum(part.size for part in parts), "bytes") as advance:
        known = skip_unknown(reading, tokenizer, advance)
    _say_what_is_skipped(console, unseen, reading.characters - known.characters)
    return known


def _say_what_is_skipped(console: Console, characters: str, count: int) -> None:
    from tinylm.text.tokenizer import describe_characters

    console.warn(
        f"Left out of the text, since the model never saw them: {count:,} characters, {len(characters)} different "
        f"ones ({describe_characters(characters)})."
    )


def how_to_extend(tokenizer: "Tokenizer", model: Path) -> str | None:
    """What a user can do about characters that a model never saw; `None` where its vocabulary cannot grow."""
    if tokenizer.kind != "char":
        return None
    return f"let a copy of the model learn them first: tinylm train --init-from {model} --extend-vocab"


def encode_text(
    console: Console, reading: "Reading", tokenizer: "Tokenizer", preparation: Path
) -> tuple["TokenFolder", DataConfig]:
    """Encode into the cache; what came from standard input, into the run itself."""
    from tinylm.checkpoint import RunFolder
    from tinylm.text.compression import SPOOL_FILE
    from tinylm.text.corpus import STANDARD_INPUT
    from tinylm.text.prepare import encode_reading

    piped = any(STANDARD_INPUT in part.paths for part in (reading.corpus, reading.val_corpus) if part)
    folder = RunFolder(preparation).tokens if piped else None
    with console.counting("encoding", reading.found.characters, "characters") as advance:
        encoded = encode_reading(reading, tokenizer, folder, advance, console.warn)
    if piped:
        (preparation / SPOOL_FILE).unlink()
    return encoded


def encode_corpus_again(
    console: Console,
    run: Path,
    data: DataConfig,
    tokenizer: "Tokenizer",
    corpus: Sequence[str],
    val_data: str | None,
) -> "TokenFolder":
    """Encode the text of a run again, which the user names since it is not in the cache any more; it is read as the run
    recorded. Raises UsageError when it is another text.
    """
    from tinylm.text.corpus import STANDARD_INPUT
    from tinylm.text.prepare import encode_again, recorded_corpus

    if STANDARD_INPUT in (*corpus, val_data):
        raise UsageError("With --resume, the text is read from files; put standard input into a file.")
    found = recorded_corpus(tuple(corpus), data, tokenizer)
    val_found = recorded_corpus((val_data,), data, tokenizer) if val_data else None
    with console.counting("reading", found.size, "bytes") as advance:
        return encode_again(run, data, tokenizer, found, val_found, advance)


@dataclass(frozen=True)
class TextToScore:
    """What the user said of a text to evaluate on: its names, none for the run's own, and how it is read."""

    invocation: typer.Context
    names: Sequence[str] | None
    reading: TextOptions
    unknown: UnknownOptions


def tokens_to_score(console: Console, opened: OpenModel, text: TextToScore, kind: str = "text") -> "np.ndarray":
    """All the tokens of a text, or of pairs, in memory; without names, those that the run was validated on.

    Raises UsageError when there are none, or, without --unknown skip, characters that the model never saw.
    """
    if not text.names:
        if useless := typed(text.invocation, text.reading, text.unknown):
            raise UsageError(f"{', '.join(useless.values())} is for a text that is named; name one, or leave it out.")
        return _validation_tokens(console, opened, kind)
    from tinylm.text.corpus import STANDARD_INPUT, scan
    from tinylm.text.dataset import encode_stream
    from tinylm.text.prepare import check_encoder, require_known, without_unknown

    # Standard input is kept on the disk to be read twice; evaluating a file writes nothing.
    piped = STANDARD_INPUT in text.names
    with tempfile.TemporaryDirectory() if piped else contextlib.nullcontext("") as folder:
        (corpus,) = _find(text.invocation, console, [text.names], text.reading, Path(folder), kind)
        found = scan(corpus.stream())
        if not found.characters:
            raise UsageError(f"{corpus.name} has no text in it; give a file that has some.")
        unseen = opened.tokenizer.unknown(found.alphabet)
        if unseen and not text.unknown.skip:
            require_known(opened.tokenizer, found.alphabet, "The model", how_to_extend(opened.tokenizer, opened.path))
        if unseen:
            corpus = without_unknown(corpus, opened.tokenizer)
            _say_what_is_skipped(console, unseen, found.characters - scan(corpus.stream()).characters)
        check_encoder(opened.tokenizer, found.sample, console.warn)
        with console.counting("encoding", found.characters, "characters") as advance:
            return encode_stream(corpus.stream(), opened.tokenizer, advance)


def _validation_tokens(console: Console, opened: OpenModel, kind: str) -> "np.ndarray":
    from tinylm.text.prepare import reopen_part

    if opened.config.data is None:
        raise UsageError(f"{opened.path} has no validation {kind} of its own; name a file to evaluate on.")
    console.note(f"On the validation {kind} of {opened.path}.")
    return reopen_part(opened.path, opened.config.data, opened.tokenizer, "val")
