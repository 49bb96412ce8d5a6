"""Chat templates: Jinja programs that turn a conversation into the text that a chat model was trained on.

A template comes from a stranger's folder. It runs in Jinja's sandbox, with the loops, calls and texts that it can make
bounded, so that it can neither execute code nor hang nor fill the memory.
"""

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tinylm.errors import TinyLMError, UsageError

Message = Mapping[str, Any]  # role, content, and what the template understands besides

MAX_STEPS = 300_000  # iterations of loops, calls and operations in one rendering
MAX_TEXT = 1 << 21  # characters of a value that a template computes, and of its output

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration -%}
{%- else -%}
{{ message.content + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

# Noncharacters of Unicode, which no text contains: they mark the scored spans in the output of a template.
BEGIN, END = "\ufdd0", "\ufdd1"

FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby"),
    *("indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
    *("replace", "reverse", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim"),
    *("unique", "upper", "wordcount"),
)
STRING_METHODS = (
    *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isspace"),
    *("istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace"),
    *("rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase"),
    *("title", "upper"),
)


class ChatTemplate:
    """A chat template, compiled. Raises TinyLMError for a source that is not a Jinja template.

    special: texts of the tokenizer's special tokens by their names in templates: bos_token, eos_token, pad_token.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special = dict(special or {})
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise TinyLMError(f"The chat template is not a Jinja template ({_reason(error)}).") from error
        self.marks_answers = "endgeneration" in source

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the next answer begins.

        Raises UsageError for a conversation that the template refuses, and TinyLMError for a template that fails.
        """
        text = self._render(messages, tools, add_generation_prompt)
        return text.replace(BEGIN, "").replace(END, "")

    def marked(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, list[range]]:
        """The text of a conversation, and the ranges of characters in it that the template marks as answers.

        These are its `{% generation %}` blocks. Raises as `render`.
        """
        plain, spans, length = [], [], 0
        for number, part in enumerate(self._render(messages, tools, False).split(BEGIN)):
            answer, _, rest = part.partition(END) if number else ("", "", part)
            if number:
                spans.append(range(length, length + len(answer)))
            plain += [answer, rest]
            length += len(answer) + len(rest)
        return "".join(plain), spans

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool) -> str:
        require_no_marks(messages)
        self._environment.steps = MAX_STEPS
        parts: list[str] = []
        length = 0
        try:
            values = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": prompt}
            for part in self._template.generate(**self.special, **values):
                parts.append(part)
                length += len(part)
                if length > MAX_TEXT:
                    raise _LimitError(f"its output is longer than {MAX_TEXT} characters")
        except _RefusedError as error:
            raise UsageError(f"The chat template refuses the conversation: {_reason(error)}.") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise TinyLMError(f"The chat template fails on the conversation ({_reason(error)}).") from error
        except (RecursionError, MemoryError) as error:
            raise TinyLMError("The chat template needs too much memory.") from error
        return "".join(parts)


def require_no_marks(values: Any) -> None:
    """Raise UsageError if a text in the JSON values contains one of the two noncharacters that mark answers."""
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and (BEGIN in value or END in value):
            raise UsageError("The conversation contains U+FDD0 or U+FDD1, which are not characters; remove them.")
        if isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            pending += value


class _RefusedError(Exception):
    """A template called raise_exception."""


class _LimitError(jinja2.TemplateError):
    """A template computes more than the limits allow."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what transformers adds for chat templates, and with limits. `steps` counts down to 0."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self.measured)
        self.steps = MAX_STEPS
        bounded = {"indent": _bounded_indent, "join": _bounded_join, "replace": _bounded_replace, "tojson": _to_json}
        filters = {name: self.filters[name] for name in FILTERS} | bounded
        self.filters = {name: self._counted_filter(function) for name, function in filters.items()}
        self.globals = {"dict": dict, "namespace": self.globals["namespace"], "range": self.globals["range"]}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Limits().visit(Parser(self, source, name, filename).parse())

    def take(self, steps: int = 1) -> None:
        """Count steps. Raises _LimitError when there are none left."""
        self.steps -= steps
        if self.steps < 0:
            raise _LimitError(f"it takes more than {MAX_STEPS} steps")

    def measured(self, value: Any) -> Any:
        """The value, after a step and one for each thousand entries. Raises _LimitError if it is too long."""
        size = len(value) if isinstance(value, (str, list, tuple)) else 0
        self.take(1 + size // 1000)
        if size > MAX_TEXT:
            raise _LimitError("it computes a text that is too long")
        return value

    def loop_over(self, values: Any) -> Any:
        """The values of a loop, each of which is a step."""
        if isinstance(values, Sized):
            self.take(1 + len(values))
            return values
        return map(self.measured, values)

    def concatenate(self, *values: Any) -> str:
        """The operator ~."""
        return str(self.measured("".join(str(self.measured(value)) for value in values)))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As Jinja's, counted: a slice copies."""
        self.measured(obj)
        return super().getitem(obj, argument)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As Jinja's, counted; methods of strings that lengthen them are bounded."""
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        __self.measured(owner)
        if isinstance(owner, str) and name == "replace":
            return _bounded_replace(owner, *args, **kwargs)
        if isinstance(owner, str) and name == "join":
            return _bounded_join(args[0], owner)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As Jinja's; products are bounded, there are no powers, and % does not format strings."""
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise _LimitError(f"{operator} is not supported")
        if operator == "*" and _size(left) * _size(right) > MAX_TEXT:
            raise _LimitError("it computes a value that is too large")
        return self.measured(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As Jinja's; of the methods of strings, only those that templates need."""
        return (not isinstance(obj, str) or attr in STRING_METHODS) and super().is_safe_attribute(obj, attr, value)

    def _counted_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if isinstance(value, Sized):
                    self.take(1 + len(value) // (1000 if isinstance(value, str) else 1))
            return function(*args, **kwargs)

        return counted


class _Limits(NodeTransformer):
    """Lets the environment count the iterations of loops, and measure the texts that ~ joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """A loop over what `loop_over` returns."""
        self.generic_visit(node)
        node.iter = nodes.Call(nodes.EnvironmentAttribute("loop_over"), [node.iter], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        """A call of `concatenate`."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)


class _Generation(Extension):
    """`{% generation %}answer{% endgeneration %}`: puts marks around the answer."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call of `_mark` with its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _refuse(message: Any = "") -> NoReturn:
    raise _RefusedError(str(message))


def _now(format: str) -> str:
    if len(format) > 100:
        raise _LimitError("its date format is too long")
    return datetime.datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    if indent is not None and indent > 100:
        raise _LimitError("its indent is too large")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _size(value: Any) -> Any:
    return len(value) if isinstance(value, Sized) else abs(value)


def _bounded_indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(width, 1000)
    if text.count("\n") * len(space) > MAX_TEXT:
        raise _LimitError("it computes a text that is too long")
    lines = text.split("\n")
    indented = (space + line if (number or first) and (line or blank) else line for number, line in enumerate(lines))
    return "\n".join(indented)


def _bounded_replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    if text.count(old) * len(new) > MAX_TEXT:
        raise _LimitError("it computes a text that is too long")
    return text.replace(old, new, -1 if count is None else count)


def _bounded_join(values: Iterable[Any], separator: Any = "", attribute: str | int | None = None) -> str:
    parts = [str(value if attribute is None else value[attribute]) for value in values]
    if sum(map(len, parts)) + len(parts) * len(str(separator)) > MAX_TEXT:
        raise _LimitError("it computes a text that is too long")
    return str(separator).join(parts)


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200].rstrip(".")
