"""The pipeline of a training run: load model and text, plan, prepare the run directory, train, return the result."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinylm.config.jobs import JOBS, applicable, objective_for, rows_on
from tinylm.config.run import Estimates, RunConfig, TokenizerConfig, new_run_id, run_of
from tinylm.distributed.launch import Launch
from tinylm.distributed.ranks import ONE_RANK, Ranks
from tinylm.errors import InterruptedRunError, TinyLMError, UsageError
from tinylm.jobs.encoding import encode_text
from tinylm.jobs.job import MarkedText, load_job
from tinylm.jobs.reading import load_text
from tinylm.jobs.run_tokens import open_folder
from tinylm.machine.measure import LoadMeter, LoadNotes, Machine, choose_machine
from tinylm.models.adapter import add_adapter, remember_base
from tinylm.models.teachers import Teacher, open_teacher, open_teachers, require_fitting
from tinylm.planning.plan import Plan, plan_training
from tinylm.planning.plan_request import PlanRequest
from tinylm.reporter import LogReporter, Reporter
from tinylm.run_directory.directory import LastSave, RunDirectory, ShardOnlyRun
from tinylm.run_directory.lock_and_commit import reserve
from tinylm.run_directory.metrics_log import History
from tinylm.run_directory.weights import WHOLE
from tinylm.system.files import resolve_links, temporary_folder
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.unknown_characters import handle_unknown_characters
from tinylm.training.events import Event, Examples, Planned, Started, Stepped
from tinylm.training.graceful_stop import stop_on_signals
from tinylm.training.parallel import build_for_rows, rank_shard, restore_rows
from tinylm.training.run import TrainingRun
from tinylm.training.starting_point import StartingPoint, default_out, find_source, load_start
from tinylm.training.training_request import TrainingRequest, training_settings
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_model

if TYPE_CHECKING:
    from tinylm.models.model import Model

EventCallback = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class Session:
    """How one process reports and stops a run.

    reporter: receives notes, warnings and progress
    callbacks: each is called with every event
    started: `time.monotonic()` from which the training time of this process counts
    stop_signals: the first of these signals saves the run and ends training; a second one has its usual effect
    ranks: the processes that train the model together; only rank 0 reports
    """

    reporter: Reporter = field(default_factory=LogReporter)
    callbacks: Sequence[EventCallback] = ()
    started: float = field(default_factory=time.monotonic)
    stop_signals: Sequence[int] = (signal.SIGINT,)
    ranks: Ranks = ONE_RANK

    def report(self, event: Event) -> None:
        """Call each callback with the event, on rank 0."""
        for callback in self.callbacks if self.ranks.is_first else ():
            callback(event)


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of training a run, over all of its sessions.

    run: the run directory
    history: losses and other metrics by step, as columns of training and of validation
    stopped_by: steps, epochs, time, patience, or signal
    step, epochs: optimizer steps, and passes over the training data, so far
    val_loss: the last validation loss, in the unit of `RunConfig.loss_unit`; after a signal before the first
        evaluation, that of the last step on few tokens, or `None` if there was no time for it
    best_val_loss, best_step: the lowest validation loss of trained weights, and its step
    val_bits_per_byte, best_val_bits_per_byte: the two losses in bits per byte; `None` except on plain text
    kept_step: the step of the weights that are kept: `best_step` or, if the validation data are few, the last one
    parameters: number of trainable parameters
    seconds: training time, in all sessions
    signal_number: the signal that stopped this session, 0 if none did
    base: the base model of an adapter; `None` for a run of a model
    """

    run: Path
    history: History = field(repr=False)
    stopped_by: str
    step: int
    epochs: float
    val_loss: float | None
    best_val_loss: float | None
    best_step: int
    parameters: int
    seconds: float
    kept_step: int
    val_bits_per_byte: float | None = None
    best_val_bits_per_byte: float | None = None
    signal_number: int = 0
    base: Path | None = field(default=None, repr=False)

    def load(self) -> "Model":
        """Load the model with the weights that are kept, those of `kept_step`.

        If the run trained an adapter, load it on its base model.
        """
        from tinylm.models.load import load

        return load(self.run) if self.base is None else load(self.base, adapters=[self.run])

    @property
    def is_adapter(self) -> bool:
        """Whether the run trained an adapter."""
        return self.base is not None


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A new run before its directory is written."""

    plan: Plan
    config: RunConfig
    start: StartingPoint
    tokenizer: Tokenizer
    tokens: TokenFolder
    teachers: tuple[Teacher, ...] = ()

    @property
    def trainable_parameters(self) -> int:
        """The number of trainable parameters."""
        return self.start.trainable_parameters(self.plan.model)

    def examples(self, number: int) -> tuple[MarkedText, ...]:
        """The first `number` training examples, split into text that counts in the loss and text that does not."""
        return load_job(self.plan.training.objective).marked_examples(self.tokens, self.tokenizer, number)

    def create(self, out: Path, ranks: Ranks) -> TrainingRun:
        """Write the new run directory, which appears at `out` with the first save, and build the model.

        Raises SaveError if the directory cannot be written, and UsageError if it is a teacher.
        """
        for teacher in self.teachers:
            if resolve_links(run_of(teacher.path)) == resolve_links(out):
                raise UsageError(f"{out} is a teacher, which is never written to; choose another `out`.")
        directory = RunDirectory.create(out, self.config, self.tokenizer)
        if self.config.adapter is not None:
            remember_base(self.config.adapter.base_digest, Path(self.config.adapter.base))
        network = self.start.build(self.plan.model, self.plan.training.seed)
        parallel = self.plan.parallel
        others: dict[str, Any] = {"ranks": ranks, "parallel": parallel, "teachers": self.teachers}
        return TrainingRun(directory, self.config, network, self.tokenizer, self.tokens, **others)


def plan_run(request: TrainingRequest, reporter: Reporter, launch: Launch | None = None) -> PreparedRun:
    """Load the model and the text, and plan the run, as `train_run` does, without writing a run directory.

    Raises UsageError for settings and files that cannot be used, and TinyLMError for a run that does not fit in memory.
    """
    launch = launch or Launch()
    machine = _machine_of(request, reporter, launch)
    source, out = _paths_of(request, reporter)
    is_free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    if not is_free and not request.settings.force:
        reporter.note(f"{out} already exists; set `force` to replace it, or choose another `out`.")
    with temporary_folder() as folder:
        return prepare(request, machine, source, folder, reporter, launch.size)


def train_run(request: TrainingRequest, session: Session) -> TrainingResult:
    """Train a new run.

    Raises InterruptedRunError if a signal stops it before the first step, which leaves no files, UsageError for
    settings and files that cannot be used, DivergedError for a loss, gradient or weight that is not finite, and
    TinyLMError for a run that cannot be written or does not fit in memory.
    """
    if not session.ranks.is_first:
        return train_to_end(receive_run(session.ranks), session)
    ranks, reporter = session.ranks, session.reporter
    machine = _machine_of(request, reporter, ranks.launch)
    source, out = _paths_of(request, reporter)
    with reserve(out, request.settings.force) as staging:
        prepared = prepare(request, machine, source, staging, reporter, ranks.size, ranks.job)
        session.report(Planned(prepared.plan, prepared.config, prepared.trainable_parameters))
        if request.settings.show_examples:
            session.report(Examples(prepared.examples(request.settings.show_examples)))
        run = prepared.create(out, ranks)
        note_sharding(run, session)
        share_run(run, ranks)
        return train_to_end(run, session)


def _machine_of(request: TrainingRequest, reporter: Reporter, launch: Launch) -> Machine:
    """The machine that the request chooses, with the memory that one process of `launch` may use."""
    machine = choose_machine(request.settings.device, request.settings.dtype, reporter)
    if machine.device == "cpu" and machine.free_memory is not None:
        machine = replace(machine, free_memory=machine.free_memory // launch.local_size)
    processes = f" in {launch.size} processes" if launch.size > 1 else ""
    reporter.note(f"On {machine.reasons}{processes}.")
    return machine


def _paths_of(request: TrainingRequest, reporter: Reporter) -> tuple[Path | None, Path]:
    """The model to load, `None` for a new one, and the run directory to write.

    Raises UsageError if the model does not exist, and if the run would replace it.
    """
    source = find_source(request, reporter)
    out = request.out or default_out(request, source)
    if source is not None and resolve_links(out) == resolve_links(source):
        raise UsageError(f"{out} is the base model, which is never written to; choose another `out`.")
    return source, out


def prepare(
    request: TrainingRequest,
    machine: Machine,
    source: Path | None,
    staging: Path,
    reporter: Reporter,
    processes: int = 1,
    launch_id: str | None = None,
) -> PreparedRun:
    """Load the model, read and encode the text, and plan.

    source: the model to load; `None` for a new one
    staging: the folder for the tokens of standard input
    processes: number of ranks
    launch_id: random id of a torchrun command, the same after its restarts (see Rendezvous); `None` without torchrun

    Raises UsageError for settings and text that cannot be used, and TinyLMError if training would run out of memory.
    """
    # The model to start from, or the choices for a new one
    teachers = open_teachers(request.teachers, reporter)
    start = load_start(request, source, teachers)

    # The text, its split, its tokenizer and its tokens
    split = load_text(request.text, staging, start, reporter)
    labels = split.corpus.labels
    if labels and not start.labels:
        start.add_labels(labels, rows_on(split.corpus.kind)[0].architectures[0])
    objective = request.objective or objective_for(start.architecture, split.corpus.kind)
    row = JOBS[objective]
    chosen = "`teacher`" if teachers else f'`objective="{objective}"`'
    if row.has_teachers and not teachers:
        models = "adapters take none; leave it out" if start.adapter else "name it with `teacher`"
        raise UsageError(f"{chosen} needs a model to learn from; {models}.")
    if row.data != split.corpus.kind:
        found = rows_on(split.corpus.kind)[0].noun
        raise UsageError(f"{chosen} is for {row.noun}, and the data are {found}; leave it out.")
    if row.has_reference and start.base is None:
        raise UsageError(f"{row.noun.capitalize()} train an existing model; name it with `init_from`.")
    given = applicable(type(request.settings), request.given, (row,), request.ignorable)
    tokenizer = start.fit_tokenizer(split, request.budget.time if request.budget else None, reporter)
    split = handle_unknown_characters(  # only a given vocabulary can lack characters
        split, tokenizer, request.text.unknown, reporter, vocabulary_owner=start.vocabulary_owner, model=source
    )
    if tokenizer.kind != "bpe" and "bpe_dropout" in request.ignorable:
        given.pop("bpe_dropout", None)
    tokens, data = encode_text(split, tokenizer, staging, reporter)

    # The plan, and the configuration of the run
    plan = plan_training(
        machine,
        PlanRequest(
            data=data,
            vocab_size=tokenizer.vocab_size,
            sizes=load_job(objective).sizes(tokens, tokenizer),
            model=start.choices,
            training={"objective": objective, **training_settings(given)},
            budget=request.budget,
            compile=request.settings.compile,
            base=start.base,
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
    rendering = split.corpus.rendering
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
        family=start.family,
        planned=Estimates(steps=plan.steps, seconds=plan.seconds, memory=plan.memory),
    )
    require_fitting(teachers, tokenizer, plan.model.vocab_size, plan.training.sequence_length or plan.model.context)
    return PreparedRun(plan=plan, config=config, start=start, tokenizer=tokenizer, tokens=tokens, teachers=teachers)


def note_sharding(run: TrainingRun, session: Session) -> None:
    """Report that the model is sharded, if it is."""
    if run.parallel == "fsdp":
        session.reporter.note(f"The model is sharded among {session.ranks.size} processes.")


def train_to_end(run: TrainingRun, session: Session) -> TrainingResult:
    """Train a run whose directory is written and locked, until it stops. Raises the errors of `train_run`.

    All ranks call this together: rank 0 after `share_run`, the others with the run from `receive_run`.
    """
    resumed_step = None if run.resume_from is None else run.resume_from.state["step"]
    started = Started(
        run.directory.path,
        run.config,
        run.model,
        run.tokenizer,
        steps_per_epoch=run.task.steps_per_epoch,
        best=run.best,
        resumed_step=resumed_step,
    )
    session.report(started)
    if run.runtime.compile:
        session.reporter.note("Compiling the model, which takes about a minute.")
    load_notes = _load_notes(run, session)

    def report(event: Event) -> None:
        session.report(event)
        if isinstance(event, Stepped) and load_notes is not None:
            load_notes.step(event.step, event.progress)

    with stop_on_signals(session.stop_signals, session.ranks) as stop:
        stopped_by, state = run.train(report, stop.check, started=session.started)
    session.ranks.gather(None)  # wait until rank 0 has saved the run; if it fails, all ranks fail
    if state.step == 0:
        raise InterruptedRunError(InterruptedRunError.BEFORE_FIRST_STEP, stop.signal_number)
    return TrainingResult(
        run=run.directory.path,
        history=History.read(run.directory.path),
        stopped_by=stopped_by,
        step=state.step,
        epochs=state.step / run.task.steps_per_epoch,
        val_loss=state.val_loss,
        best_val_loss=state.best_loss,
        best_step=state.best_step,
        kept_step=state.best_step if run.training.keep == "best" else state.last_eval_step,
        parameters=run.trainable_parameters,
        seconds=state.seconds,
        val_bits_per_byte=run.config.bits_per_byte(state.val_loss),
        best_val_bits_per_byte=run.config.bits_per_byte(state.best_loss),
        signal_number=stop.signal_number,
        base=None if run.config.adapter is None else Path(run.config.adapter.base),
    )


def _load_notes(run: TrainingRun, session: Session) -> LoadNotes | None:
    """What rank 0 says about other processes; `None` on other ranks, and if the model is not on the CPU."""
    if run.runtime.device != "cpu" or not session.ranks.is_first:
        return None
    processes = session.ranks.launch.local_size
    planned = run.config.planned if run.resume_from is None else None
    return LoadNotes(
        session.reporter.note,
        LoadMeter(processes),
        threads=processes * session.ranks.share_threads(run.runtime.threads),
        timed=run.training.budget.time is not None,
        planned_steps=None if planned is None else planned.steps,
    )


def share_run(run: TrainingRun, ranks: Ranks) -> None:
    """Send a run from rank 0 to the other ranks, which receive it with `receive_run`. Does nothing for a single rank.

    Raises UsageError for a device that several processes cannot use, and PeerError if another rank fails.
    """
    if ranks.size == 1:
        return
    ranks.require_device(run.runtime.device)
    ranks.announce()
    save = run.resume_from
    ranks.first(
        {
            "path": str(run.directory.path.absolute()),
            "config": run.config.to_json(),
            "tokenizer": run.tokenizer.to_str(),
            "tokens": str(run.tokens.path.absolute()),
            "save": None if save is None else save.to_json(),
            "parallel": run.parallel,
            "teachers": [str(teacher.path.absolute()) for teacher in run.teachers],
        }
    )
    if save is None or run.shard == WHOLE:
        ranks.broadcast(dict(run.model.named_parameters()))
    ranks.gather(None)  # every rank has opened the token files, which may now be moved


def receive_run(ranks: Ranks) -> TrainingRun:
    """The run that rank 0 sends with `share_run`.

    Raises TinyLMError if this rank cannot take part, and PeerError if another rank fails.
    """
    ranks.wait()
    shared = ranks.first(None)
    path, config = Path(shared["path"]), RunConfig.from_json(shared["config"])
    _, runtime, data = config.training_parts(path)
    ranks.require_device(runtime.device)
    tokenizer = Tokenizer.parse(shared["tokenizer"], config.tokenizer.special, path / "tokenizer.json")
    tokens = open_folder(Path(shared["tokens"]), data, tokenizer)
    save = None if shared["save"] is None else LastSave.from_json(shared["save"])
    shard, rows = rank_shard(shared["parallel"], config, ranks), None
    if shard == WHOLE:
        model = _receive_model(config, ranks)
    elif save is None:
        rows = ranks.broadcast({}, lambda tensor: shard.rows(tensor).clone())
        model = build_for_rows(config, rows)
    else:
        model, rows = restore_rows(config, save, shard)
    ranks.gather(None)
    teachers = tuple(open_teacher(Path(teacher)) for teacher in shared["teachers"])
    directory, parallel = ShardOnlyRun(path), shared["parallel"]
    return TrainingRun(directory, config, model, tokenizer, tokens, save, ranks, parallel, rows, teachers)


def _receive_model(config: RunConfig, ranks: Ranks) -> Transformer:
    model = build_model(config.model)
    if config.adapter is not None:
        add_adapter(model, config.adapter)
    parameters = dict(model.named_parameters())
    for name, tensor in ranks.broadcast({}).items():
        parameters[name].data = tensor
    return model
