"""tinylm train: train a model on a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions, Panel, option
from tinylm.commands.trained_model_options import complete_model, complete_run
from tinylm.commands.training_arguments import CorpusArgument, TrainingArguments
from tinylm.commands.training_display import process_start, run_training
from tinylm.commands.training_options import ModelOptions, TrainingOptions

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
    """Where a new run is written, what it starts from, and --dry-run."""

    out: Annotated[
        Path | None,
        option("Run directory to write (default: checkpoints/<corpus name>).", Panel.RUN, "DIR", "--out", "-o"),
    ] = None
    force: Annotated[bool, option("Replace an existing run.", Panel.RUN, None, "--force")] = False
    init_from: Annotated[
        Path | None,
        option(
            "Start from the weights, architecture and tokenizer of this model.",
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
    corpus: CorpusArgument = None,
    resume: Annotated[
        Path | None,
        option(
            "Continue this run with its corpus and settings; only length, intervals and --parallel may change.",
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
    given = TrainingArguments.of(ctx, corpus, resume, run, tokenizer, model, training)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, train_request

    settings = given.settings | model.chosen_fields()
    request: TrainingRequest | ResumeRequest
    if given.resume is not None:
        request = given.resume_request()
    else:
        request = train_request(given.files, given.out, settings, given.ignorable)
    run_training(output.console(), request, given, started=started)
