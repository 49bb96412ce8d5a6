"""The declaration of settings, with their allowed values, the checks that use it, and dataclasses from and to JSON.

Messages name a setting in backticks, as in `kv_heads`; the command layer replaces it by the flag.
"""

import dataclasses
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tinylm.errors import UsageError

T = TypeVar("T")
_type_hints = functools.cache(typing.get_type_hints)  # which compiles each annotation again at every call


@dataclass(frozen=True)
class Range:
    """An interval of numbers. It includes `low` and `high`, unless `open_low` or `open_high` is set."""

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False

    def contains(self, value: float) -> bool:
        """Whether the interval contains `value`; False for NaN."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if not self.open_low and not self.open_high:
            return f"from {self.low} to {self.high}"
        start = "greater than" if self.open_low else "at least"
        return f"{start} {self.low} and {'below' if self.open_high else 'at most'} {self.high}"


MAX_COUNT = 1 << 53  # float64 represents integers exactly up to here
FRACTION = Range(0, 1, open_high=True)
COUNT_FROM_0 = Range(0, MAX_COUNT)
COUNT_FROM_1 = Range(1, MAX_COUNT)
Limits = Range | tuple[str, ...]  # of a number, or the allowed words


class Panel:
    """Titles of the panels that group options in --help."""

    OUTPUT = "Output"
    DATA = "Data"
    RUN = "Run directory"
    LENGTH = "Training length"
    MODEL = "Model"
    MODEL_SWITCHES = "Model parts (on or off)"
    EXPERTS = "Experts"
    OPTIMIZER = "Optimizer"
    MEMORY = "Memory"
    INTERVALS = "Intervals"
    MACHINE = "Machine"
    ADAPTER = "Adapter"
    TOKENIZER = "Tokenizer"
    PROMPT = "Prompt"
    SAMPLING = "Sampling"
    TEXT = "Text"
    ENCODER_DECODER = "Encoder-decoder"
    MEMORISATION = "Memorisation"


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting: the annotation of a field of a dataclass.

        lr: Annotated[float | None, Setting("Peak learning rate.", Panel.OPTIMIZER, Range(0, 1000))] = None

    The option of the commands that take the dataclass, its environment variable, its key in TOML, its completion and
    the argument of the Python API follow from the field (`tinylm.commands.option_groups`, `tinylm.training.api`).

    help, panel: a sentence for --help, and the panel that it stands in, if any
    values: the range of a number, or the allowed words; `None` if there are no limits
    metavar: the value in --help; default: the words, N for an integer, X for another number
    flags: default: --name, and --no-name for a switch whose default is not off
    parse: from the text on the command line to the value; raises UsageError. Default: by the type of the field
    neutral: a value that can be given where the setting does not apply, since it changes nothing; `None` for none
    jobs: names of the jobs that it applies to (`tinylm.config.jobs`), separated by blanks; "" for all
    """

    help: str
    panel: str | None
    values: Limits | None = None
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    jobs: str = ""
    neutral: Any = None


TYPE_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    Sequence: "a list",
    tuple: "a list",
    list: "a list",
    Mapping: "a dictionary",
}
MAX_CHARACTERS = 4096  # of a string, which may be a path
MAX_ENTRIES = {"corpus": 1 << 20, "val_corpus": 1 << 20}  # of a list; a glob may match many files
DEFAULT_MAX_ENTRIES = 1024


def require(condition: bool, message: str) -> None:
    """Raise UsageError with the message unless the condition holds."""
    if not condition:
        raise UsageError(message)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless the value of the setting `name` is one of the choices."""
    known = isinstance(value, str) and value in choices
    require(known, f"`{name}` is {describe_value(value)}; it must be one of: {', '.join(choices)}.")


@functools.cache
def annotations_of(kind: Any) -> Mapping[str, Any]:
    """The annotations of a dataclass by field, each from the last class that annotates it with more than a type."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        hints = typing.get_type_hints(base, include_extras=True)
        own = {name: hints[name] for name in inspect.get_annotations(base)}
        found |= {name: hint for name, hint in own.items() if name not in found or hasattr(hint, "__metadata__")}
    return found


def declared_in(annotation: Any, kind: type[T]) -> T | None:
    """The Setting, the Range or the tuple of allowed words in an annotation; `None` without one."""
    return next((extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, kind)), None)


@functools.cache
def declared_settings(kind: Any) -> Mapping[str, Setting]:
    """The fields of a dataclass that are settings, by name."""
    found = {name: declared_in(annotation, Setting) for name, annotation in annotations_of(kind).items()}
    return {name: setting for name, setting in found.items() if setting is not None}


@functools.cache
def limits_of(kind: Any) -> Mapping[str, Limits]:
    """The limits of the fields of a dataclass that have any, by name."""
    found = {name: limits_in(annotation) for name, annotation in annotations_of(kind).items()}
    return {name: limits for name, limits in found.items() if limits is not None}


@functools.cache
def types_of(kind: Any) -> Mapping[str, Sequence[Any]]:
    """The types of the fields of a dataclass, by name, without `None`."""
    hints = _type_hints(kind)
    return {field.name: _members(hints[field.name]) for field in dataclasses.fields(kind)}


@functools.cache
def required_of(kind: Any) -> Sequence[str]:
    """The names of the fields that must not be `None`: neither their type nor their default allows it."""
    can_be_none = {name for name, hint in _type_hints(kind).items() if types.NoneType in typing.get_args(hint)}
    fields = dataclasses.fields(kind)
    return [field.name for field in fields if field.name not in can_be_none and field.default is not None]


def _members(hint: Any) -> list[Any]:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint]
    return [member for member in members if member is not types.NoneType]


def limits_in(annotation: Any) -> Limits | None:
    """The limits in an annotation: those of a Setting, a Range, or the allowed words; `None` without any."""
    setting = declared_in(annotation, Setting)
    return declared_in(annotation, Range) or declared_in(annotation, tuple) if setting is None else setting.values


def check_fields(values: Any, without: Collection[str] = ()) -> None:
    """Convert the fields of a dataclass, as in `convert_fields`, and check them, as in `check_settings`. A field that
    cannot be `None` must be given.

    without: fields that are texts of any length and content
    """
    kind: Any = type(values)
    convert_fields(values)
    check_values({name: value for name, value in vars(values).items() if name not in without}, limits_of(kind))
    _check_types(kind, vars(values))
    for name in required_of(kind):
        if getattr(values, name) is None:
            limits = limits_of(kind).get(name)
            if isinstance(limits, tuple):
                check_choice(name, None, limits)
            _raise_type_error(name, None, types_of(kind)[name])


def convert_fields(values: Any) -> None:
    """Convert fields of a dataclass, and entries of lists, to their types: scalars of numpy and torch to those of
    Python, whole numbers and fractions to floats, which are other texts in JSON, and paths to texts.
    """
    kind: Any = type(values)
    for name, kinds in types_of(kind).items():
        object.__setattr__(values, name, _converted(getattr(values, name), kinds))


def _converted(value: Any, kinds: Sequence[Any]) -> Any:
    dimensions, entry_kinds = getattr(value, "ndim", None), _entry_types(kinds)
    if entry_kinds and (isinstance(value, (list, tuple)) or dimensions == 1):
        entries = (_converted(entry, entry_kinds) for entry in value)
        return list(entries) if any(typing.get_origin(kind) is list for kind in kinds) else tuple(entries)
    if dimensions == 0:
        value = value.item()
    is_number = isinstance(value, numbers.Real) and not isinstance(value, (bool, float))
    if is_number and float in kinds and int not in kinds and abs(value) <= MAX_COUNT:
        return float(value)
    return str(value) if isinstance(value, Path) and str in kinds and Path not in kinds else value


def check_settings(kind: Any, values: Mapping[str, Any]) -> None:
    """Check values with the limits of the dataclass `kind`, as in `check_values`, and with the types of its fields.
    `None` is allowed for each.
    """
    check_values(values, limits_of(kind))
    _check_types(kind, values)


def _check_types(kind: Any, values: Mapping[str, Any]) -> None:
    for name, kinds in types_of(kind).items():
        value = values.get(name)
        if value is not None and not _is_one_of(value, kinds):
            _raise_type_error(name, value, kinds)


def _raise_type_error(name: str, value: Any, kinds: Sequence[Any]) -> NoReturn:
    """Raise UsageError about a value or, in a list, about its first entry that has none of the types."""
    subject, entry_kinds = f"`{name}` is", _entry_types(kinds)
    if entry_kinds and isinstance(value, (list, tuple)):
        subject, kinds = f"An entry of `{name}` is", entry_kinds
        value = next(entry for entry in value if not _is_one_of(entry, kinds))
    words = [TYPE_WORDS.get(typing.get_origin(kind) or kind, "an object") for kind in kinds]
    raise UsageError(f"{subject} {describe_value(value)}; it must be {' or '.join(words)}.")


def _entry_types(kinds: Sequence[Any]) -> Sequence[Any]:
    """The types of the entries of a list; none if it is not among the types."""
    lists = [kind for kind in kinds if typing.get_origin(kind) in (Sequence, tuple, list)]
    return _members(typing.get_args(lists[0])[0]) if lists else ()


def _is_one_of(value: Any, kinds: Sequence[Any]) -> bool:
    """Whether a value has one of the types; an integer has that of floats, too, and a truth value only its own."""
    if isinstance(value, (list, tuple)):
        return bool(entry_kinds := _entry_types(kinds)) and all(_is_one_of(entry, entry_kinds) for entry in value)
    if type(value) in (bool, int, float):
        return type(value) in kinds or (type(value) is int and float in kinds)
    return any(isinstance(value, typing.get_origin(kind) or kind) for kind in kinds)


def check_values(values: Mapping[str, Any], limits: Mapping[str, Limits]) -> None:
    """Check values by name: numbers and words against their limits, also as entries of lists.

    Strings must be able to be paths, and they and lists have a maximum length. Raises UsageError for the first invalid
    value.
    """
    for name, value in values.items():
        allowed = limits.get(name)
        if isinstance(allowed, tuple):
            if value is not None:
                check_choice(name, value, allowed)
            continue
        entries = value if isinstance(value, (tuple, list)) else [value]
        most = MAX_ENTRIES.get(name, DEFAULT_MAX_ENTRIES)
        require(len(entries) <= most, f"`{name}` has {len(entries)} entries; it can have at most {most}.")
        for entry in entries:
            if allowed is not None and isinstance(entry, (bool, str)):
                raise UsageError(f"`{name}` is {describe_value(entry)}; it must be a number.")
            if isinstance(entry, (int, float)) and allowed is not None:
                require(allowed.contains(entry), f"`{name}` is {describe_value(entry)}; it must be {allowed}.")
            elif isinstance(entry, str):
                _check_string(name, entry)


def _check_string(name: str, value: str) -> None:
    length = len(value)
    require(length <= MAX_CHARACTERS, f"`{name}` has {length} characters; it can have at most {MAX_CHARACTERS}.")
    require("\0" not in value, f"`{name}` contains a NUL character; remove it.")
    try:
        value.encode("utf-8", "surrogateescape")  # Python's form of file names that are not UTF-8
    except UnicodeEncodeError:
        raise UsageError(f"`{name}` contains half of a surrogate pair, which is not a character.") from None


def describe_value(value: Any) -> str:
    """The value as text for a message: at most 60 characters of its repr, or its kind for a list, an object and a
    number of more than 40 digits.
    """
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return "a number of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


MAX_NAMED = 3  # unknown keys in a message


def non_defaults(values: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, by name; a nested dataclass becomes such a dict, too.

    The result does not change if a later version adds a field that has its default. The property `derived_defaults` of
    the dataclass, if there is one, has the defaults of fields that `__post_init__` fills in.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(values)}
    defaults |= getattr(values, "derived_defaults", {})
    changed = {
        name: getattr(values, name)
        for name, default in defaults.items()
        if default is dataclasses.MISSING or getattr(values, name) != default
    }
    return {name: non_defaults(v) if dataclasses.is_dataclass(v) else v for name, v in changed.items()}


def from_json(kind: Any, value: Any) -> Any:
    """The JSON value as an instance of `kind`: a dataclass, possibly nested, or the type of one of its fields.

    Raises TypeError for a value of another type or a missing key, ValueError for an unknown key, OverflowError for an
    integer that is too large for a float, and the errors of the dataclass's own validation.
    """
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind,) = _members(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, found {describe_value(value)}")
        hints = _type_hints(typing.cast(type, kind))  # mypy: dataclasses need not be hashable
        unknown = sorted(name for name in value if name not in hints)
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            raise ValueError(f"unknown: {', '.join(name[:60] for name in unknown[:MAX_NAMED])}{more}")
        return typing.cast(Any, kind)(**{name: from_json(hints[name], item) for name, item in value.items()})
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"expected a list, found {describe_value(value)}")
        return tuple(from_json(typing.get_args(kind)[0], item) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {describe_value(value)}")
    return value
