"""A training run as a whole: start it, new or from a save; prepare a new one, write its directory, train it."""

from pathlib import Path
from typing import Any

from tinylm.config.run import run_of
from tinylm.errors import TinyLMError, UsageError
from tinylm.models.by_digest import remember_base
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import read_config
from tinylm.run_directory.lock_and_commit import lock_run, recover_last, recover_run, reserve
from tinylm.system.files import resolve_links
from tinylm.training.events import Examples, Planned
from tinylm.training.prepare import machine_of, paths_of, prepare
from tinylm.training.resume import resume_run
from tinylm.training.run import TrainingRun
from tinylm.training.session import Session, TrainingResult, receive_run, share_run, train_to_end
from tinylm.training.start import default_out, find_source
from tinylm.training.training_request import TrainingRequest


def start_run(request: TrainingRequest, session: Session) -> TrainingResult:
    """Train a new run or resume one. A new run that this torchrun command saved before a restart is resumed.

    Raises the errors of `train_run` and `resume_run`, and TinyLMError if the file system fails while an interrupted
    save of that run is recovered.
    """
    if request.resume is None and session.ranks.is_first and session.ranks.restarts:
        request = _saved_before_restart(request, session) or request
    return train_run(request, session) if request.resume is None else resume_run(request.resume, request, session)


def train_run(request: TrainingRequest, session: Session) -> TrainingResult:
    """Train a new run.

    Raises InterruptedRunError if a signal stops it before the first step, which leaves no files, UsageError for
    settings and files that cannot be used, DivergedError for a loss, gradient or weight that is not finite, and
    TinyLMError for a run that cannot be written or does not fit in memory.
    """
    if not session.ranks.is_first:
        return train_to_end(receive_run(session.ranks), session)
    ranks, reporter = session.ranks, session.reporter
    machine = machine_of(request, reporter, ranks.launch)
    source, out = paths_of(request, reporter)
    with reserve(out, request.settings.force) as staging:
        # The plan
        prepared = prepare(request, machine, source, staging, reporter, ranks.size, ranks.job)
        plan, config, teachers = prepared.plan, prepared.config, prepared.start.teachers
        session.report(Planned(plan, config, prepared.trainable_parameters))
        if request.settings.show_examples:
            session.report(Examples(prepared.examples(request.settings.show_examples)))

        # The run directory, hidden beside `out` until the first save
        for teacher in teachers:
            if resolve_links(run_of(teacher.path)) == resolve_links(out):
                raise UsageError(f"{out} is a teacher, which is never written to; choose another `out`.")
        directory = RunDirectory.create(out, config, prepared.tokenizer)
        if config.adapter is not None:
            remember_base(config.adapter.base_digest, Path(config.adapter.base))

        # The network, and training
        network = prepared.network or prepared.start.build(plan.model, plan.training.seed)
        others: dict[str, Any] = {"ranks": ranks, "parallel": plan.parallel, "teachers": teachers}
        run = TrainingRun(directory, config, network, prepared.tokenizer, prepared.tokens, **others)
        del prepared  # with the weights of a base as they were read, which the network may no longer share
        share_run(run, session)
        return train_to_end(run, session)


def _saved_before_restart(request: TrainingRequest, session: Session) -> TrainingRequest | None:
    """A request to resume the run that `request` began; `None` if this torchrun command has not saved one at its path.

    Raises TinyLMError if the file system fails while an interrupted save is recovered.
    """
    source = find_source(request, session.reporter)
    out = request.out or default_out(request, source)
    try:
        with lock_run(out):
            recover_run(out)
            recover_last(out)
        config = read_config(out)
    except TinyLMError:
        return None
    except OSError as error:
        raise TinyLMError(f"Cannot continue {out} after a restart: {error.strerror or error}.") from error
    if config.runtime is None or config.runtime.job != session.ranks.job or not (out / "last").is_dir():
        return None
    kept = {name: value for name, value in request.given.items() if name in ("parallel", "teacher")}
    return TrainingRequest(settings=type(request.settings)(**kept), resume=out, model=request.model)
