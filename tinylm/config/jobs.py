"""The jobs: what a model can learn from. A job is a row of JOBS, and a folder with its code in tinylm/jobs.

Imports no code of a job: `tinylm.jobs.job.load_job` does, when it is asked for.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinylm.config.validation import declared_settings
from tinylm.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """What is known of a job without its code.

    name: of the job, and of its folder
    data: the kind of its data, as a run records it; jobs of different architectures can have the same
    noun: what a user calls the data
    learner: what a user calls the models, where several jobs have the same data; "" elsewhere
    records: what a user calls the records of the data, in the plural
    architectures: of the models that it trains; the first is that of a new model with labels, unless it was chosen
    unit: of the loss
    metrics: of the objective, shown beside the loss
    predicts_text: whether the validation loss is that of each token of a text, and counts its bytes
    has_labels: whether the model has an output layer for labels in place of that for tokens
    has_reference: whether the loss compares the model with the one that training started from
    has_teachers: whether the model also learns from the predictions of others
    command: that uses the trained model, with an example of a `prompt`; "" for none of each
    file: an example of a file of such data
    module: has the code of the job, as `JOB`
    """

    name: str
    data: str
    noun: str
    learner: str = ""
    records: str = "documents"
    architectures: tuple[str, ...]
    unit: str = "nats per token"
    metrics: tuple[str, ...] = ()
    predicts_text: bool = False
    has_labels: bool = False
    has_reference: bool = False
    has_teachers: bool = False
    command: str = "sample"
    prompt: str = "..."
    file: str = "text.txt"
    module: str


# By the objective that a run records. The first that fits the architecture and the data is the default.
JOBS = {
    "next-token": JobRow(
        name="text",
        data="text",
        noun="plain text",
        learner="decoders of plain text",
        architectures=("decoder",),
        predicts_text=True,
        module="tinylm.jobs.text.job",
    ),
    "masked-token": JobRow(
        name="masked",
        data="text",
        noun="plain text",
        learner="encoders of plain text",
        architectures=("encoder",),
        prompt="... <mask> ...",
        module="tinylm.jobs.masked.job",
    ),
    "sequence-to-sequence": JobRow(
        name="pairs",
        data="pairs",
        noun="pairs",
        records="pairs",
        architectures=("encoder-decoder",),
        file="pairs.tsv",
        module="tinylm.jobs.pairs.job",
    ),
    "distillation": JobRow(
        name="distillation",
        data="text",
        noun="plain text",
        learner="decoders with teachers",
        architectures=("decoder",),
        predicts_text=True,
        has_teachers=True,
        module="tinylm.jobs.distillation.job",
    ),
    "chat": JobRow(
        name="chat",
        data="chat",
        noun="conversations",
        records="conversations",
        architectures=("decoder",),
        command="chat",
        prompt="",
        file="chat.jsonl",
        module="tinylm.jobs.chat.job",
    ),
    "dpo": JobRow(
        name="preferences",
        data="preferences",
        noun="preferences",
        records="preferences",
        architectures=("decoder",),
        unit="nats per preference",
        metrics=("accuracy", "margin"),
        has_reference=True,
        command="chat",
        prompt="",
        file="preferences.jsonl",
        module="tinylm.jobs.preferences.job",
    ),
    "classification": JobRow(
        name="labels",
        data="labels",
        noun="texts with labels",
        records="texts",
        architectures=("encoder", "decoder"),
        unit="nats per text",
        metrics=("accuracy",),
        has_labels=True,
        command="classify",
        file="labels.jsonl",
        module="tinylm.jobs.labels.job",
    ),
}


def data_kinds(
    architecture: str, objective: str | None = None, *, has_labels: bool | None = False, has_teachers: bool = False
) -> tuple[str, ...]:
    """The kinds of data that fit a model, the default first.

    objective: of its training, if that is known. has_labels: whether it has an output layer for labels, which fits only
        the data that it was trained on; `None` for a model without one that can get one. has_teachers: whether it
        learns from other models

    Raises UsageError if no model of the architecture learns from others.
    """
    if has_labels and objective is not None:
        return (JOBS[objective].data,)
    rows = [row for row in JOBS.values() if architecture in row.architectures]
    rows = [row for row in rows if has_labels in (None, row.has_labels) and row.has_teachers >= has_teachers]
    if has_teachers and not rows:
        raise UsageError(f'A model of `architecture="{architecture}"` cannot learn from a `teacher`; leave it out.')
    return tuple(dict.fromkeys(row.data for row in rows))


def objective_for(architecture: str, data: str, preferred: str | None = None) -> str:
    """The preferred objective if it fits the architecture and the kind of data, else the first in JOBS that fits.

    Raises UsageError if none fits.
    """
    fitting = [name for name, row in JOBS.items() if architecture in row.architectures and data == row.data]
    if not fitting:
        raise UsageError(f'A model of `architecture="{architecture}"` cannot be trained on {data}.')
    return preferred if preferred in fitting else fitting[0]


def row_for(architecture: str, objective: str | None, *, has_labels: bool) -> JobRow:
    """The job of an objective; without one, the default for a model."""
    default = data_kinds(architecture, has_labels=has_labels)[0]
    return JOBS[objective or objective_for(architecture, default)]


def rows_on(data: str) -> tuple[JobRow, ...]:
    """The jobs on data of this kind."""
    return tuple(row for row in JOBS.values() if row.data == data)


def all_data() -> tuple[str, ...]:
    """All kinds of data, in the order of JOBS."""
    return tuple(dict.fromkeys(row.data for row in JOBS.values()))


def applicable(
    kind: Any, values: Mapping[str, Any], rows: Iterable[JobRow], ignorable: Collection[str] = ()
) -> dict[str, Any]:
    """The values of settings, which the dataclass `kind` declares, that apply to one of the jobs.

    ignorable: names of settings that are left out where they do not apply, as those with their neutral values are

    Raises UsageError for another setting that does not apply.
    """
    rows, declared = tuple(rows), declared_settings(kind)
    kept = {}
    for name, value in values.items():
        jobs = declared[name].jobs.split() if name in declared else []
        if not jobs or any(row.name in jobs for row in rows):
            kept[name] = value
        elif name not in ignorable and value != declared[name].neutral:
            one_kind = len({row.data for row in rows}) == 1
            this = _listed([row.name for row in rows]) if one_kind else "this model"
            raise UsageError(f"`{name}` is for {_listed(jobs)}, not for {this}; leave it out.")
    return kept


def _listed(jobs: Collection[str]) -> str:
    """What a user calls these jobs: their data, or their models if other jobs have the same data."""
    names: dict[str, None] = {}
    for row in JOBS.values():
        whole = all(other.name in jobs for other in rows_on(row.data))
        names |= {row.noun if whole else row.learner or row.noun: None} if row.name in jobs else {}
    return listed([*names], "and")


def listed(names: Sequence[str], conjunction: str) -> str:
    """Names in a sentence, such as "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def without_effect(settings: Any, row: JobRow) -> set[str]:
    """The names of the settings of a dataclass that do not apply to a job."""
    kind: Any = type(settings)
    jobs = {name: setting.jobs.split() for name, setting in declared_settings(kind).items()}
    return {name for name, names in jobs.items() if names and row.name not in names}


def changed_settings(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults and are not `None`, by name."""
    values = {field.name: (getattr(settings, field.name), field.default) for field in dataclasses.fields(settings)}
    return {name: value for name, (value, default) in values.items() if value is not None and value != default}
