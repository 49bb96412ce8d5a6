"""The arguments that every training command takes: the texts or the run to resume, and settings."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from tinylm.commands.next_steps import shell_quote
from tinylm.commands.option_groups import option, options_from_env_or_file, reject_fixed_options
from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings
from tinylm.config.validation import Panel
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.training.training_request import TrainingRequest

CorpusArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Text files, folders, globs or JSONL (or pairs), also compressed; - is standard input.",
        show_default=False,
    ),
]


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
    report: the HTML file in which a report is kept current
    log_to: experiment trackers
    dry_run: whether to print the plan only
    The others: see TrainingRequest.
    """

    command: str
    files: tuple[str, ...]
    resume: Path | None
    model: Path | None
    out: Path | None
    report: Path | None
    log_to: tuple[str, ...]
    dry_run: bool
    settings: TrainSettings | LoRASettings | AdapterSettings
    ignorable: frozenset[str]

    @classmethod
    def of(
        cls,
        ctx: typer.Context,
        corpus: list[str] | None,
        resume: Path | None,
        run: Any,
        reporting: ReportOptions,
        settings: TrainSettings | LoRASettings | AdapterSettings,
        model: Path | None = None,
    ) -> Self:
        """Collect the options of a command.

        run: the group with `out` and `dry_run`, whose options are for new runs only.

        Raises UsageError if neither a text nor --resume is given, and for options of `run` together with --resume.
        """
        command = f"tinylm {ctx.info_name}"
        if not corpus and resume is None:
            raise UsageError(f"Name a text to train on, as in {command} corpus.txt; - is standard input.")
        if resume is not None:
            reject_fixed_options(ctx, "--resume", run)
        return cls(
            command=command,
            files=tuple(corpus or ()),
            resume=resume,
            model=model,
            out=run.out if resume is None else None,  # from the environment, it is for new runs
            report=reporting.report,
            log_to=tuple(reporting.log_to or ()),
            dry_run=run.dry_run,
            settings=settings,
            ignorable=options_from_env_or_file(ctx, settings),
        )

    def request(self) -> "TrainingRequest":
        """The run to train. Raises the errors of TrainingRequest."""
        from tinylm.training.training_request import TrainingRequest

        return TrainingRequest(
            settings=self.settings,
            files=self.files,
            resume=self.resume,
            model=self.model,
            out=self.out,
            ignorable=self.ignorable,
        )

    def line_hint(self) -> str | None:
        """A note with the command for texts of one line each, if the corpus is a file that looks like such a list."""
        from tinylm.text.file_selection import HEAD_BYTES, decode_head, is_list

        if len(self.files) != 1 or self.settings.format != "auto" or Path(self.files[0]).suffix not in ("", ".txt"):
            return None
        try:
            file = Path(self.files[0])
            with file.open("rb") if file.is_file() else io.BytesIO() as opened:
                text = decode_head(opened.read(HEAD_BYTES), self.settings.encoding)
        except (OSError, ValueError, LookupError):  # training raises an error that says what is wrong
            return None
        if text is None or not is_list(text.replace("\r\n", "\n")):
            return None
        command = f"{self.command} {shell_quote(file)} --format lines"
        return f"{file} is a list of short lines. If each is a text of its own, such as a name: {command}"
