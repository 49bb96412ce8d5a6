"""tinylm train: train a model on a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import (
    non_default_options,
    options_from_env_or_file,
    reject_fixed_options,
    with_option_groups,
)
from tinylm.commands.options import OutputOptions, Panel, option
from tinylm.commands.trained_model_options import complete_model, complete_run
from tinylm.commands.training_display import process_start, run_training
from tinylm.commands.training_options import ModelOptions, TrainingOptions
from tinylm.errors import UsageError

EXAMPLES = """Examples:

tinylm train book.txt
    Choose tokenizer, model size and length automatically.

tinylm train book.txt --size small --epochs 3
    Three epochs of a model with 6 layers.

tinylm train texts/ --tokenizer bpe --time 30m
    All text files of a folder, for half an hour.

tinylm train --resume checkpoints/book --epochs 5
    Continue a run until five epochs are done.
"""


@dataclass(frozen=True)
class NewRunOptions:
    """Where a new run is written, and what it starts from."""

    out: Annotated[
        Path | None,
        option("Run directory to write (default: checkpoints/<corpus name>).", Panel.RUN, "DIR", "--out", "-o"),
    ] = None
    force: Annotated[bool, option("Replace an existing run.", Panel.RUN, None, "--force")] = False
    init_from: Annotated[
        Path | None,
        option(
            "Start from the weights, architecture and tokenizer of this run.",
            Panel.RUN,
            "MODEL",
            autocompletion=complete_model,
        ),
    ] = None
    extend_vocab: Annotated[
        bool,
        option(
            "With --init-from: add new characters of the text to the vocabulary.", Panel.RUN, None, "--extend-vocab"
        ),
    ] = False
    dry_run: Annotated[bool, option("Print the plan without training.", Panel.RUN, None, "--dry-run")] = False


@dataclass(frozen=True)
class TokenizerOptions:
    """The tokenizer of a new model."""

    tokenizer: Annotated[
        str | None,
        option(
            "Tokenizer: characters, byte-level BPE, or a tokenizer.json file (default: auto).",
            Panel.DATA,
            "auto|char|bpe|PATH",
        ),
    ] = None
    vocab_size: Annotated[int | None, option("Vocabulary size of a BPE tokenizer.", Panel.DATA, "N")] = None


@with_option_groups
def train(
    ctx: typer.Context,
    corpus: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files, folders, globs or JSONL, also compressed; - is standard input.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        option(
            "Continue this run with its corpus and settings; only training length and intervals may change.",
            Panel.RUN,
            "RUN",
            autocompletion=complete_run,
        ),
    ] = None,
    *,
    run: NewRunOptions,
    tokenizer: TokenizerOptions,
    model: ModelOptions,
    training: TrainingOptions,
    output: OutputOptions,
) -> None:
    """Train a language model on a text.

    Without options, tokenizer, model size, batch size and learning rate are chosen from the text and the machine, and
    training stops when the validation loss no longer improves, or after ten minutes.
    """
    started = process_start()
    if not corpus and resume is None:
        raise UsageError("Name a text to train on, as in tinylm train corpus.txt; - is standard input.")
    if resume is not None:
        reject_fixed_options(ctx, "--resume", run)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, resume_request, train_request

    options = (run, tokenizer, model, training)
    settings, optional = non_default_options(*options) | model.chosen_fields(), options_from_env_or_file(ctx, *options)
    out, dry_run = settings.pop("out", None), settings.pop("dry_run", False)
    request: TrainingRequest | ResumeRequest
    if resume is not None:
        request = resume_request(resume, corpus or (), settings, optional)
    else:
        request = train_request(corpus or (), out, settings, optional)
    run_training(output.console(), request, "tinylm train", started=started, dry_run=dry_run)
