"""Dataclasses as plain values: read back from JSON with every type checked, or without what is at its default."""

import dataclasses
import types
import typing
from typing import Any

from tinylm.checks import shown

MOST_NAMED = 3  # of the unknown keys, in a message


def chosen(values: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults: the same when later versions have more fields."""
    return {
        field.name: getattr(values, field.name)
        for field in dataclasses.fields(values)
        if field.default is dataclasses.MISSING or getattr(values, field.name) != field.default
    }


def from_json(kind: Any, value: Any) -> Any:
    """Build a value of a (nested) dataclass type from JSON, refusing unknown keys and wrong types."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        (kind,) = (k for k in typing.get_args(kind) if k is not types.NoneType)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise TypeError(f"expected an object, found {shown(value)}")
        hints = typing.get_type_hints(kind)
        unknown = sorted(name for name in value if name not in hints)
        if unknown:
            more = f" and {len(unknown) - MOST_NAMED} more" if len(unknown) > MOST_NAMED else ""
            raise ValueError(f"unknown: {', '.join(name[:60] for name in unknown[:MOST_NAMED])}{more}")
        return typing.cast(Any, kind)(**{name: from_json(hints[name], item) for name, item in value.items()})
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"expected a list, found {shown(value)}")
        return tuple(from_json(typing.get_args(kind)[0], item) for item in value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, found {shown(value)}")
    return value
