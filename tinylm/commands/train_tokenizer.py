"""tinylm train-tokenizer: train a tokenizer that several runs can share."""

import re
from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions, text_source
from tinylm.config.jobs import all_data
from tinylm.config.model import VOCABULARY
from tinylm.config.settings import TextFileSettings
from tinylm.config.validation import Panel, Setting
from tinylm.errors import TinyLMError, UsageError
from tinylm.system.files import check_replaceable, temporary_folder, write_text

BEGINNING = re.compile(rb'\A\s*\{\s*"version"\s*:\s*"1\.0"\s*,\s*"truncation"')  # of a tokenizer.json


@with_option_groups
def train_tokenizer(
    ctx: typer.Context,
    corpus: Annotated[
        list[str],
        typer.Argument(
            help="Text files, folders, globs or JSONL (or pairs), also compressed; - is standard input.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, Setting("File to write.", Panel.TOKENIZER, metavar="FILE", flags=("--out", "-o"))] = Path(
        "tokenizer.json"
    ),
    kind: Annotated[str, Setting("Characters or byte-level BPE.", Panel.TOKENIZER, ("char", "bpe"))] = "bpe",
    vocab_size: Annotated[
        int | None, Setting("Vocabulary size of a BPE tokenizer.", Panel.TOKENIZER, VOCABULARY)
    ] = None,
    force: Annotated[bool, Setting("Replace an existing tokenizer.", Panel.TOKENIZER)] = False,
    *,
    text: TextFileSettings,
    output: OutputOptions,
) -> None:
    """Train a tokenizer: the characters of a text, or byte-level BPE on the first 90 % of the text."""
    from tinylm.jobs.job import job_on
    from tinylm.jobs.reading import ModelReader, load_text
    from tinylm.text.tokenizer_choice import choose_tokenizer

    console = output.console()
    if out.exists() and not force:
        raise UsageError(f"{out} is already there; replace it with `force`, or choose another `out`.")
    check_replaceable(out, "tokenizer", BEGINNING)
    default, *others = all_data()
    kinds = (default, *(kind for kind in others if not job_on(kind).shares_text))
    if text.format in others:
        kinds = (text.format,)
    with temporary_folder() as folder:
        split = load_text(text_source(ctx, corpus, text), folder, ModelReader(kinds), console)
        tokenizer = choose_tokenizer(split, kind, vocab_size, reporter=console)
    try:
        write_text(out, tokenizer.to_str())
    except OSError as error:
        raise TinyLMError(f"Cannot write {out}: {error.strerror}; choose another `out`, or free some space.") from error
    console.note(f"Vocabulary size: {tokenizer.vocab_size:,}.")
    if console.as_json:
        console.record({"tokenizer": str(out), "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size})
    else:
        console.result(str(out))
