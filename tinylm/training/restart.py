"""Starting a run: new, resumed, or continued after torchrun has restarted the command."""

from pathlib import Path

from tinylm.errors import TinyLMError
from tinylm.run_directory.commit import recover_last, recover_run
from tinylm.run_directory.loading import read_config
from tinylm.run_directory.lock import lock_run
from tinylm.training.pipeline import Session, TrainingResult, train_run
from tinylm.training.resume import resume_run
from tinylm.training.starting_point import NewAdapter
from tinylm.training.training_request import ResumeRequest, TrainingRequest


def start_run(request: TrainingRequest | ResumeRequest, session: Session) -> TrainingResult:
    """Train a new run or resume one. A new run that this torchrun command saved before a restart is resumed.

    Raises the errors of `train_run` and `resume_run`, and TinyLMError if the file system fails while an interrupted
    save of that run is recovered.
    """
    if isinstance(request, TrainingRequest) and session.ranks.is_first and session.ranks.restarts:
        request = _saved_before_restart(request, session) or request
    return train_run(request, session) if isinstance(request, TrainingRequest) else resume_run(request, session)


def _saved_before_restart(request: TrainingRequest, session: Session) -> ResumeRequest | None:
    """A request to resume the run at the path of `request`; `None` if this torchrun command has not saved one there.

    Raises TinyLMError if the file system fails while an interrupted save is recovered.
    """
    source = request.start.find_source(session.reporter)
    out = request.out or request.start.default_out(source, request.text)
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
    base: Path | None = None
    if isinstance(request.start, NewAdapter):
        base = request.start.base
    kind = config.adapter.kind if config.adapter else None
    return ResumeRequest(run=out, adapter_kind=kind, base=base, parallel=request.machine.parallel)
