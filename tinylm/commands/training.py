"""What all training commands share: their arguments, and `run_training`."""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from tinylm.commands.console import Console
from tinylm.commands.next_steps import shell_quote
from tinylm.commands.option_groups import option, options_from_env_or_file, reject_fixed_options
from tinylm.commands.training_display import TrainingDisplay, show_examples, show_plan
from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings
from tinylm.config.validation import Panel
from tinylm.distributed.launch import Launch
from tinylm.errors import UsageError
from tinylm.system.process_signals import TERMINATION_SIGNALS

if TYPE_CHECKING:
    from tinylm.report.page import LiveReport
    from tinylm.report.trackers import TrackerCallback
    from tinylm.training.training_request import TrainingRequest

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
        option("Run directory to write (default: checkpoints/<corpus name>).", Panel.RUN, "DIR", "--out", "-o"),
    ] = None
    dry_run: Annotated[bool, option("Print the plan without training.", Panel.RUN, None, "--dry-run")] = False


@dataclass(frozen=True)
class NewAdapterOptions:
    """Where a new adapter is written, and --dry-run."""

    out: Annotated[
        Path | None,
        option(
            "Adapter directory to write (default: <model>-lora or <model>-adapter).", Panel.RUN, "DIR", "--out", "-o"
        ),
    ] = None
    dry_run: Annotated[bool, option("Print the plan without training.", Panel.RUN, None, "--dry-run")] = False


@dataclass(frozen=True)
class ReportOptions:
    """A report and experiment trackers, which show the metrics of a run during training."""

    report: Annotated[
        Path | None, option("Keep an HTML report of the run current in this file.", Panel.INTERVALS, "FILE")
    ] = None
    log_to: Annotated[
        list[str] | None,
        option(
            "Send the metrics to an experiment tracker, tensorboard=DIR into DIR; may be given several times.",
            Panel.INTERVALS,
            "tensorboard|wandb",
            "--log-to",
        ),
    ] = None


@dataclass(frozen=True)
class TrainingArguments:
    """The arguments of a training command.

    command: for example "tinylm train"
    request: the run to train
    report: the HTML file in which a report is kept current
    log_to: experiment trackers
    dry_run: whether to print the plan only
    """

    command: str
    request: "TrainingRequest"
    report: Path | None
    log_to: tuple[str, ...]
    dry_run: bool

    @classmethod
    def of(
        cls,
        ctx: typer.Context,
        corpus: list[str] | None,
        resume: Path | None,
        new_run: NewRunOptions | NewAdapterOptions,
        reporting: ReportOptions,
        settings: TrainSettings | LoRASettings | AdapterSettings,
        model: Path | None = None,
    ) -> Self:
        """Collect the options of a command.

        Raises UsageError if neither a text nor --resume is given, for options of `new_run` together with --resume, and
        as TrainingRequest does.
        """
        from tinylm.training.training_request import TrainingRequest

        command = f"tinylm {ctx.info_name}"
        if not corpus and resume is None:
            raise UsageError(f"Name a text to train on, as in {command} corpus.txt; - is standard input.")
        if resume is not None:
            reject_fixed_options(ctx, "--resume", new_run)
        request = TrainingRequest(
            settings=settings,
            files=tuple(corpus or ()),
            resume=resume,
            model=model,
            out=new_run.out if resume is None else None,  # from the environment, it is for new runs
            ignorable=options_from_env_or_file(ctx, settings),
        )
        return cls(command, request, reporting.report, tuple(reporting.log_to or ()), new_run.dry_run)

    def line_hint(self) -> str | None:
        """A note with the command for texts of one line each, if the corpus is a file that looks like such a list."""
        from tinylm.text.encodings import first_text
        from tinylm.text.recognition import is_list

        files, settings = self.request.paths, self.request.settings
        if len(files) != 1 or settings.format != "auto" or Path(files[0]).suffix not in ("", ".txt"):
            return None
        file = Path(files[0])
        try:
            text = first_text(file, settings.encoding) if file.is_file() else ""
        except (UsageError, OSError, ValueError, LookupError):  # training raises an error that says what is wrong
            return None
        if not is_list(text.replace("\r\n", "\n")):
            return None
        command = f"{self.command} {shell_quote(file)} --format lines"
        return f"{file} is a list of short lines. If each is a text of its own, such as a name: {command}"


def process_start() -> float:
    """The `time.monotonic()` at which this process started, estimated from its CPU time.

    The estimate is exact if the process has used one thread and never waited, as is nearly true during start-up.
    """
    return time.monotonic() - time.process_time()


def run_training(console: Console, arguments: TrainingArguments, *, started: float) -> None:
    """Train while showing progress; then print the path of the run, or with --json the result.

    With `arguments.dry_run`, only the plan of a new run is printed.

    started: the `time.monotonic()` at which the process started.

    Raises UsageError for a report or a tracker that cannot be used, InterruptedRunError if a signal stopped training,
    and the errors of `start_run`.
    """
    import torch

    from tinylm.distributed.ranks import join_ranks, machine_threads
    from tinylm.training.pipeline import Session, plan_run
    from tinylm.training.resume import start_run

    request = arguments.request

    def open_listeners() -> "list[LiveReport | TrackerCallback]":
        listeners: list[Any] = []
        if arguments.log_to:
            from tinylm.report.trackers import TrackerCallback

            listeners += [TrackerCallback(name, console) for name in dict.fromkeys(arguments.log_to)]
        if arguments.report is not None:
            from tinylm.report.page import LiveReport

            listeners.append(LiveReport(arguments.report, console))
        return listeners

    launch = Launch.of(os.environ)
    if launch.rank == 0 and request.resume is None and (hint := arguments.line_hint()) is not None:
        console.note(hint)
    if arguments.dry_run and request.resume is None:
        if launch.rank > 0:
            return
        open_listeners()  # raises the errors of training
        torch.set_num_threads(machine_threads(launch))
        prepared = plan_run(request, console, launch)
        show_plan(console, prepared.plan, prepared.config, prepared.trainable_parameters, as_result=True)
        if request.settings.show_examples:
            show_examples(console, prepared.examples(request.settings.show_examples))
        return
    with contextlib.ExitStack() as stack, join_ranks(launch, console) as ranks, TrainingDisplay(console) as display:
        listeners = open_listeners() if ranks.is_first else []
        for listener in listeners:
            stack.enter_context(contextlib.closing(listener))  # after the other ranks have ended
        result = start_run(
            request,
            Session(
                reporter=console,
                callbacks=[display, *listeners],
                started=started,
                stop_signals=TERMINATION_SIGNALS,
                ranks=ranks,
            ),
        )
    display.show_result(result, arguments.command)
