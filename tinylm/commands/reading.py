"""Reading and encoding a text with progress, to learn from or to be scored; shared by the commands that take one."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.commands.model import OpenModel
from tinylm.commands.options import TextOptions, ValidationOptions
from tinylm.config import DataConfig
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from tinylm.text.dataset import TokenFolder
    from tinylm.text.prepare import Reading
    from tinylm.text.tokenizer import Tokenizer

VAL_FRACTION = 0.1


def read_text(
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
    from tinylm.text.corpus import STANDARD_INPUT, find_corpus
    from tinylm.text.prepare import CORPORA, read_corpus

    _check_text_key(text, kind)
    if validation.val_data is not None and validation.val_fraction is not None:
        raise UsageError("--val-data and --val-fraction contradict each other; give one of them.")
    if validation.val_data == STANDARD_INPUT and STANDARD_INPUT in corpus:
        raise UsageError("Standard input cannot be both the text and --val-data; put one of them into a file.")
    found = find_corpus(corpus, text.text_key, text.encoding, spool, CORPORA[kind])
    val_found = None
    if validation.val_data is not None:
        val_found = find_corpus([validation.val_data], text.text_key, text.encoding, spool, CORPORA[kind])
    fraction = VAL_FRACTION if validation.val_fraction is None else validation.val_fraction
    with console.counting("reading", found.size, "characters") as advance:
        return read_corpus(found, val_found, fraction, advance)


def _check_text_key(text: TextOptions, kind: str) -> None:
    if kind == "pairs" and text.text_key != TextOptions.text_key:
        raise UsageError("--text-key is for documents; of a pair, JSONL has the texts under 'source' and 'target'.")


def encode_text(
    console: Console, reading: "Reading", tokenizer: "Tokenizer", preparation: Path
) -> tuple["TokenFolder", DataConfig]:
    """Encode into the cache; what came from standard input, into the run itself."""
    from tinylm.checkpoint import RunFolder
    from tinylm.text.corpus import SPOOL_FILE, STANDARD_INPUT
    from tinylm.text.prepare import encode_reading

    piped = any(STANDARD_INPUT in part.paths for part in (reading.corpus, reading.val_corpus) if part)
    folder = RunFolder(preparation).tokens if piped else None
    with console.counting("encoding", reading.found.characters, "characters") as advance:
        encoded = encode_reading(reading, tokenizer, folder, advance, console.warn)
    if piped:
        (preparation / SPOOL_FILE).unlink()
    return encoded


def tokens_to_score(
    console: Console, opened: OpenModel, names: Sequence[str] | None, reading: TextOptions, kind: str = "text"
) -> "np.ndarray":
    """All the tokens of a text, or of pairs, in memory; without names, those that the run was validated on.

    Raises UsageError when there are none, or characters that the model never saw.
    """
    _check_text_key(reading, kind)
    if not names:
        return _validation_tokens(console, opened, kind)
    from tinylm.text.corpus import find_corpus, scan
    from tinylm.text.dataset import encode_stream
    from tinylm.text.prepare import CORPORA, check_encoder, require_known

    with tempfile.TemporaryDirectory() as folder:
        corpus = find_corpus(names, reading.text_key, reading.encoding, Path(folder), CORPORA[kind])
        found = scan(corpus.stream())
        if not found.characters:
            raise UsageError(f"{corpus.name} has no text in it; give a file that has some.")
        require_known(opened.tokenizer, found.alphabet, "The model")
        check_encoder(opened.tokenizer, found.sample, console.warn)
        with console.counting("encoding", found.characters, "characters") as advance:
            return encode_stream(corpus.stream(), opened.tokenizer, advance)


def _validation_tokens(console: Console, opened: OpenModel, kind: str) -> "np.ndarray":
    from tinylm.text.prepare import reopen_tokens

    if opened.config.data is None:
        raise UsageError(f"{opened.path} has no validation {kind} of its own; name a file to evaluate on.")
    console.note(f"On the validation {kind} of {opened.path}.")
    return reopen_tokens(opened.path, opened.config.data, opened.tokenizer).val
