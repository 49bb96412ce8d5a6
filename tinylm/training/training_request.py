"""Requests for a new or a resumed training run, made from settings by name."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinylm.config.duration import parse_duration
from tinylm.config.settings import (
    INTERVAL_NAMES,
    MODEL_NAMES,
    RESUMABLE_NAMES,
    AdapterSettings,
    BudgetSettings,
    LoRASettings,
    MachineSettings,
    SharedSettings,
    TextSettings,
    TrainSettings,
    given_settings,
    names_of,
    reject_fixed_settings,
)
from tinylm.config.training import Budget, TrainingSettings
from tinylm.errors import UsageError
from tinylm.text.corpus_loading import TextSource
from tinylm.training.starting_point import (
    AdapterMethod,
    BottleneckMethod,
    LoRAMethod,
    NewAdapter,
    NewModel,
    StartingPoint,
    TrainedModel,
)


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A new run.

    start: a new model, the weights of a trained model, or a base model with a new adapter
    out: run directory to write, by default that of `start.default_out`; `force` replaces an existing run there
    training: the given fields of TrainingConfig, and `warmup_steps`; other fields are planned
    budget: by default, training ends when the validation loss stops improving, or after ten minutes
    show_examples: number of training conversations in the event Examples
    """

    start: StartingPoint
    text: TextSource
    out: Path | None = None
    force: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    machine: MachineSettings = field(default_factory=MachineSettings)
    show_examples: int = 0


@dataclass(frozen=True, kw_only=True)
class ResumeRequest:
    """A run that continues from its last save.

    run: run directory
    adapter_kind: lora or bottleneck if the run trains an adapter, `None` if it trains a model
    text: the text of the run, if its encoded tokens are neither in the cache nor in the run
    base: the base model of an adapter; by default, the one that `find_base_model` finds
    training: fields of TrainingConfig to change: INTERVAL_NAMES and `patience`
    budget: replaces that of the run
    parallel: auto, ddp or fsdp; independent of earlier sessions
    """

    run: Path
    adapter_kind: str | None = None
    text: TextSource | None = None
    base: Path | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    parallel: str = "auto"


Files = str | Path | Sequence[str | Path]


def train_request(
    files: Files, out: Path | None, settings: TrainSettings, ignorable: Collection[str] = ()
) -> TrainingRequest:
    """A request to train a model.

    ignorable: names of settings that are ignored where they do not apply, such as those from the environment

    Raises UsageError for settings that contradict each other, or that do not apply and are not ignorable.
    """
    chosen = given_settings(settings)
    init_from, extend_vocab = chosen.get("init_from"), chosen.get("extend_vocab", False)
    if init_from is not None:
        fixed = {"tokenizer", "vocab_size", *MODEL_NAMES}
        chosen = reject_fixed_settings(chosen, "init_from", fixed, ignorable)
    elif extend_vocab:
        raise UsageError("`extend_vocab` extends the vocabulary of an existing model; name it with `init_from`.")
    if chosen.get("unknown") == "skip" and "unknown" not in ignorable:
        if extend_vocab:
            raise UsageError('`extend_vocab` and `unknown="skip"` contradict each other; give one of them.')
        if init_from is None and chosen.get("tokenizer") in (None, "auto", "char", "bpe"):
            raise UsageError(
                "`unknown` is for a given vocabulary, that of `init_from` or of `tokenizer=PATH`; leave it out."
            )
    start: StartingPoint
    if init_from is not None:
        start = TrainedModel(run=Path(init_from), extend_vocab=extend_vocab)
    else:
        choices = _select(chosen, MODEL_NAMES)
        if "local_layers" in choices:
            choices["local_layers"] = tuple(choices["local_layers"])
        start = NewModel(choices=choices, **_select(chosen, ("tokenizer", "vocab_size")))
    return _request(start, files, out, chosen, ignorable)


def adapter_request(
    files: Files,
    model: Path | None,
    out: Path | None,
    settings: LoRASettings | AdapterSettings,
    ignorable: Collection[str] = (),
) -> TrainingRequest:
    """A request to train a LoRA adapter or bottleneck adapters on `model`; otherwise as `train_request`."""
    chosen = given_settings(settings)
    method: AdapterMethod
    if isinstance(settings, LoRASettings):
        if isinstance(settings.target, str):
            chosen["target"] = (settings.target,)
        parts = ("rank", "alpha", "rank_stabilised", "share_b", "dropout", "target")
        method = LoRAMethod(**_select(chosen, parts))
    else:
        method = BottleneckMethod(**_select(chosen, ("bottleneck", "dropout")))
    return _request(NewAdapter(method=method, base=model), files, out, chosen, ignorable)


def _request(
    start: StartingPoint, files: Files, out: Path | None, chosen: Mapping[str, Any], ignorable: Collection[str]
) -> TrainingRequest:
    paths = _file_paths(files)
    if not paths:
        raise UsageError("There is no text to train on; name files or folders, or - for standard input.")
    return TrainingRequest(
        start=start,
        text=TextSource(paths=paths, ignorable=frozenset(ignorable), **_select(chosen, names_of(TextSettings))),
        out=out,
        force=chosen.get("force", False),
        training=_select(chosen, names_of(TrainingSettings) | {"warmup_steps"}),
        budget=_budget(chosen),
        machine=MachineSettings(**_select(chosen, names_of(MachineSettings))),
        **_select(chosen, ("show_examples",)),
    )


def resume_request(
    run: Path,
    files: Files,
    settings: SharedSettings,
    ignorable: Collection[str] = (),
    *,
    out: Path | None = None,
    adapter_kind: str | None = None,
    base: Path | None = None,
) -> ResumeRequest:
    """A request to continue `run`, with `out` for its error only. `adapter_kind` and `base` are as in ResumeRequest.

    files: the text of the run, if its encoded tokens are neither in the cache nor in the run
    settings: only RESUMABLE_NAMES, and with `files` also `val_data`

    Raises UsageError for any other setting that is given, unless its name is in `ignorable`, and for settings that
    contradict each other.
    """
    paths = _file_paths(files)
    resumable = RESUMABLE_NAMES | ({"val_data"} if paths else set())
    given = given_settings(settings) | ({} if out is None else {"out": out})
    chosen = reject_fixed_settings(given, "resume", given.keys() - resumable, ignorable)
    return ResumeRequest(
        run=run,
        adapter_kind=adapter_kind,
        text=TextSource(paths=paths, val_data=chosen.get("val_data")) if paths else None,
        base=base,
        training=_select(chosen, INTERVAL_NAMES | {"patience"}),
        budget=_budget(chosen),
        **_select(chosen, ("parallel",)),
    )


def _file_paths(files: Files) -> tuple[str, ...]:
    return (str(files),) if isinstance(files, str | Path) else tuple(str(file) for file in files)


def _select(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name in names}


def _budget(chosen: Mapping[str, Any]) -> Budget | None:
    """The given budget, if any. Raises UsageError for more than one of steps, epochs and time, or an invalid time."""
    values = _select(chosen, names_of(BudgetSettings))
    if isinstance(values.get("time"), str):
        values["time"] = parse_duration(values["time"])
    return Budget(**values) if values else None
