"""tinylm train: train a model on a text."""

from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import option, with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.commands.training import (
    CorpusArgument,
    NewRunOptions,
    ReportOptions,
    TrainingArguments,
    process_start,
    run_training,
)
from tinylm.config.settings import TrainSettings
from tinylm.config.validation import Panel

FIRST_OPTIONS = """
out force resume init_from dry_run format tokenizer vocab_size val_data time epochs steps preset size context
batch_size lr seed device report
"""  # shown by -h

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
        ),
    ] = None,
    *,
    run: NewRunOptions,
    settings: TrainSettings,
    reporting: ReportOptions,
    output: OutputOptions,
) -> None:
    """Train a language model on a text.

    Without options, tokenizer, model size, batch size and learning rate are chosen from the text and the machine, and
    training stops when the validation loss no longer improves, or after ten minutes.
    """
    started = process_start()
    arguments = TrainingArguments.of(ctx, corpus, resume, run, reporting, settings)
    run_training(output.console(), arguments, started=started)
