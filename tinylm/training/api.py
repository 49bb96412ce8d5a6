"""`tinylm.train`, `tinylm.finetune_lora` and `tinylm.finetune_adapter`: training from Python."""

import contextlib
import dataclasses
import functools
import inspect
import os
import re
import textwrap
import threading
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import tinylm
from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings
from tinylm.config.similar_names import require_settings
from tinylm.config.validation import check_settings, declared_settings, require
from tinylm.distributed.ranks import join_ranks
from tinylm.errors import InterruptedRunError, UsageError
from tinylm.machine.torch_settings import kept_random_numbers, usual_settings
from tinylm.reporter import LogReporter, Reporter
from tinylm.system.ranks import Launch
from tinylm.text.file_selection import Files
from tinylm.training.events import EventCallback
from tinylm.training.pipeline import train_or_resume
from tinylm.training.progress_bar import ProgressBar, watched_stream
from tinylm.training.result import TrainingResult
from tinylm.training.session import Session
from tinylm.training.training_request import TrainingRequest

PathLike = str | Path
P = ParamSpec("P")
A = TypeVar("A")
JUST_NOW = 0.1  # seconds
_TRAINING = threading.RLock()  # held by the thread that trains


def _unlock_training() -> None:
    global _TRAINING
    _TRAINING = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_training)  # the thread that trains does not exist in the new process
HELP_COLUMNS = 100  # of a setting in `help`
FLAG = re.compile(r"--([a-z][a-z-]*)")  # of another setting, in a help text


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """The arguments of every function that trains, besides its texts and settings."""

    resume: PathLike | None = None
    callbacks: EventCallback | Sequence[EventCallback] = ()
    reporter: Reporter | None = None
    progress: bool = True


@dataclass(frozen=True)
class TrainCall(TrainSettings, CallArguments):
    """The arguments of `train`."""

    files: Files = ()
    out: PathLike | None = None


@dataclass(frozen=True)
class AdapterArguments(CallArguments):
    """The arguments of the functions that train an adapter, besides its settings."""

    files: Files = ()
    model: PathLike | None = None
    out: PathLike | None = None


@dataclass(frozen=True)
class LoRACall(LoRASettings, AdapterArguments):
    """The arguments of `finetune_lora`."""


@dataclass(frozen=True)
class AdapterCall(AdapterSettings, AdapterArguments):
    """The arguments of `finetune_adapter`."""


NOT_SETTINGS = {field.name for kind in (CallArguments, AdapterArguments) for field in dataclasses.fields(kind)}


class _Signature(inspect.Signature):
    """A signature with all settings, whose text names only the other arguments: `help` prints the text."""

    def __str__(self) -> str:
        parameters = self.parameters.values()
        own = [p.replace(annotation=p.empty) for p in parameters if p.name in NOT_SETTINGS]
        settings = inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD)
        return str(inspect.Signature([*own, settings]))

    def format(self, *, max_width: int | None = None) -> str:
        """The text, which Python 3.13 and later ask for here."""
        return str(self)


def _takes(kind: Callable[P, A]) -> Callable[[Callable[[A], TrainingResult]], Callable[P, TrainingResult]]:
    """Decorator: the function takes the fields of the dataclass `kind` as arguments, of which it gets an instance.

    Its docstring ends with the settings among them.
    """

    def decorate(function: Callable[[A], TrainingResult]) -> Callable[P, TrainingResult]:
        types = typing.get_type_hints(kind)  # without the declarations of settings, for `help`
        parameters = inspect.signature(kind).parameters
        named = [parameter.replace(annotation=types[name]) for name, parameter in parameters.items()]

        @functools.wraps(function)
        def call(*args: P.args, **settings: P.kwargs) -> TrainingResult:
            require_settings(settings, parameters)
            return function(kind(*args, **settings))

        # `inspect`, completion and `help` read these, which type checkers do not know.
        call.__signature__ = _Signature(named, return_annotation=TrainingResult)  # type: ignore[attr-defined]
        call.__annotations__ = {**types, "return": TrainingResult}
        call.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{_describe_settings(kind)}"
        del call.__wrapped__
        return call

    return decorate


def _describe_settings(kind: Any) -> str:
    """The settings of a dataclass as lines, by the panels that --help has, too."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    panels: dict[str, list[str]] = {}
    for name, setting in declared_settings(kind).items():
        words = f" One of: {', '.join(setting.values)}." if isinstance(setting.values, tuple) else ""
        sentence = FLAG.sub(lambda flag: f"`{flag[1].replace('-', '_')}`", setting.help + words)
        lines = textwrap.wrap(f"{name} = {defaults[name]!r}: {sentence}", HELP_COLUMNS, subsequent_indent="    ")
        panels.setdefault(setting.panel or "Other", []).extend(lines)
    return "\n\n".join(f"{panel}:\n" + "\n".join(f"  {line}" for line in lines) for panel, lines in panels.items())


@_takes(TrainCall)
def train(call: TrainCall) -> TrainingResult:
    """Train a language model on text files.

    files: text files, folders, glob patterns, or - for standard input
    out: run directory to write. Default: checkpoints/<name of the first file>.
    resume: run directory to continue from its last save, in place of a new run; only length, patience, intervals
        and `parallel` can change, and with `files`, `val_data` can be given again
    callbacks: a function, or several, that are called with each event of `tinylm.training.events`
    reporter: receives notes, warnings and progress. Default: the logger `tinylm`
    progress: in a notebook or a terminal, print the plan and show a progress bar; notes are printed, too, unless the
        program handles the records of the logger

    The other arguments are the options of `tinylm train`, with the same names and defaults. They are listed below;
    `None` stands for a value that the plan chooses.

    A `time` budget counts from the call, the import of torch by `tinylm.train` included, to its return.

    Ctrl-C saves the run and ends training; the result then has `stopped_by="signal"`.

    The settings and the random numbers of torch are those of a program's own before and after the call, and do not
    change the result. One thread of a program can train at a time.

    In a program that torchrun starts, all processes train the model together. Only rank 0 calls the callbacks.

    Raises UsageError for settings, files and paths that cannot be used, DivergedError for a loss, gradient or weight
    that is not finite, TinyLMError if the run cannot be written or does not fit in memory, or if another process fails,
    KeyboardInterrupt for a second Ctrl-C or one before the first step, and TypeError for unknown settings.
    """
    return _run(call)


@_takes(LoRACall)
def finetune_lora(call: LoRACall) -> TrainingResult:
    """Fine-tune a model on text files with LoRA. The files of the base model are not changed.

    model: run directory of the base model, or its name under checkpoints/, a Hugging Face folder, `hf:OWNER/NAME`, or a
        GGUF file. Default: the newest model under checkpoints/.
    out: run directory of the adapter to write. Default: <model>-lora, under checkpoints/ if the base is not a run.

    The other arguments are the options of `tinylm finetune-lora`, with the same names and defaults, listed below.
    Files, `resume`, callbacks, the reporter, progress, the result and the errors are those of `train`.
    """
    return _run(call, call.model)


@_takes(AdapterCall)
def finetune_adapter(call: AdapterCall) -> TrainingResult:
    """Fine-tune a model on text files with bottleneck adapters after each sublayer (Houlsby et al. 2019).

    out: run directory of the adapter to write. Default: <model>-adapter, as for `finetune_lora`.

    The other arguments are the options of `tinylm finetune-adapter`, with the same names and defaults, listed below.
    The rest is that of `finetune_lora`.
    """
    return _run(call, call.model)


Call = TrainCall | LoRACall | AdapterCall


def _run(call: Call, model: PathLike | None = None) -> TrainingResult:
    launch = Launch.of(os.environ)
    started, (begun, ended) = time.monotonic(), tinylm._last_import
    if started - ended < JUST_NOW:  # `tinylm.<function>` has caused the import
        started = begun
    with _no_other_training(), kept_random_numbers(), usual_settings():
        return _train(call, model, launch, started)


@contextlib.contextmanager
def _no_other_training() -> Iterator[None]:
    """Context manager for a training. Raises UsageError while another thread trains; callbacks may train."""
    lock = _TRAINING  # a process that is forked meanwhile has another one
    if not lock.acquire(blocking=False):
        raise UsageError(
            "Another thread of this program trains a model, and both would use the same random numbers; wait for it, "
            "or train in a process of its own."
        )
    try:
        yield
    finally:
        lock.release()


def _train(call: Call, model: PathLike | None, launch: Launch, started: float) -> TrainingResult:
    check_settings(type(call), {"resume": call.resume, "model": model, "out": call.out})
    request = TrainingRequest(
        settings=dataclasses.replace(call, files=()),  # an array of names cannot be compared with a default
        files=call.files,
        resume=_path(call.resume),
        model=_path(model),
        out=_path(call.out),
    )
    stream = watched_stream() if call.progress and launch.rank == 0 else None
    with contextlib.ExitStack() as context:
        bar = None if stream is None else context.enter_context(ProgressBar(stream))
        reporter = call.reporter or bar or LogReporter()
        given = (call.callbacks,) if callable(call.callbacks) else tuple(call.callbacks)
        require(all(map(callable, given)), "The callbacks must be a function, or several.")
        callbacks = (*map(kept_random_numbers(), given), *([bar] if bar else ()))
        try:
            with join_ranks(launch, reporter) as ranks:
                session = Session(reporter=reporter, callbacks=callbacks, started=started, ranks=ranks)
                result = train_or_resume(request, session)
        except InterruptedRunError as error:
            raise KeyboardInterrupt(str(error)) from None
        if bar is not None:
            bar.finish(result)
    return result


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)
