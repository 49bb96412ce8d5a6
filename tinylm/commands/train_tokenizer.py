"""tinylm train-tokenizer: a tokenizer by itself, to be given to many runs."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.groups import with_groups
from tinylm.commands.options import WHERE, OutputOptions, TextOptions, ValidationOptions, option
from tinylm.commands.reading import read_text
from tinylm.errors import TinyLMError, UsageError
from tinylm.files import replacing


@with_groups
def train_tokenizer(
    invocation: typer.Context,
    corpus: Annotated[
        list[str],
        typer.Argument(help="Text files (or pairs), folders, patterns, JSONL, or -.", show_default=False),
    ],
    out: Annotated[Path, option("File to write (default: tokenizer.json).", WHERE, "FILE", "--out", "-o")] = Path(
        "tokenizer.json"
    ),
    kind: Annotated[str, option("Characters, or byte-level BPE (default: bpe).", "Data", "char|bpe")] = "bpe",
    vocab_size: Annotated[int | None, option("Vocabulary size of a BPE tokenizer.", "Data", "N")] = None,
    force: Annotated[bool, option("Replace an existing file.", WHERE, None, "--force")] = False,
    *,
    text: TextOptions,
    output: OutputOptions,
) -> None:
    """Train a tokenizer on a text: its characters, or byte-level BPE on the first nine tenths."""
    from tinylm.text.compression import content_suffix
    from tinylm.text.prepare import choose_tokenizer

    console = output.console()
    if kind not in ("char", "bpe"):
        raise UsageError(f"--kind is {kind!r}; it must be one of: char, bpe.")
    if out.exists() and not force:
        raise UsageError(f"{out} is already there; replace it with --force, or choose another --out.")
    with tempfile.TemporaryDirectory() as folder:
        content = "pairs" if text.format == "pairs" else "text"
        reading = read_text(invocation, console, corpus, text, ValidationOptions(), Path(folder), content)
        if text.format == "auto" and any(content_suffix(file) == ".tsv" for file in reading.corpus.files):
            console.warn("TSV is read as plain text here, its tabs included; --format pairs reads sources and targets.")
        tokenizer = choose_tokenizer(reading, kind, vocab_size)
    try:
        with replacing(out) as unfinished:
            unfinished.write_text(tokenizer.to_str(), encoding="utf-8")
    except OSError as error:
        raise TinyLMError(f"Cannot write {out}: {error.strerror}; choose another --out, or free some space.") from error
    console.note(f"{tokenizer.vocab_size:,} ids.")
    if console.as_json:
        console.record({"tokenizer": str(out), "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size})
    else:
        console.result(str(out))
