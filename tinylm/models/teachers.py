"""The teachers of a distillation: opened, found again, and checked for the text."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tinylm.config.run import RunConfig, TeacherConfig
from tinylm.config.validation import require
from tinylm.errors import UsageError, concerning
from tinylm.models.find_base import find_base_model, remember_base
from tinylm.models.open import find_model, open_model
from tinylm.reporter import Reporter
from tinylm.system.files import resolve_links
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import count_parameters


class Teacher(NamedTuple):
    """A frozen model that another one learns from. path: where it was opened. recorded: as the run records it."""

    path: Path
    network: Decoder
    tokenizer: Tokenizer
    recorded: TeacherConfig


def open_teacher(path: Path) -> Teacher:
    """The teacher at a path that `find_model` returned. Raises UsageError unless it is a decoder."""
    network, config, tokenizer, weights = open_model(path)
    if not isinstance(network, Decoder):
        raise UsageError(
            f"`teacher` is for decoders, and {path} has another architecture, {config.model.architecture}."
        )
    require(not config.labels, f"{path} is a classifier, and `teacher` is for models of text; name another one.")
    recorded = TeacherConfig(
        path=str(resolve_links(path)), digest=weights.digest, parameters=count_parameters(config.model)["total"]
    )
    return Teacher(path, network.requires_grad_(False), tokenizer, recorded)


@concerning("teacher")
def open_teachers(names: Sequence[str | Path], reporter: Reporter) -> tuple[Teacher, ...]:
    """The teachers with these names. Raises UsageError if their tokenizers differ."""
    teachers = tuple(open_teacher(find_model(Path(name), reporter)) for name in names)
    for teacher in teachers[1:]:
        if not teachers[0].tokenizer.has_ids_of(teacher.tokenizer):
            raise UsageError(
                f"The teachers {teachers[0].path} and {teacher.path} have different tokenizers; name teachers that "
                "share one, such as runs on the same text."
            )
    for teacher in teachers:
        remember_base(teacher.recorded.digest, teacher.path)
    return teachers


def require_fitting(teachers: Sequence[Teacher], tokenizer: Tokenizer, vocab_size: int, length: int) -> None:
    """Raise UsageError for a teacher with another tokenizer than the model, with too few ids, or with a context that is
    shorter than the training sequences.

    vocab_size, length: number of ids of the model, and of tokens in a sequence
    """
    for teacher in teachers:
        if not tokenizer.has_ids_of(teacher.tokenizer) or teacher.network.vocab_size < vocab_size:
            raise UsageError(f"The teacher {teacher.path} has another vocabulary than the model; choose another one.")
        if teacher.network.context < length:
            raise UsageError(
                f"The teacher {teacher.path} has a context of {teacher.network.context} tokens, and the training "
                f"sequences have {length}; set `context` (with `init_from`, `sequence_length`) to at most "
                f"{teacher.network.context}."
            )


def find_teachers(run: Path, config: RunConfig, names: Sequence[str | Path], reporter: Reporter) -> tuple[Teacher, ...]:
    """The teachers of a run, in their order: those with these names, and others where `find_base_model` finds them. The
    recorded paths are not opened, since a stranger could have written them.

    Raises UsageError if a teacher is missing or has other weights, and for names of other models.
    """
    if names and not config.teachers:
        raise UsageError(f"{run} learns from no teacher; leave out `teacher`.")
    found = {teacher.recorded.digest: teacher for teacher in open_teachers(names, reporter)}
    for digest in found.keys() - {recorded.digest for recorded in config.teachers}:
        raise UsageError(f"{found[digest].path} is no teacher of {run}, or has other weights now; leave it out.")
    for recorded in config.teachers:
        if recorded.digest not in found:
            path = find_base_model(run, recorded.path, recorded.digest)
            if path is not None and (teacher := open_teacher(path)).recorded.digest == recorded.digest:
                found[recorded.digest] = teacher
        if recorded.digest not in found:
            raise UsageError(
                f"The teacher {recorded.path[:200]} of {run} was not found, or has other weights now; name it with "
                "`teacher`."
            )
    return tuple(found[recorded.digest] for recorded in config.teachers)
