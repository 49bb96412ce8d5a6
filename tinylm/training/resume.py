"""Resuming a run from its last save."""

import math
import time
from dataclasses import replace
from pathlib import Path

from tinylm.config.duration import format_duration, format_duration_setting
from tinylm.config.run import new_run_id, run_of
from tinylm.config.settings import INTERVAL_NAMES
from tinylm.config.training import TIME_BUDGET
from tinylm.errors import OtherRunKindError, UsageError, concerning
from tinylm.jobs.job import load_job
from tinylm.jobs.run_tokens import encode_recorded_text, reopen_tokens
from tinylm.machine.device import choose_device, describe_device
from tinylm.models.by_digest import find_adapters, find_base_model, find_teachers, require_fitting
from tinylm.models.open import find_model
from tinylm.planning.plan import plan_resumed
from tinylm.reporter import counted
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import find_run
from tinylm.run_directory.loading import read_config, read_tokenizer, trained_weights
from tinylm.run_directory.lock_and_commit import lock_run
from tinylm.run_directory.weights import WHOLE
from tinylm.system.files import resolve_links
from tinylm.training.clock import StoppingRule
from tinylm.training.parallel import rank_memory, rank_shard, restore_rows
from tinylm.training.run import TrainingRun
from tinylm.training.session import Session, TrainingResult, receive_run, share_run, train_to_end
from tinylm.training.state import TrainerState
from tinylm.training.training_request import TrainingRequest


@concerning("resume")
def resume_run(saved: Path, request: TrainingRequest, session: Session) -> TrainingResult:
    """Continue the run at `saved` with its recorded settings, except for those in the request.

    A run that is finished by its steps, epochs or patience is not trained further; a warning names the setting that
    extends it, and its result is returned.

    Raises UsageError for a run whose time budget is used up (unless torchrun has restarted the command), for a run of
    another kind than the request's, and for a run that was merged or imported, not trained; NotResumableError without a
    complete last save; otherwise the errors of `train_run`.
    """
    if not session.ranks.is_first:
        return train_to_end(receive_run(session.ranks), session)
    reporter, ranks = session.reporter, session.ranks
    path = run_of(find_run(saved, reporter))
    base = request.model and find_model(request.model, reporter)
    config = read_config(path)
    recorded = config.training_parts(path)
    training, runtime, data = recorded
    if (config.adapter.kind if config.adapter else None) != request.adapter_kind:
        raise OtherRunKindError(path)
    device = choose_device(runtime.device).value
    reporter.note(f"On {describe_device(device)} in {runtime.dtype}, as when {path} began.")
    if config.adapter is None and (adapters := find_adapters(path)):
        reporter.warn(
            f"{', '.join(run.name for run in adapters[:3])} was trained on the weights of {path}, and cannot be loaded "
            "after better weights replace them; to keep both, copy the run first."
        )
    with lock_run(path.absolute()):
        # The save and the tokens
        directory = RunDirectory(path)
        free = rank_memory(device, ranks)  # before the save is loaded
        save = directory.load_last(config)
        tokenizer = read_tokenizer(path, config)
        if not request.paths:
            tokens = reopen_tokens(path, data, tokenizer)
        else:
            text = request.text
            tokens = encode_recorded_text(path, config, tokenizer, text.paths, text.val_data, reporter)

        # The plan: memory, and the settings that may change
        sizes, parallel = load_job(training.objective).sizes(tokens, tokenizer), request.settings.parallel
        plan = plan_resumed(config, recorded, sizes, tokenizer.vocab_size, free, parallel, ranks.size)
        changes = request.select(INTERVAL_NAMES | {"patience"})
        training = replace(training, budget=request.budget or training.budget, **changes)
        config = replace(config, training=training, id=config.id or new_run_id())
        state = TrainerState.from_json(save.state)
        notices: list[str] = []
        save.state["micro_batch"] = plan.resumed_micro_batch(state.micro_batch, notices)

        # The model, its base and its teachers
        shard, rows = rank_shard(plan.parallel, config, ranks), None
        if config.adapter is not None:
            base = base or find_base_model(path, config.adapter.base, config.adapter.base_digest)
        if shard != WHOLE:
            model, rows = restore_rows(config, save, shard)
        else:
            model = trained_weights(config.adapter).restore(path, config, save.read_weights(), base)
        teachers = find_teachers(path, config, request.teachers, reporter)
        require_fitting(teachers, tokenizer, config.model.vocab_size, training.sequence_length or config.model.context)

        # Training, unless the run is finished
        run = TrainingRun(directory, config, model, tokenizer, tokens, save, ranks, plan.parallel, rows, teachers)
        rule = StoppingRule.of(training, run.task.steps_per_epoch)
        if finished := _describe_finished(rule, state, state.seconds + time.monotonic() - session.started):
            message = f"{path} is finished: {finished} continues it."
            restarted = ranks.restarts > 0  # by torchrun, with the same arguments
            if training.budget.time is not None and not rule.patience_exhausted(state) and not restarted:
                raise UsageError(message)
            reporter.warn(message)
        reporter.note(f"Resuming {path} at step {state.step}, on the text as it was when the run began.")
        for notice in notices:
            reporter.warn(notice)
        share_run(run, session)
        result = train_to_end(run, session)
        return result if base is None else replace(result, base=resolve_links(base))  # not the recorded path


def _describe_finished(rule: StoppingRule, state: TrainerState, seconds: float) -> str | None:
    """Why a run is finished, and the setting that extends it; `None` if it is not finished."""
    match rule.finished_by(state, seconds):
        case "patience":
            more = 2 * max(rule.patience or 0, state.evals_since_best)
            return f"the last {counted(state.evals_since_best, 'evaluation')} brought no improvement; `patience={more}`"
        case "time":
            time = rule.budget.time or 0.0
            longer = min(2 * max(time, math.ceil(seconds + rule.reserve(state))), TIME_BUDGET.high)
            return (
                f"it was trained for {format_duration(state.seconds)}, and its `time` of "
                f"{format_duration_setting(time)} is the total of all its sessions; "
                f'`time="{format_duration_setting(longer)}"`'
            )
        case "epochs":
            epochs, total_steps = rule.budget.epochs or 0.0, rule.total_steps or 1
            more_epochs = max(2 * epochs, epochs * math.ceil(1 + state.step / total_steps))
            steps = counted(total_steps, "step")
            return f"the budget of `epochs={epochs:g}`, {steps}, is used up; `epochs={more_epochs:g}`"
        case "steps":
            total_steps = rule.total_steps or 1
            more = 2 * max(total_steps, state.step)
            return f"the budget of {counted(total_steps, 'step')} is used up; `steps={more}`"
    return None
