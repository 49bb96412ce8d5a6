"""`tinylm.train`, `tinylm.finetune_lora` and `tinylm.finetune_adapter`: training from Python."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import tinylm
from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings
from tinylm.distributed.launch import Launch
from tinylm.distributed.ranks import join_ranks
from tinylm.errors import InterruptedRunError
from tinylm.reporter import LogReporter, Reporter
from tinylm.training.pipeline import EventCallback, Session, TrainingResult
from tinylm.training.restart import start_run
from tinylm.training.training_request import (
    Files,
    ResumeRequest,
    TrainingRequest,
    bottleneck_request,
    lora_request,
    resume_request,
    train_request,
)

PathLike = str | Path
Callbacks = Sequence[EventCallback]
JUST_NOW = 0.1  # seconds


def train(
    files: Files = (),
    out: PathLike | None = None,
    *,
    resume: PathLike | None = None,
    callbacks: Callbacks = (),
    reporter: Reporter | None = None,
    **settings: Unpack[TrainSettings],
) -> TrainingResult:
    """Train a language model on text files.

    files: text files, folders, glob patterns, or - for standard input
    out: run directory to write. Default: checkpoints/<name of the first file>.
    resume: run directory to continue from its last save, in place of a new run; only LengthSettings, IntervalSettings
        and `parallel` can change, and with `files`, `val_data` can be given again
    callbacks: functions that are called with each event of `tinylm.training.events`
    reporter: receives notes, warnings and progress. Default: the logger `tinylm`.
    settings: the options of `tinylm train`, with the same names and defaults; see TrainSettings

    A `time` budget counts from the call, the import of torch by `tinylm.train` included, to its return.

    Ctrl-C saves the run and ends training; the result then has `stopped_by="signal"`.

    In a program that torchrun starts, all processes train the model together. Only rank 0 calls the callbacks.

    Raises UsageError for settings, files and paths that cannot be used, DivergedError for a loss, gradient or weight
    that is not finite, TinyLMError if the run cannot be written or does not fit in memory, or if another process fails,
    KeyboardInterrupt for a second Ctrl-C or one before the first save, and TypeError for unknown settings of a new run.
    """
    request: TrainingRequest | ResumeRequest
    if resume is None:
        request = train_request(files, _path(out), settings)
    else:
        request = resume_request(Path(resume), files, _with_out(settings, out))
    return _run(request, callbacks, reporter)


def finetune_lora(
    files: Files = (),
    model: PathLike | None = None,
    out: PathLike | None = None,
    *,
    resume: PathLike | None = None,
    callbacks: Callbacks = (),
    reporter: Reporter | None = None,
    **settings: Unpack[LoRASettings],
) -> TrainingResult:
    """Fine-tune a model on text files with LoRA. The files of the base model are not changed.

    model: run directory of the base model, or its name under checkpoints/, a Hugging Face folder, `hf:OWNER/NAME`, or a
        GGUF file. Default: the newest model under checkpoints/.
    out: run directory of the adapter to write. Default: <model>-lora, under checkpoints/ if the base is not a run.
    settings: the options of `tinylm finetune-lora`, with the same names and defaults; see LoRASettings

    The other arguments, the result and the errors are those of `train`.
    """
    request: TrainingRequest | ResumeRequest
    if resume is None:
        request = lora_request(files, _path(model), _path(out), settings)
    else:
        request = resume_request(Path(resume), files, _with_out(settings, out), adapter_kind="lora", base=_path(model))
    return _run(request, callbacks, reporter)


def finetune_adapter(
    files: Files = (),
    model: PathLike | None = None,
    out: PathLike | None = None,
    *,
    resume: PathLike | None = None,
    callbacks: Callbacks = (),
    reporter: Reporter | None = None,
    **settings: Unpack[AdapterSettings],
) -> TrainingResult:
    """Fine-tune a model on text files with bottleneck adapters after each sublayer (Houlsby et al. 2019).

    out: run directory of the adapter to write. Default: <model>-adapter, as for `finetune_lora`.
    settings: the options of `tinylm finetune-adapter`, with the same names and defaults; see AdapterSettings

    The other arguments, the result and the errors are those of `finetune_lora`.
    """
    request: TrainingRequest | ResumeRequest
    if resume is None:
        request = bottleneck_request(files, _path(model), _path(out), settings)
    else:
        request = resume_request(
            Path(resume), files, _with_out(settings, out), adapter_kind="bottleneck", base=_path(model)
        )
    return _run(request, callbacks, reporter)


def _run(request: TrainingRequest | ResumeRequest, callbacks: Callbacks, reporter: Reporter | None) -> TrainingResult:
    launch = Launch.of(os.environ)
    started = _call_start()
    try:
        reporter = reporter or LogReporter()
        with join_ranks(launch, reporter) as ranks:
            return start_run(
                request, Session(reporter=reporter, callbacks=tuple(callbacks), started=started, ranks=ranks)
            )
    except InterruptedRunError as error:
        raise KeyboardInterrupt(str(error)) from None


def _call_start() -> float:
    """The `time.monotonic()` of the call: now, or before the import if `tinylm.<function>` has just caused one."""
    now = time.monotonic()
    begun, ended = tinylm._last_import
    return begun if now - ended < JUST_NOW else now


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _with_out(settings: Mapping[str, Any], out: PathLike | None) -> dict[str, Any]:
    """The settings with `out`, if given: `resume_request` rejects it, as it rejects all settings that cannot change."""
    return {**settings, **({} if out is None else {"out": out})}
