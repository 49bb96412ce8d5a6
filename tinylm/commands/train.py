"""tinylm train: train a model on a text. Also `run_training`, which finetune-lora and finetune-adapter share."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.next_steps import shell_quote
from tinylm.commands.option_groups import non_default_options, options_from_env_or_file, with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.commands.training_display import TrainingDisplay, show_examples, show_plan
from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings, reject_fixed_settings
from tinylm.config.validation import Panel, Setting
from tinylm.errors import UsageError, concerning
from tinylm.system.process_signals import TERMINATION_SIGNALS
from tinylm.system.ranks import Launch

if TYPE_CHECKING:
    from tinylm.commands.console import Console
    from tinylm.run_report.page import LiveReport
    from tinylm.run_report.trackers import TrackerCallback
    from tinylm.training.training_request import TrainingRequest

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

CorpusArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Text files, folders, globs or JSONL (or pairs), also compressed; - is standard input.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class NewRunOptions:
    """Where a new run is written, and --dry-run."""

    out: Annotated[
        Path | None,
        Setting(
            "Directory to write (default: checkpoints/<corpus name>; of an adapter: <model>-lora or <model>-adapter).",
            Panel.RUN,
            metavar="DIR",
            flags=("--out", "-o"),
        ),
    ] = None
    dry_run: Annotated[bool, Setting("Print the plan without training.", Panel.RUN)] = False


@dataclass(frozen=True)
class ReportOptions:
    """A report and experiment trackers, which show the metrics of a run during training."""

    report: Annotated[
        Path | None, Setting("Keep an HTML report of the run current in this file.", Panel.INTERVALS, metavar="FILE")
    ] = None
    log_to: Annotated[
        list[str] | None,
        Setting(
            "Send the metrics to an experiment tracker, tensorboard=DIR into DIR; may be given several times.",
            Panel.INTERVALS,
            metavar="tensorboard|wandb",
        ),
    ] = None


@with_option_groups
def train(
    ctx: typer.Context,
    corpus: CorpusArgument = None,
    resume: Annotated[
        Path | None,
        Setting(
            "Continue this run with its corpus and settings; only length, intervals and --parallel may change.",
            Panel.RUN,
            metavar="RUN",
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
    run_training(ctx, corpus, resume, None, run, settings, reporting, output)


def run_training(
    ctx: typer.Context,
    corpus: list[str] | None,
    resume: Path | None,
    model: Path | None,
    run: NewRunOptions,
    settings: TrainSettings | LoRASettings | AdapterSettings,
    reporting: ReportOptions,
    output: OutputOptions,
) -> None:
    """Train while showing progress; then print the path of the run, or with --json the result.

    The arguments are those of the three commands that train. With --dry-run, only the plan of a new run is printed.

    Raises UsageError for options that contradict each other and for a report or a tracker that cannot be used,
    InterruptedRunError if a signal stopped training, and the errors of `train_or_resume`.
    """
    # When this process started, estimated from its CPU time: nearly exact, as start-up has one thread and never waits
    started = time.monotonic() - time.process_time()
    from tinylm.training.training_request import TrainingRequest

    # What to train
    console, command = output.console(), f"tinylm {ctx.info_name}"
    if not corpus and resume is None:
        raise UsageError(f"Name a text to train on, as in {command} corpus.txt; - is standard input.")
    if resume is not None:
        reject_fixed_settings(non_default_options(run), "resume", vars(run), options_from_env_or_file(ctx, run))
    request = TrainingRequest(
        settings=settings,
        files=tuple(corpus or ()),
        resume=resume,
        model=model,
        out=run.out if resume is None else None,  # from the environment, it is for new runs
        ignorable=options_from_env_or_file(ctx, settings),
    )
    launch = Launch.of(os.environ)
    if launch.rank == 0 and resume is None and (hint := _line_hint(command, request)) is not None:
        console.note(hint)

    import torch

    from tinylm.distributed.ranks import join_ranks, machine_threads
    from tinylm.training.pipeline import plan_run, train_or_resume
    from tinylm.training.session import Session

    # The plan alone
    if run.dry_run and resume is None:
        if launch.rank > 0:
            return
        _open_listeners(reporting, console)  # only to check --report and --log-to
        torch.set_num_threads(machine_threads(launch))
        prepared = plan_run(request, console, launch)
        show_plan(console, prepared.plan, prepared.config, prepared.trainable_parameters, as_result=True)
        if settings.show_examples:
            show_examples(console, prepared.examples(settings.show_examples))
        return

    # Training
    with contextlib.ExitStack() as stack, join_ranks(launch, console) as ranks, TrainingDisplay(console) as display:
        listeners = _open_listeners(reporting, console) if ranks.is_first else []
        for listener in listeners:
            stack.enter_context(contextlib.closing(listener))  # after the other ranks have ended
        session = Session(
            reporter=console,
            callbacks=[display, *listeners],
            started=started,
            stop_signals=TERMINATION_SIGNALS,
            ranks=ranks,
        )
        result = train_or_resume(request, session)
    display.show_result(result, command)


def _open_listeners(reporting: ReportOptions, console: "Console") -> "list[LiveReport | TrackerCallback]":
    """The callbacks of the report and of the trackers. Raises UsageError for one that cannot be used."""
    listeners: list[Any] = []
    if reporting.log_to:
        from tinylm.run_report.trackers import TrackerCallback

        with concerning("log_to"):
            listeners += [TrackerCallback(name, console) for name in dict.fromkeys(reporting.log_to)]
    if reporting.report is not None:
        from tinylm.run_report.page import LiveReport

        with concerning("report"):
            listeners.append(LiveReport(reporting.report, console))
    return listeners


def _line_hint(command: str, request: "TrainingRequest") -> str | None:
    """A note with the command for texts of one line each, if the corpus is a file that looks like such a list."""
    from tinylm.text.file_selection import is_list
    from tinylm.text.files import first_text

    files, settings = request.paths, request.settings
    if len(files) != 1 or settings.format != "auto" or Path(files[0]).suffix not in ("", ".txt"):
        return None
    file = Path(files[0])
    try:
        text = first_text(file, settings.encoding) if file.is_file() else ""
    except (UsageError, OSError, ValueError, LookupError):  # training raises an error that says what is wrong
        return None
    if not is_list(text.replace("\r\n", "\n")):
        return None
    lines = f"{command} {shell_quote(file)} --format lines"
    return f"{file} is a list of short lines. If each is a text of its own, such as a name: {lines}"
