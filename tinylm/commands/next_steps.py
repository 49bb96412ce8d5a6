"""What messages suggest: how to use, resume or improve a run, and the next step after an error."""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.config.settings import format_duration_setting
from tinylm.errors import (
    AdapterNotModelError,
    BadFilesError,
    NoModelError,
    NoRunError,
    NotMergeableError,
    NotResumableError,
    NotTrainedError,
    OtherRunKindError,
    RunExistsError,
    SaveError,
    TinyLMError,
    UnknownCharactersError,
)
from tinylm.run_directory.layout import CHECKPOINTS, path_exists
from tinylm.system.files import is_link, read_json

if TYPE_CHECKING:
    from tinylm.config.run import RunConfig
    from tinylm.config.training import Budget
    from tinylm.run_directory.metrics_log import History

TEXT_OPTIONS = (
    *("--format", "--text-key", "--encoding", "--exclude"),
    *("--val-data", "--val-fraction", "--chat-template", "--train-on"),
)
LAST_QUARTER = 0.75  # of the steps, in which the relative fall of the validation loss is measured
FLAT = 0.02  # below it, the validation loss no longer falls
# A falling learning rate makes it fall by up to 7 % where a longer run gains little, except in the first four passes,
# which are worth nearly as much as new text (Muennighoff et al. 2023).
STEEP, FEW_EPOCHS = 0.08, 4
LAST_TENTH, MIN_GAP = 0.9, 0.1  # the relative distance of the training loss in it from the last validation loss
MIN_EVALUATIONS = 3  # with fewer, there is no curve to judge by


def shell_quote(path: Path) -> str:
    """The path as one word of a shell command."""
    return shlex.quote(str(path))


def resume_command(path: Path) -> str:
    """The command line that resumes the run at `path`."""
    try:
        adapter = read_json(path / "config.json")["adapter"]
        command = {"lora": "finetune-lora", "bottleneck": "finetune-adapter"}[adapter["kind"]]
    except (OSError, ValueError, KeyError, TypeError):  # a model, or a run that cannot be read
        command = "train"
    return f"tinylm {command} --resume {shell_quote(path)}"


def use_commands(path: Path, config: "RunConfig") -> dict[str, str]:
    """Command lines that use the run or model at `path`, by purpose."""
    quoted, adapter = shell_quote(path), config.adapter
    row = config.row
    option = "--model" if adapter is None else "--adapter"
    flag = "--prompt " if row.command == "sample" else ""
    prompt = f' {flag}"{row.prompt}"' if row.prompt else ""
    commands = {row.command: f"tinylm {row.command} {option} {quoted}{prompt}"} if row.command else {}
    commands["evaluate"] = f"tinylm eval {option} {quoted} {row.file}"
    if config.training is not None:
        commands["resume"] = resume_command(path)
    if adapter is None:
        commands["fine-tune"] = f"tinylm finetune-lora --model {quoted} other{Path(row.file).suffix}"
    elif adapter.kind == "lora":
        commands["merge"] = f"tinylm merge-lora {quoted} --out {shell_quote(path.with_name(path.name + '-merged'))}"
    return commands


def longer(budget: "Budget") -> str:
    """The option that makes a run twice as long."""
    match budget.kind:
        case "time":
            return f"--time {format_duration_setting(2 * (budget.time or 0))}"
        case "steps":
            return f"--steps {2 * (budget.steps or 0)}"
        case _:
            return f"--epochs {2 * (budget.epochs or 0):g}"


def improvement(history: "History | None", epochs: float, budget: "Budget", bits: float, ppmd: float | None) -> str:
    """A sentence on what would improve a run on plain text, from its curves: more time or more text. If neither is
    clear, how it compares with PPMd; "" without that figure.

    history: `None` for a run of several generations, whose losses are not one curve
    epochs: passes over the training text. bits, ppmd: bits per byte of the validation text, under the model and PPMd.
    """
    advice = _from_curves(history, epochs, budget) if history is not None else ""
    if advice:
        return advice
    if not ppmd:  # PPMd needs 0 bits for a text that repeats the training text
        return ""
    compared = f"{abs(1 - bits / ppmd):.0%} {'fewer' if bits <= ppmd else 'more'}"
    return f"The model needs {compared} bits than PPMd, the best simple model."


def _from_curves(history: "History", epochs: float, budget: "Budget") -> str:
    """Whether more time or more text helps; "" if the curves do not show it."""
    import numpy as np

    validation = history.validation
    partial = validation.get("val_tokens", [None] * len(validation["step"]))  # few tokens before step 1 and at a stop
    evaluations = zip(validation["step"], validation["val_loss"], partial, strict=True)
    curve = [(step, loss) for step, loss, tokens in evaluations if tokens is None]
    if len(curve) >= MIN_EVALUATIONS:
        steps, losses = zip(*curve, strict=True)
        end, last = curve[-1]
        fall = float(np.interp(LAST_QUARTER * end, steps, losses)) / last - 1
        logged = zip(history.training["step"], history.training["loss"], strict=True)
        recent = [loss for step, loss in logged if LAST_TENTH * end < step <= end]
        gap = 1 - sum(recent) / len(recent) / last if recent else 0
        if fall >= (FLAT if epochs < FEW_EPOCHS else STEEP) and last == min(losses):
            return (
                f"The validation loss still falls, by {fall:.1%} in the last quarter of the run: more time helps, for "
                f"example {longer(budget)}."
            )
        if fall < FLAT and gap >= MIN_GAP:
            return (
                f"The training loss is {gap:.0%} below the validation loss, which no longer falls: more text helps, "
                "more time does not."
            )
    return ""


def _ways_past(run: Path, command: Sequence[str]) -> str:
    """A sentence with the command lines that keep the run beside a new one, replace it, and continue it if possible.

    command: the words of the command line that failed.
    """
    lines = []
    if command:
        words = iter(command)
        kept = [
            word for word in words if not word.startswith("--out=") and not (word in ("--out", "-o") and next(words))
        ]
        lines += [
            f"keep both: {shlex.join([*kept, '--out', str(_free_name(run))])}",
            f"replace it: {shlex.join([*command, '--force'])}",
        ]
    if (run / "last").is_dir() and not is_link(run / "last"):
        lines.append(f"continue it: {resume_command(run)}")
    return f"To {'; to '.join(lines)}." if lines else ""


def _free_name(run: Path) -> Path:
    named = run if run.name else run.resolve()
    others = (named.with_name(f"{named.name}-{number}") for number in itertools.count(2))
    return next(other for other in others if not path_exists(other))


def _text_options(command: Sequence[str]) -> list[str]:
    """The words of a command line, also of `finetune-lora` or `eval`, that say how `train` reads the same text."""
    words = iter(command)
    kept: list[str] = []
    for word in words:
        if word in TEXT_OPTIONS:
            kept += [word, next(words, "")]
        elif word == "--skip-bad" or word.startswith(tuple(f"{option}=" for option in TEXT_OPTIONS)):
            kept.append(word)
    return kept


def next_step(error: TinyLMError, command: Sequence[str] = ()) -> str:
    """A sentence with the command to run after this error, or "" for an error without such a command.

    command: the words of the command line that failed.
    """
    match error:
        case NoRunError():
            return "List the runs with: tinylm runs."
        case NoModelError():
            return "Train one with: tinylm train corpus.txt."
        case RunExistsError():
            return _ways_past(error.path, command)
        case AdapterNotModelError(kind="lora"):
            return f"To merge both: tinylm merge-lora {shell_quote(error.path)} --out merged."
        case NotResumableError(is_adapter=False) | NotTrainedError():
            return (
                f"To start a new run from its weights: tinylm train --init-from {shell_quote(error.path)} corpus.txt."
            )
        case NotMergeableError():
            return "Use it with --adapter, in tinylm sample and tinylm eval."
        case OtherRunKindError():
            return f"To continue it: {resume_command(error.path)}."
        case UnknownCharactersError(model=Path() as model):
            from tinylm.training.start import default_run_name

            words = [*error.text, *_text_options(command), "--init-from", str(model), "--extend-vocab"]
            if path_exists(out := CHECKPOINTS / default_run_name(error.text[0])):
                words += ["--out", str(_free_name(out))]
            return f"To add them to a copy of the model and train all its weights: tinylm train {shlex.join(words)}."
        case BadFilesError(is_skippable=True) if command and not any(w.startswith("--resume") for w in command):
            return f"To leave them out: {shlex.join([*command, '--skip-bad'])}."
        case SaveError(resumable=True):
            return f"Remove the cause, then continue: {resume_command(error.path)}."
    return ""
