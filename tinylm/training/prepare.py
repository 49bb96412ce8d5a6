"""From what the user asks for to a planned run: start, text, tokenizer, tokens, plan, configuration, in this order."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from tinylm.config.jobs import JOBS, applicable, objective_for, rows_on
from tinylm.config.run import Estimates, RunConfig, TokenizerConfig, new_run_id
from tinylm.config.settings import names_of
from tinylm.config.training import TrainingSettings
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.job import MarkedText, load_job
from tinylm.jobs.reading import load_text
from tinylm.jobs.run_tokens import encode_text
from tinylm.machine.measure import Machine, choose_machine
from tinylm.models.by_digest import require_fitting
from tinylm.planning.plan import Plan, plan_training
from tinylm.planning.plan_request import PlanRequest
from tinylm.reporter import Reporter
from tinylm.system.files import resolve_links, temporary_folder
from tinylm.system.launch import Launch
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.text.vocabulary import handle_unknown_characters
from tinylm.training.start import Start, default_out, find_source, open_start
from tinylm.training.training_request import TrainingRequest
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import count_parameters

TRAINING_NAMES = names_of(TrainingSettings) | {"warmup_steps"}


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A new run before its directory is written.

    network: of an existing model, which is in memory; `None` for a new one, which is built when training begins
    """

    plan: Plan
    config: RunConfig
    start: Start
    network: Transformer | None
    tokenizer: Tokenizer
    tokens: TokenFolder

    @property
    def trainable_parameters(self) -> int:
        """The number of trainable parameters."""
        if self.network is None:
            return self.plan.parameters
        return count_parameters(self.network, trained=True)["total"]

    def examples(self, number: int) -> tuple[MarkedText, ...]:
        """The first `number` training examples, split into text that counts in the loss and text that does not."""
        return load_job(self.plan.training.objective).marked_examples(self.tokens, self.tokenizer, number)


def plan_run(request: TrainingRequest, reporter: Reporter, launch: Launch) -> PreparedRun:
    """Load the model and the text, and plan the run, as `train_run` does, without writing a run directory.

    Raises UsageError for settings and files that cannot be used, and TinyLMError for a run that does not fit in memory.
    """
    machine = machine_of(request, reporter, launch)
    source, out = paths_of(request, reporter)
    is_free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    if not is_free and not request.settings.force:
        reporter.note(f"{out} already exists; set `force` to replace it, or choose another `out`.")
    with temporary_folder() as folder:
        return prepare(request, machine, source, folder, reporter, launch.size)


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
    # The network of an existing model, which is in memory; a new one takes memory only when training begins
    network = None if start.base is None else start.build(plan.model, plan.training.seed)
    return PreparedRun(plan=plan, config=config, start=start, network=network, tokenizer=tokenizer, tokens=tokens)


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
