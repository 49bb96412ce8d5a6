"""Dataclasses from and to JSON values."""

import dataclasses
import functools
import types
import typing
from typing import Any

from tinylm.config.validation import describe_value

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
        (kind,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
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


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    """Cached `typing.get_type_hints`, which compiles each annotation again at every call."""
    return typing.get_type_hints(kind)
