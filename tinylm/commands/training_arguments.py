"""The arguments that every training command takes: the texts or the run to resume, and settings."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from tinylm.commands.next_steps import shell_quote
from tinylm.commands.option_groups import non_default_options, options_from_env_or_file, reject_fixed_options
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.training.training_request import ResumeRequest

CorpusArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="Text files, folders, globs or JSONL (or pairs), also compressed; - is standard input.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class TrainingArguments:
    """The arguments of a training command.

    command: for example "tinylm train".
    files: the texts. resume: the run directory to continue. out: the run directory to write. report: the HTML file in
        which a report is kept current. log_to: experiment trackers. dry_run: whether to print the plan only.
    settings: the other options that differ from their defaults, by name.
    ignorable: names of the settings from environment variables and the --config file, which are ignored where they do
        not apply.
    """

    command: str
    files: tuple[str, ...]
    resume: Path | None
    out: Path | None
    report: Path | None
    log_to: tuple[str, ...]
    dry_run: bool
    settings: dict[str, Any]
    ignorable: frozenset[str]

    @classmethod
    def of(cls, ctx: typer.Context, corpus: list[str] | None, resume: Path | None, run: Any, *groups: Any) -> Self:
        """Collect the options of the groups `run` and `groups`.

        run: the group with `out`, `force` and `dry_run`, whose options are for new runs only.

        Raises UsageError if neither a text nor --resume is given, and for options of `run` together with --resume.
        """
        command = f"tinylm {ctx.info_name}"
        if not corpus and resume is None:
            raise UsageError(f"Name a text to train on, as in {command} corpus.txt; - is standard input.")
        if resume is not None:
            reject_fixed_options(ctx, "--resume", run)
        settings = non_default_options(run, *groups)
        out, report = settings.pop("out", None), settings.pop("report", None)
        log_to, dry_run = tuple(settings.pop("log_to", ())), settings.pop("dry_run", False)
        ignorable = options_from_env_or_file(ctx, run, *groups)
        return cls(command, tuple(corpus or ()), resume, out, report, log_to, dry_run, settings, ignorable)

    def line_hint(self) -> str | None:
        """A note with the command for texts of one line each, if the corpus is a file that looks like such a list."""
        from tinylm.text.format_detection import HEAD_BYTES, decode_head, is_list

        if len(self.files) != 1 or "format" in self.settings or Path(self.files[0]).suffix not in ("", ".txt"):
            return None
        try:
            file = Path(self.files[0])
            with file.open("rb") if file.is_file() else io.BytesIO() as opened:
                text = decode_head(opened.read(HEAD_BYTES), self.settings.get("encoding", "utf-8"))
        except (OSError, ValueError, LookupError):  # training raises an error that says what is wrong
            return None
        if text is None or not is_list(text.replace("\r\n", "\n")):
            return None
        command = f"{self.command} {shell_quote(file)} --format lines"
        return f"{file} is a list of short lines. If each is a text of its own, such as a name: {command}"

    def resume_request(self, adapter_kind: str | None = None, base: Path | None = None) -> "ResumeRequest":
        """The request to continue the run `resume`. adapter_kind, base: as in ResumeRequest.

        Raises UsageError for a setting that cannot change when a run is resumed.
        """
        from tinylm.training.training_request import resume_request

        assert self.resume is not None
        return resume_request(
            self.resume, self.files, self.settings, self.ignorable, adapter_kind=adapter_kind, base=base
        )
