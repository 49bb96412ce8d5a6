"""The process that renders a chat template for `tinylm.text.chat_template`. It imports jinja2 and the standard library.

A template is untrusted. Jinja's sandbox keeps it from Python's internals; the operating system limits its time and its
memory, and takes from the process the means to open or write files, to start processes and to read the environment.
Windows has no such limits: there the parent's deadline alone ends the process.

The parent sends lines of JSON: first the template, then lists of jobs. Each is answered by a line: the first by `null`
or an error, the others by lists with the results of the jobs.
"""

import codecs
import contextlib
import datetime
import html  # noqa: F401, imported before files can no longer be opened; Jinja imports it later, as the four below
import json
import os
import pprint  # noqa: F401
import signal
import sys
import textwrap  # noqa: F401
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 512 << 20  # bytes of address space of the process, besides those for the conversations
MEMORY_PER_INPUT = 64  # bytes of address space, per byte of the line with the conversations


class RefusedError(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}answer{% endgeneration %}`: puts the environment's `marks` around the answer."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block into a call of `_mark` with the content of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


class _Namespace(Namespace):
    """As Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an entry may be named "self"
        values = dict(*args[1:], **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the entry {name!r}")


class _Dict:
    """The function `dict` and its `fromkeys`, without access to the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _refuse(message: Any = "") -> NoReturn:
    raise RefusedError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str, marks: Sequence[str]) -> jinja2.Template:
    """Compile a template, with the functions and the filter that transformers gives to chat templates.

    marks: texts before and after each answer in `{% generation %}` blocks.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.extend(marks=marks)
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _refuse,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    return environment.from_string(source)


def render(template: jinja2.Template, job: dict[str, Any]) -> list[Any]:
    """Render the `values` of a job with each pair of a number of the first messages and `add_generation_prompt` in its
    `prefixes`. If there are several pairs, the first is for all messages.

    Each result is a text; the length of the text if it is a prefix of the first one; or the kind and the message of an
    error, after which there are no others if it is the first. All texts have at most `characters` together.
    """
    values, room = job["values"], job["characters"]
    whole: str | None = None
    found: list[Any] = []
    for count, prompt in job["prefixes"]:
        prefix = {**values, "messages": values["messages"][:count], "add_generation_prompt": prompt}
        try:
            text = _text(template, prefix, room)
        except Exception as error:  # whatever the compiled template raises
            found.append(_failure(error))
            if whole is None:
                break
            continue
        if whole is not None and whole.startswith(text):
            found.append(len(text))
            continue
        whole = text if whole is None else whole
        room -= len(text)
        found.append(text)
    return found


def _text(template: jinja2.Template, values: dict[str, Any], limit: int) -> str:
    """What a template writes: at most `limit` characters."""
    parts: list[str] = []
    length = 0
    for part in template.generate(values):
        length += len(part)
        if length > limit:
            raise ValueError("it renders too long a text")
        parts.append(part)
    return "".join(parts)


def lock_down() -> None:
    """Take from this process what a template does not need, as far as the system can."""
    codecs.lookup("unicode-escape")  # imports the decoder that Jinja uses for texts in a template
    datetime.datetime.now().strftime("%c %Z")  # reads the file of the time zone
    os.environ.clear()
    with contextlib.suppress(ImportError):
        import resource

        for name in ("RLIMIT_NOFILE", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE"):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                resource.setrlimit(getattr(resource, name), (0, 0))
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)


def limit_memory(size: int) -> None:
    """Limit the address space of this process for a frame of this size."""
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY + MEMORY_PER_INPUT * size
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def limit_time(seconds: float) -> None:
    """End this process by a signal after this processor time; 0 for no limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _failure(error: Exception) -> list[str]:
    """The kind of an error, "refused" or "failed", and its message."""
    if isinstance(error, (RecursionError, MemoryError)):
        return ["failed", "it is nested too deeply or too large"]
    text = str(error)
    if isinstance(error, SyntaxError):  # without the line number, which refers to the compiled template
        text = error.msg
    elif isinstance(error, jinja2.TemplateError):
        text = error.message or ""
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {text}"
    return ["refused" if isinstance(error, RefusedError) else "failed", (text or type(error).__name__)[:1000]]


def main() -> None:
    """Answer the lines of standard input until its end, which comes when the parent has ended."""
    answers = os.fdopen(1, "wb")
    lock_down()
    limit_memory(0)
    template: jinja2.Template | None = None
    answer: list[Any] | None
    for line in sys.stdin.buffer:
        limit_memory(len(line))
        request = json.loads(line)
        if template is None:
            limit_time(request["seconds"])
            try:
                template, answer = compile_template(request["source"], request["marks"]), None
            except Exception as error:  # of Jinja, or of Python, which compiles what Jinja generates
                answer = _failure(error)
        else:
            answer = []
            for job in request:
                limit_time(job["seconds"])
                answer.append(render(template, job))
        limit_time(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
