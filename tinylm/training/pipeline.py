"""A training run as a whole: planned, started, or resumed from its last save.

A new run goes from what the user asks for through start, text, tokenizer, tokens and plan to its configuration.
"""

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinylm.config.jobs import JOBS, applicable, objective_for, rows_on
from tinylm.config.run import Estimates, RunConfig, TokenizerConfig, new_run_id, run_of
from tinylm.config.settings import INTERVAL_NAMES, format_duration, format_duration_setting, names_of
from tinylm.config.training import TIME_BUDGET, TeacherSettings, TrainingSettings
from tinylm.errors import OtherRunKindError, TinyLMError, UsageError, concerning
from tinylm.jobs.job import MarkedText, load_job
from tinylm.jobs.reading import load_text
from tinylm.jobs.run_tokens import encode_recorded_text, encode_text, reopen_tokens
from tinylm.machine.device import choose_device, describe_device
from tinylm.machine.measure import Machine, choose_machine
from tinylm.models.find_base import find_adapters, find_base_model, remember_base
from tinylm.models.open import find_model
from tinylm.models.teachers import find_teachers, require_fitting
from tinylm.planning.plan import Plan, plan_resumed, plan_training
from tinylm.planning.plan_request import PlanRequest
from tinylm.reporter import Reporter, counted
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import find_run, replaces
from tinylm.run_directory.loading import read_config, read_tokenizer, trained_weights
from tinylm.run_directory.lock_and_commit import lock_run, recover_last, recover_run, reserve
from tinylm.run_directory.weights import WHOLE
from tinylm.system.files import resolve_links, temporary_folder
from tinylm.system.ranks import Launch
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.tokenizer_choice import handle_unknown_characters
from tinylm.training.clock import StoppingRule
from tinylm.training.events import Examples, Planned
from tinylm.training.parallel import rank_memory, rank_shard, restore_rows
from tinylm.training.result import TrainingResult
from tinylm.training.run import TrainingRun
from tinylm.training.session import Session, train_session
from tinylm.training.shared_run import receive_run, share_run
from tinylm.training.start import Start, default_out, find_source, open_start
from tinylm.training.state import TrainerState
from tinylm.training.training_request import TrainingRequest
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import count_parameters

TRAINING_NAMES = names_of(TrainingSettings, TeacherSettings) | {"warmup_steps"}


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A new run before its directory is written.

    model: an existing one, which is in memory; `None` for a new one, which is built when training begins
    """

    plan: Plan
    config: RunConfig
    start: Start
    model: Transformer | None
    tokenizer: Tokenizer
    tokens: TokenFolder

    @property
    def trainable_parameters(self) -> int:
        """The number of trainable parameters."""
        if self.model is None:
            return self.plan.parameters
        return count_parameters(self.model, trained=True)["total"]

    def examples(self, number: int) -> tuple[MarkedText, ...]:
        """The first `number` training examples, split into text that counts in the loss and text that does not."""
        return load_job(self.plan.training.objective).marked_examples(self.tokens, self.tokenizer, number)


def plan_run(request: TrainingRequest, reporter: Reporter, launch: Launch) -> PreparedRun:
    """Load the model and the text, and plan the run, as `train_new_run` does, without writing a run directory.

    Raises UsageError for settings and files that cannot be used, and TinyLMError for a run that does not fit in memory.
    """
    machine = machine_of(request, reporter, launch)
    source, out = paths_of(request, reporter)
    is_free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    if not is_free and not request.settings.force:
        reporter.note(f"{out} already exists; set `force` to replace it, or choose another `out`.")
    with temporary_folder() as folder:
        return prepare(request, machine, source, folder, reporter, launch.size, launch_id=None)


def machine_of(request: TrainingRequest, reporter: Reporter, launch: Launch) -> Machine:
    """The machine that the request chooses, with the memory that one process of `launch` may use."""
    machine = choose_machine(request.settings.device, request.settings.dtype, reporter)
    if machine.device == "cpu" and machine.free_memory is not None:
        machine = replace(machine, free_memory=machine.free_memory // launch.local_size)
    processes = f" in {launch.size} processes" if launch.size > 1 else ""
    reporter.note(f"On {machine.reasons}{processes}.")
    return machine


def paths_of(request: TrainingRequest, reporter: Reporter) -> tuple[Path | None, Path]:
    """The model to load, `None` for a new one, and the run directory to write.

    Raises UsageError if the model does not exist, and if the run would replace it.
    """
    source = find_source(request, reporter)
    out = request.out or default_out(request, source)
    if source is not None and replaces(out, source):
        raise UsageError(f"{out} is the base model, which is never written to; choose another `out`.")
    return source, out


def prepare(
    request: TrainingRequest,
    machine: Machine,
    source: Path | None,
    staging: Path,
    reporter: Reporter,
    processes: int,
    launch_id: str | None,
) -> PreparedRun:
    """Load the model, read and encode the text, and plan.

    source: the model to load; `None` for a new one
    staging: the hidden directory of the new run (see `reserve`), or a temporary one; for the tokens of standard input
    processes: number of ranks
    launch_id: random id of a torchrun command, the same after its restarts (see Rendezvous); `None` without torchrun

    Raises UsageError for settings and text that cannot be used, and TinyLMError if training would run out of memory.
    """
    # The model to start from, or the choices for a new one
    start = open_start(request, source, reporter)

    # The text and its split, and what the model learns from it
    text = load_text(request.text, staging, reader=start, reporter=reporter)
    if text.corpus.labels and not start.labels:
        start = start.with_labels(text.corpus.labels, rows_on(text.corpus.kind)[0].architectures[0])
    objective = choose_objective(request, start, text.corpus.kind)
    given = applicable(type(request.settings), request.given, (JOBS[objective],), request.ignorable)

    # The tokenizer
    tokenizer = start.fit_tokenizer(text, request.budget.time if request.budget else None, reporter)
    if tokenizer.kind != "bpe" and "bpe_dropout" in request.ignorable:
        given.pop("bpe_dropout", None)

    # The tokens, on disk
    text = handle_unknown_characters(  # only a given vocabulary can lack characters
        text, tokenizer, request.text.unknown, reporter, vocabulary_owner=start.vocabulary_owner, model=source
    )
    tokens, data = encode_text(text, tokenizer, staging, reporter)

    # The plan
    teachers = start.teachers
    plan = plan_training(
        machine,
        PlanRequest(
            objective=objective,
            data=data,
            vocab_size=tokenizer.vocab_size,
            sizes=load_job(objective).sizes(tokens, tokenizer),
            model=start.choices,
            training={name: value for name, value in given.items() if name in TRAINING_NAMES},
            budget=request.budget,
            compile=request.settings.compile,
            base=start.model_config(tokenizer.vocab_size),
            base_loading_bytes=start.loading_bytes,
            parallel=request.settings.parallel,
            ranks=processes,
            adapter=start.adapter,
            frozen_parameters=sum(teacher.recorded.parameters for teacher in teachers),
            max_context=min((teacher.network.context for teacher in teachers), default=None),
            tokenizer_kind=tokenizer.kind,
        ),
    )
    if plan.shortage is not None:
        raise TinyLMError(plan.shortage)
    require_fitting(teachers, tokenizer, plan.model.vocab_size, plan.training.sequence_length or plan.model.context)

    # The configuration that the run records
    rendering = text.corpus.rendering
    config = RunConfig.new(
        id=new_run_id(),
        model=plan.model,
        tokenizer=TokenizerConfig(
            kind=tokenizer.kind,
            sha256=tokenizer.sha256,
            special=tokenizer.special,
            chat_template=rendering.template.source if rendering else start.chat_template,
        ),
        data=data,
        training=plan.training,
        runtime=replace(plan.runtime, job=launch_id),
        adapter=start.adapter,
        teachers=tuple(teacher.recorded for teacher in teachers),
        family=None if start.base is None else start.base.config.family,
        planned=Estimates(steps=plan.steps, seconds=plan.seconds, memory=plan.memory),
    )
    # An existing model, which is in memory; a new one takes memory only when training begins
    model = None if start.base is None else start.build(plan.model, plan.training.seed)
    return PreparedRun(plan=plan, config=config, start=start, model=model, tokenizer=tokenizer, tokens=tokens)


def choose_objective(request: TrainingRequest, start: Start, kind: str) -> str:
    """The given objective, or that of the model on this kind of data. Raises UsageError if it does not fit them."""
    objective = request.objective or objective_for(start.architecture, kind)
    row = JOBS[objective]
    chosen = "`teacher`" if start.teachers else f'`objective="{objective}"`'
    if row.has_teachers and not start.teachers:
        models = "adapters take none; leave it out" if start.adapter else "name it with `teacher`"
        raise UsageError(f"{chosen} needs a model to learn from; {models}.")
    if row.data != kind:
        raise UsageError(f"{chosen} is for {row.noun}, and the data are {rows_on(kind)[0].noun}; leave it out.")
    if row.has_reference and start.base is None:
        raise UsageError(f"{row.noun.capitalize()} train an existing model; name it with `init_from`.")
    return objective


def train_or_resume(request: TrainingRequest, session: Session) -> TrainingResult:
    """Train a new run or resume one. A new run that this torchrun command saved before a restart is resumed.

    Raises the errors of `train_new_run` and `resume_run`, and TinyLMError if the file system fails while an interrupted
    save of that run is recovered.
    """
    if not session.ranks.is_first:
        return train_session(receive_run(session.ranks), session)
    if request.resume is None and session.ranks.restarts:
        request = _saved_before_restart(request, session) or request
    return train_new_run(request, session) if request.resume is None else resume_run(request.resume, request, session)


def train_new_run(request: TrainingRequest, session: Session) -> TrainingResult:
    """Train a new run.

    Raises InterruptedRunError if a signal stops it before the first step, which leaves no files, UsageError for
    settings and files that cannot be used, DivergedError for a loss, gradient or weight that is not finite, and
    TinyLMError for a run that cannot be written or does not fit in memory.
    """
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
            if replaces(out, teacher.path):
                raise UsageError(f"{out} is a teacher, which is never written to; choose another `out`.")
        directory = RunDirectory.create(out, config, prepared.tokenizer)
        if config.adapter is not None:
            remember_base(config.adapter.base_digest, Path(config.adapter.base))

        # The model, and training
        model = prepared.model or prepared.start.build(config.while_training.model, plan.training.seed)
        others: dict[str, Any] = {"ranks": ranks, "parallel": plan.parallel, "teachers": teachers}
        run = TrainingRun(directory, config, model, prepared.tokenizer, prepared.tokens, **others)
        del prepared  # with the weights of a base as they were read, which the model may no longer share
        share_run(run, session)
        return train_session(run, session)


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


@concerning("resume")
def resume_run(saved: Path, request: TrainingRequest, session: Session) -> TrainingResult:
    """Continue the run at `saved` with its recorded settings, except for those in the request.

    A run that is finished by its steps, epochs or patience is not trained further; a warning names the setting that
    extends it, and its result is returned.

    Raises UsageError for a run whose time budget is used up (unless torchrun has restarted the command), for a run of
    another kind than the request's, and for a run that was merged or imported, not trained; NotResumableError without a
    complete last save; otherwise the errors of `train_new_run`.
    """
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
        if training.generations > 1 and ranks.size > 1:
            raise UsageError(f"{path} has `generations`, which are for one process; resume it in one.")
        training = training.with_budget(request.budget or training.budget)
        training = replace(training, **changes)
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
            model = trained_weights(config.adapter).restore(path, config.while_training, save.read_weights(), base)
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
        result = train_session(run, session)
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
