"""`tinylm.train`, `tinylm.finetune_lora` and `tinylm.finetune_adapter`: training from Python."""

import functools
import inspect
import os
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import tinylm
from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings
from tinylm.distributed.ranks import join_ranks
from tinylm.errors import InterruptedRunError
from tinylm.reporter import LogReporter, Reporter
from tinylm.system.ranks import Launch
from tinylm.training.events import EventCallback, TrainingResult
from tinylm.training.pipeline import train_or_resume
from tinylm.training.session import Session
from tinylm.training.training_request import Files, TrainingRequest

PathLike = str | Path
P = ParamSpec("P")
A = TypeVar("A")
JUST_NOW = 0.1  # seconds


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """The arguments of every function that trains, besides its texts and settings."""

    resume: PathLike | None = None
    callbacks: Sequence[EventCallback] = ()
    reporter: Reporter | None = None


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


def _takes(kind: Callable[P, A]) -> Callable[[Callable[[A], TrainingResult]], Callable[P, TrainingResult]]:
    """Decorator: the function takes the fields of the dataclass `kind` as arguments, of which it gets an instance."""

    def decorate(function: Callable[[A], TrainingResult]) -> Callable[P, TrainingResult]:
        types = typing.get_type_hints(kind)  # without the declarations of settings, for `help`
        signature = inspect.signature(kind)
        parameters = [parameter.replace(annotation=types[name]) for name, parameter in signature.parameters.items()]
        signature = signature.replace(parameters=parameters, return_annotation=TrainingResult)

        @functools.wraps(function)
        def call(*args: P.args, **settings: P.kwargs) -> TrainingResult:
            if unknown := sorted(settings.keys() - signature.parameters.keys()):
                raise TypeError(f"unknown settings: {', '.join(unknown)}")
            return function(kind(*args, **settings))

        # `inspect` and `help` read the attribute, which type checkers do not know.
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {**types, "return": TrainingResult}
        del call.__wrapped__
        return call

    return decorate


@_takes(TrainCall)
def train(call: TrainCall) -> TrainingResult:
    """Train a language model on text files.

    files: text files, folders, glob patterns, or - for standard input
    out: run directory to write. Default: checkpoints/<name of the first file>.
    resume: run directory to continue from its last save, in place of a new run; only length, patience, intervals
        and `parallel` can change, and with `files`, `val_data` can be given again
    callbacks: functions that are called with each event of `tinylm.training.events`
    reporter: receives notes, warnings and progress. Default: the logger `tinylm`.

    The other arguments are the options of `tinylm train`, with the same names and defaults; see TrainSettings.

    A `time` budget counts from the call, the import of torch by `tinylm.train` included, to its return.

    Ctrl-C saves the run and ends training; the result then has `stopped_by="signal"`.

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

    The other arguments are the options of `tinylm finetune-lora`, with the same names and defaults; see LoRASettings.
    Files, `resume`, callbacks, the reporter, the result and the errors are those of `train`.
    """
    return _run(call, call.model)


@_takes(AdapterCall)
def finetune_adapter(call: AdapterCall) -> TrainingResult:
    """Fine-tune a model on text files with bottleneck adapters after each sublayer (Houlsby et al. 2019).

    out: run directory of the adapter to write. Default: <model>-adapter, as for `finetune_lora`.

    The other arguments are the options of `tinylm finetune-adapter`, with the same names and defaults; see
    AdapterSettings. The rest is that of `finetune_lora`.
    """
    return _run(call, call.model)


Call = TrainCall | LoRACall | AdapterCall


def _run(call: Call, model: PathLike | None = None) -> TrainingResult:
    launch = Launch.of(os.environ)
    started, (begun, ended) = time.monotonic(), tinylm._last_import
    if started - ended < JUST_NOW:  # `tinylm.<function>` has caused the import
        started = begun
    request = TrainingRequest(
        settings=call, files=call.files, resume=_path(call.resume), model=_path(model), out=_path(call.out)
    )
    try:
        reporter = call.reporter or LogReporter()
        with join_ranks(launch, reporter) as ranks:
            return train_or_resume(
                request, Session(reporter=reporter, callbacks=tuple(call.callbacks), started=started, ranks=ranks)
            )
    except InterruptedRunError as error:
        raise KeyboardInterrupt(str(error)) from None


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)
