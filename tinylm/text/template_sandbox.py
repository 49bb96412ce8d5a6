"""A Jinja environment for untrusted chat templates, which cannot execute arbitrary code, hang or exhaust the memory.

A template can use only the attributes, filters, tests and functions listed here. The work of each operation is counted
before the operation, or right after it if work that is already counted bounds its cost. The unit of work is the
copy of a character (about 10 ns). A rendering that exceeds its budget raises LimitError.
"""

import datetime
import functools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, NoReturn

from jinja2 import TemplateError, Undefined, pass_context
from jinja2.ext import Extension
from jinja2.filters import do_indent, make_attrgetter
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import soft_str

from tinylm.text.template_compiler import CountingCompiler

STEP = 100  # work of a call or an operator, besides that of its values
ENTRY = 10  # work of an entry of a list or a dict, besides that of its value
COMPARISONS = 100  # comparisons of characters in a search, per unit of work

ATTRIBUTES: Mapping[type, Collection[str]] = {
    str: (
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isspace"),
        *("istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace"),
        *("rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("swapcase", "title", "upper"),
    ),
    dict: ("get", "items", "keys", "values"),
    list: ("count", "index"),
    tuple: ("count", "grouper", "index", "list"),  # `grouper` and `list` are of the pairs that the filter groupby makes
    LoopContext: (
        *("changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem"),
        *("previtem", "revindex", "revindex0"),
    ),
}
# Filters whose work depends only on the number of entries of a value, filters that test or map the entries one by one,
# and filters that read the whole content of a value.
ENTRY_FILTERS = ("count", "d", "default", "first", "items", "last", "length", "list", "reverse")
SELECTING_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")
VALUE_FILTERS = (
    *("abs", "capitalize", "dictsort", "e", "escape", "float", "groupby", "int", "lower", "max", "min", "safe", "sort"),
    *("string", "title", "unique", "upper", "wordcount"),
)
# Tests of the type or identity of a value, and tests that read its whole content.
TYPE_TESTS = (
    *("boolean", "callable", "defined", "escaped", "false", "filter", "float", "integer", "iterable", "mapping"),
    *("none", "number", "sameas", "sequence", "string", "test", "true", "undefined"),
)
VALUE_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "le", "lessthan", "lower", "lt"),
    *("ne", "upper"),
)

MISSING = object()


class RefusedError(Exception):
    """A template called raise_exception."""


class LimitError(TemplateError):
    """A template exceeds its work budget or the length limit of an argument."""


def size(value: Any, limit: int) -> int:
    """The work of copying a value with all that it contains; counting stops above the limit."""
    total, pending = 0, [value]
    while pending and total <= limit:
        value = pending.pop()
        total += ENTRY
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, dict):
            pending += value
            pending += value.values()
        elif isinstance(value, int):
            total += value.bit_length()
        elif value is not None and isinstance(value, Collection):  # a range, or a view of a dict
            pending += value
    return total


def _own_size(value: Any) -> int:
    """The work of copying a string, list or tuple, without the content of its entries."""
    return len(value) if isinstance(value, str) else ENTRY * len(value)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions and filters that transformers adds for chat templates.

    left: the remaining work budget; initially 0, so that it must be set before each rendering.
    """

    code_generator_class = CountingCompiler
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, extensions: Iterable[type[Extension]]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=list(extensions), finalize=self._output, optimized=False
        )
        self.left = 0
        filters: dict[str, Any] = {**self.filters}
        tests: dict[str, Any] = {**self.tests}
        changed: dict[str, Any] = {
            "indent": self._indent,
            "join": self._join,
            "replace": self._replace,
            "sum": self._sum,
        }
        changed |= {"tojson": self._to_json, "trim": self._trim}
        self.filters = {
            **{name: self._counting_entries(filters[name]) for name in ENTRY_FILTERS},
            **{name: self._counting_selected(filters[name]) for name in SELECTING_FILTERS},
            **{name: self._counting_values(filters[name]) for name in VALUE_FILTERS},
            **{name: self._counting_values(function) for name, function in changed.items()},
        }
        self.tests = {
            **{name: tests[name] for name in TYPE_TESTS},
            **{name: self._counting_values(tests[name]) for name in VALUE_TESTS},
            "divisibleby": lambda value, number: self.call_binop(None, "%", value, number) == 0,
            "even": lambda value: self.call_binop(None, "%", value, 2) == 0,
            "odd": lambda value: self.call_binop(None, "%", value, 2) == 1,
            "in": self.contains,
        }
        self.globals = {
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": lambda *args, **kwargs: _Namespace(*args, **kwargs),
            "raise_exception": _refuse,
            "range": self.globals["range"],
            "strftime_now": _now,
        }

    def take(self, work: int = STEP) -> None:
        """Count work. Raises LimitError if the budget is exceeded."""
        self.left -= work
        if self.left < 0:
            raise LimitError("it computes more than a conversation of this size needs")

    def counted(self, value: Any) -> Any:
        """Count the work of copying the value, and return it."""
        self.take(ENTRY + len(value) if type(value) is str else size(value, self.left))
        return value

    @pass_context
    def _output(self, context: Any, value: Any) -> Any:
        self.take()
        return self.counted(value)

    def concatenate(self, *values: Any) -> str:
        """The operator ~ of any number of values."""
        self.take()
        return "".join([str(self.counted(value)) for value in values])

    def contains(self, value: Any, values: Any) -> bool:
        """The operator in: `value in values`."""
        value, values = self.counted(value), _listed(values)
        if isinstance(values, str):
            self._take_search(values, value)
        elif not isinstance(values, dict):
            self.counted(values)
        return value in values

    def part(self, values: Any, start: Any, stop: Any, step: Any) -> Any:
        """The slice `values[start:stop:step]`."""
        bounds = slice(start, stop, step)
        if isinstance(values, (str, list, tuple)):
            length = len(range(*bounds.indices(len(values))))
            self.take(STEP + (length if isinstance(values, str) else ENTRY * length))
        return values[bounds]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The attribute of a value, if `_attribute` finds one, or else its entry of that name."""
        value = _attribute(obj, attribute)
        return self._entry(obj, attribute) if value is MISSING else value

    def getitem(self, obj: Any, argument: Any) -> Any:
        """The entry of a value, or else its attribute of that name, if `_attribute` finds one."""
        self.counted(argument)
        value = self._entry(obj, argument)
        if isinstance(value, Undefined) and isinstance(argument, str):
            attribute = _attribute(obj, argument)
            return value if attribute is MISSING else attribute
        return value

    def _entry(self, obj: Any, key: Any) -> Any:
        try:
            return obj[key]
        except (TypeError, LookupError):
            self.take()
            return self.undefined(obj=obj, name=key)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a recursive loop, a function of `globals`, or a method of ATTRIBUTES or of an extension.

        Raises UndefinedError for an undefined value, and TypeError for any other object.
        """
        for name in ("_loop_vars", "_block_vars"):  # Jinja adds these arguments
            kwargs.pop(name, None)
        if isinstance(__obj, Macro) and not (__obj.catch_varargs or __obj.catch_kwargs):
            return __obj(*args, **kwargs)
        owner = __obj.__self__ if isinstance(__obj, (BuiltinMethodType, MethodType)) else None
        if isinstance(owner, str):
            return __self._call_text(__obj, *args, **kwargs)
        functions = __self.globals.values()
        kinds = (dict, list, tuple, LoopContext, Extension)
        if not (isinstance(__obj, (Undefined, Macro, LoopContext)) or isinstance(owner, kinds) or __obj in functions):
            raise TypeError(f"a {type(__obj).__name__} cannot be called")
        __self.take()
        __self.counted((owner if isinstance(owner, (list, tuple)) else None, args, kwargs))
        return __obj(*args, **kwargs)

    def _call_text(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a string. Counts a search of the string for the first argument, except for `join`."""
        text, values = method.__self__, list(map(_listed, args))
        if method.__name__ == "join":
            self.counted(values)
            self.take(STEP + len(text) * sum(len(value) for value in values if isinstance(value, Collection)))
        else:
            self._take_search(text, values[:1], kwargs)
        if method.__name__ == "replace" and isinstance(values[0], str):
            self.take(text.count(values[0]) * size(values[1:], self.left))
        return self.counted(method(*values, **kwargs))

    def _take_search(self, text: str, *wanted: Any) -> None:
        """Count the work of a search, which at worst compares each character of the text with each wanted one."""
        self.take(STEP + len(text) + len(text) * size(wanted, self.left) // COMPARISONS)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As Jinja's, for two numbers, for + of sequences and for * of a sequence and an integer.

        Raises TypeError for other operands, such as a string that % formats, and for **.
        """
        sequences, numbers = (str, list, tuple), (int, float)
        if operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
            self.take(STEP + _own_size(left) + _own_size(right))
        elif operator == "*" and isinstance(left, sequences) and isinstance(right, int):
            self.take(STEP + _own_size(left) * max(right, 0))
        elif operator == "*" and isinstance(left, int) and isinstance(right, sequences):
            self.take(STEP + max(left, 0) * _own_size(right))
        elif operator != "**" and isinstance(left, numbers) and isinstance(right, numbers):
            self.take(STEP + size(left, self.left) * size(right, self.left) // STEP)
        elif not isinstance(left, Undefined) and (operator == "%" or not isinstance(right, Undefined)):
            kinds = f"{type(left).__name__} and {type(right).__name__}"
            raise TypeError(f"the operator {operator} is not supported for {kinds}")
        return super().call_binop(context, operator, left, right)

    def _counting_entries(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter to count each call, and each entry that the filter yields or copies."""

        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.take()
            result = function(*args, **kwargs)
            if isinstance(result, GeneratorType):
                return _Lazy(self, result)
            if isinstance(result, (str, list)):
                self.take(_own_size(result))
            return result

        return counting

    def _counting_selected(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter that takes a context and values, to count each call and each value read or yielded."""

        @functools.wraps(function)
        def counting(context: Any, values: Any, *args: Any, **kwargs: Any) -> _Lazy:
            self.take()
            return _Lazy(self, function(context, _Lazy(self, iter(values or ())), *args, **kwargs))

        return counting

    def _counting_values(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter or test to count the work of copying its arguments and its result."""
        first = int(hasattr(function, "jinja_pass_arg"))  # Jinja adds an argument before those of the template

        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            values = list(map(_listed, args[first:]))
            self.take(STEP + size((values, kwargs), self.left))
            result = function(*args[:first], *values, **kwargs)
            return _Lazy(self, result) if isinstance(result, GeneratorType) else self.counted(result)

        return counting

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        self.take((len(width) if isinstance(width, str) else max(width, 0)) * (1 + len(text.splitlines())))
        return do_indent(text, width, first, blank)

    def _join(self, values: Iterable[Any], separator: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            values = map(make_attrgetter(self, attribute), values)
        parts = [str(self.counted(value)) for value in values]
        self.take(len(str(separator)) * len(parts))
        return str(separator).join(parts)

    def _replace(self, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
        return self._call_text(str(text).replace, str(old), str(new), -1 if count is None else count)

    def _sum(self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        for value in values if attribute is None else map(make_attrgetter(self, attribute), values):
            start = self.call_binop(None, "+", start, value)
        return start

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without the escapes for HTML that Jinja's own filter makes."""
        if (isinstance(indent, int) and indent > 100) or size((indent, separators), 200) > 200:
            raise LimitError("its indent or its separators are too long")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return encoder.encode(value) if indent is None else "".join(map(self.counted, encoder.iterencode(value)))

    def _trim(self, text: Any, characters: str | None = None) -> Any:
        return self._call_text(soft_str(text).strip, characters)


class _Namespace(Namespace):
    """As Jinja's, but its `repr` does not contain the entries, one of which may be the namespace itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Lazy:
    """Iterator over the values of a lazy filter, which counts each value."""

    def __init__(self, environment: TemplateEnvironment, values: Iterator[Any]) -> None:
        self._environment = environment
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._environment.take()
        return next(self._values)


def _attribute(obj: Any, name: str) -> Any:
    """The attribute of a value, if it is one of ATTRIBUTES or an entry of a namespace, or else MISSING."""
    if isinstance(obj, Namespace):
        return MISSING if name.startswith("_") else getattr(obj, name, MISSING)
    for kind, names in ATTRIBUTES.items():
        if isinstance(obj, kind) and name in names:
            return getattr(obj, name, MISSING)
    return MISSING


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, _Lazy) else value


def _refuse(message: Any = "") -> NoReturn:
    raise RefusedError(str(message))


def _now(format: str) -> str:
    if len(format) > 100:
        raise LimitError("its date format is too long")
    return datetime.datetime.now().strftime(format)
