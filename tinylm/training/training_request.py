"""What the caller of a training command or function gives: settings, texts and paths."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tinylm.config.jobs import JOBS
from tinylm.config.settings import (
    MODEL_NAMES,
    RESUMABLE_NAMES,
    AdapterSettings,
    BudgetSettings,
    LoRASettings,
    TextSettings,
    TrainSettings,
    given_settings,
    names_of,
    parse_duration,
    reject_fixed_settings,
)
from tinylm.config.training import Budget
from tinylm.errors import UsageError
from tinylm.text.file_selection import Files, TextSource, text_paths


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A run to train, new or resumed.

    settings: those of a model, or of an adapter on `model`
    files: the texts. To resume a run, they are needed only if its encoded tokens are neither in the cache nor in it.
    resume: the run directory to continue; `None` for a new run
    model: the base model of an adapter. Default: the newest model; to resume, the one that `find_base_model` finds.
    out: run directory to write. Default: see `default_out`.
    ignorable: names of settings that are ignored where they do not apply, such as those from the environment

    Raises UsageError for settings that contradict each other, or that do not apply and are not ignorable.
    """

    settings: TrainSettings | LoRASettings | AdapterSettings
    files: Files = ()
    resume: Path | None = None
    model: Path | None = None
    out: Path | None = None
    ignorable: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        given, _ = self.given, self.budget  # both raise errors
        if self.resume is not None:
            return
        if not self.paths:
            raise UsageError("There is no text to train on; name files or folders, or - for standard input.")
        if given.get("extend_vocab") and "init_from" not in given:
            raise UsageError("`extend_vocab` extends the vocabulary of an existing model; name it with `init_from`.")
        if self.adapter_kind is None and given.get("unknown") == "skip" and "unknown" not in self.ignorable:
            if "extend_vocab" in given:
                raise UsageError('`extend_vocab` and `unknown="skip"` contradict each other; give one of them.')
            is_trained = given.get("tokenizer", "auto") in ("auto", "char", "bpe")
            if is_trained and not {"init_from", "teacher"} & given.keys():
                raise UsageError(
                    "`unknown` is for a given vocabulary, that of `init_from` or of `tokenizer=PATH`; leave it out."
                )

    @cached_property
    def given(self) -> dict[str, Any]:
        """The settings that differ from their defaults and apply, by name."""
        given = given_settings(self.settings)
        if self.resume is not None:
            given |= {} if self.out is None else {"out": self.out}
            resumable = RESUMABLE_NAMES | ({"val_data"} if self.paths else set())
            return reject_fixed_settings(given, "resume", given.keys() - resumable, self.ignorable)
        if "init_from" in given:
            fixed = {"tokenizer", "vocab_size", *MODEL_NAMES}
            given = reject_fixed_settings(given, "init_from", fixed, self.ignorable)
        if "teacher" in given:
            fixed = {"tokenizer", "vocab_size", "extend_vocab", "label_smoothing", "objective"}
            given = reject_fixed_settings(given, "teacher", fixed, self.ignorable)
        return given

    def select(self, names: Collection[str]) -> dict[str, Any]:
        """The given settings with these names."""
        return {name: value for name, value in self.given.items() if name in names}

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The texts, as `TextSource.paths`."""
        return text_paths(self.files)

    @cached_property
    def text(self) -> TextSource:
        """The texts, and how they are read."""
        return TextSource(paths=self.paths, ignorable=self.ignorable, **self.select(names_of(TextSettings)))

    @cached_property
    def budget(self) -> Budget | None:
        """The given budget. By default, training ends when the validation loss stops improving, or after ten minutes.

        Raises UsageError for more than one of steps, epochs and time, or an invalid time.
        """
        values = self.select(names_of(BudgetSettings))
        if isinstance(values.get("time"), str):
            values["time"] = parse_duration(values["time"])
        return Budget(**values) if values else None

    @property
    def objective(self) -> str | None:
        """The given objective, or that of learning from teachers; `None` for that of the data."""
        if not self.teachers:
            return self.given.get("objective")
        return next(name for name, row in JOBS.items() if row.has_teachers)

    @property
    def teachers(self) -> tuple[str | Path, ...]:
        """The names of the models to learn from."""
        names = self.given.get("teacher", ())
        return (names,) if isinstance(names, str | Path) else tuple(names)

    @property
    def adapter_kind(self) -> str | None:
        """lora or bottleneck; `None` for a model."""
        return None if isinstance(self.settings, TrainSettings) else self.settings.kind
