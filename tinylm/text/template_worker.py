"""The process that renders a chat template for `tinylm.text.chat_template`. It imports jinja2 and the standard library.

A template is untrusted. Jinja's sandbox keeps it from Python's internals; the operating system limits its time and its
memory, and takes from the process the means to open or write files, to start processes and to read the environment.
Windows has no such limits: there the parent's deadline alone ends the process.

The parent sends lines of JSON: first the template, then lists of jobs. Each is answered by a line: the first by `null`
or an error, the others by lists with the results of the jobs.

To render each beginning of a conversation alone takes time quadratic in the number of messages. Many templates have a
single loop over the messages and read no later message in it, as their syntax tree shows. In a copy of such a template,
the text after the loop is also written before each message, between marks, so that one rendering has all beginnings.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.constants
import jinja2.debug
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MARK = "\ufdd3"  # a noncharacter
PROMPT = "add_generation_prompt"
LOOP_ATTRIBUTES = ("index", "index0", "first")  # that do not depend on later messages
OTHER_TEMPLATES = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
# What may follow the loop: conditions and expressions without side effects.
TAIL = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.Name, nodes.Const, nodes.Not, nodes.And, nodes.Or, nodes.Add),
    *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.Getattr, nodes.Getitem, nodes.CondExpr),
)


class Ends(NamedTuple):
    """What a template writes for the first messages of a conversation, as a part of the whole text and an end.

    length: characters of the whole text. with_prompt, without_prompt: the end with and without a generation prompt.
    """

    length: int
    with_prompt: str
    without_prompt: str


class MarkedTemplate(NamedTuple):
    """The copy of a template with marked ends.

    first: the number of messages from which on the ends hold, since the template reads those before by their index.
    """

    template: jinja2.Template
    first: int


def ends_in(marked: str, whole: str) -> list[Ends]:
    """The ends by the number of messages, from 0 on. Empty if a marked text does not agree with the whole text."""
    head, *parts = marked.split(MARK)
    bodies = parts[2::3]
    if MARK in whole or "".join((head, *bodies)) != whole:
        return []
    found, length = [], len(head)
    for with_prompt, without_prompt, body in zip(parts[::3], parts[1::3], bodies, strict=False):
        found.append(Ends(length, with_prompt, without_prompt))
        length += len(body)
    return found


def marked_template(environment: jinja2.Environment, source: str) -> MarkedTemplate | None:
    """The copy of a template with marked ends; `None` if what it writes for a message may depend on later ones."""
    tree = _parsed(environment, source)
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if len(loops) != 1 or next(tree.find_all(OTHER_TEMPLATES), None) is not None:
        return None
    (loop,) = loops
    at = tree.body.index(loop)
    tail = tree.body[at + 1 :]
    renamed = [node for node in tree.body[:at] if _is_alias(node)]
    names = {"messages", *(name.name for node in renamed for name in node.find_all(nodes.Name))}
    if (
        not isinstance(loop.iter, nodes.Name)
        or loop.iter.name not in names
        or loop.else_
        or loop.test
        or loop.recursive
    ):
        return None
    uses = [use for node in tree.body[:at] if node not in renamed for use in _uses(node, names, PROMPT)]
    uses += [use for node in (loop.target, *loop.body) for use in _uses(node, names, PROMPT)]
    uses += [use for node in tail for use in _uses(node, names)]
    stored = {name.name for name in nodes.Template([loop]).find_all(nodes.Name) if name.ctx != "load"}
    for node in tail:
        inside = [node, *node.find_all(nodes.Node)]
        uses += [None for one in inside if not isinstance(one, TAIL) or getattr(one, "name", None) in stored]
    indices = [use for use in uses if use is not None]
    if len(indices) < len(uses):
        return None
    ends: list[nodes.Node] = [nodes.Output([nodes.TemplateData(MARK)])]
    for prompt in (True, False):
        end = _parsed(environment, source).body[at + 1 :]
        ends.append(nodes.With([nodes.Name(PROMPT, "store")], [nodes.Const(prompt)], end))
        ends.append(nodes.Output([nodes.TemplateData(MARK)]))
    loop.body[:0] = ends
    tree.set_lineno(loop.lineno).set_environment(environment)
    return MarkedTemplate(environment.from_string(tree), max(indices, default=-1) + 1)


def _parsed(environment: jinja2.Environment, source: str) -> nodes.Template:
    tree = environment.parse(source)
    tree.body = [node for node in tree.body if not _sets_default(node)]
    return tree


def _sets_default(node: nodes.Node) -> bool:
    """Whether a node is `{% if not add_generation_prompt is defined %}...{% endif %}`, which does nothing here."""
    test = node.test.node if isinstance(node, nodes.If) and isinstance(node.test, nodes.Not) else None
    return (
        isinstance(test, nodes.Test)
        and test.name == "defined"
        and isinstance(test.node, nodes.Name)
        and test.node.name == PROMPT
        and not node.elif_  # type: ignore[attr-defined]
        and not node.else_  # type: ignore[attr-defined]
    )


def _is_alias(node: nodes.Node) -> bool:
    """Whether a node is `{% set NAME = messages %}`."""
    return (
        isinstance(node, nodes.Assign)
        and isinstance(node.target, nodes.Name)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "messages"
    )


def _uses(node: nodes.Node, messages: Collection[str], *others: str, nested: bool = False) -> Iterator[int | None]:
    """Yield the index of each message that is read by a constant index, and `None` for any other use of the messages
    or of `others`, and for uses of the loop that may depend on later messages.

    nested: whether the node is in another loop inside of that over the messages, which is free to use its own `loop`.
    """
    match node:
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=int() as index)) if name in messages:
            yield index if index >= 0 else None
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attribute):
            if not nested and attribute not in LOOP_ATTRIBUTES:
                yield None
        case nodes.Name(name=name):
            if name in (*messages, *others, "loop"):
                yield None
        case nodes.For():
            yield from _uses(node.iter, messages, *others, nested=nested)
            for child in (node.target, node.test, *node.body, *node.else_):
                if child is not None:
                    yield from _uses(child, messages, *others, nested=True)
        case _:
            for child in node.iter_child_nodes():
                yield from _uses(child, messages, *others, nested=nested)


MEMORY = 512 << 20  # bytes of address space of the process, besides those for the conversations
MEMORY_PER_INPUT = 64  # bytes of address space, per byte of the line with the conversations
MIN_MARKED = 3  # prefixes from which on they are not rendered one by one, if possible


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
        """As `dict.fromkeys`."""
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


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


class Renderer:
    """A compiled template, with the functions and the filter that transformers gives to chat templates.

    marks: texts before and after each answer in `{% generation %}` blocks.
    """

    def __init__(self, source: str, marks: Sequence[str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.extend(marks=marks)
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "strftime_now": _now,
        }
        self._template = environment.from_string(source)
        self._marked: MarkedTemplate | None = None
        with contextlib.suppress(RecursionError):  # its copy of the end is nested more deeply
            self._marked = marked_template(environment, source)

    def results(self, job: dict[str, Any]) -> list[Any]:
        """The renderings of a job: of its `values`, with each pair of a number of the first messages and
        `add_generation_prompt` in its `prefixes`. If there are several pairs, the first is for all messages.

        Each is a text; the length of the text if it is a prefix of the first one; or the kind and the message of an
        error. All texts have at most `characters` together. After `texts` texts besides the first, the others are left
        out.
        """
        found: list[Any] = []
        texts: list[str] = []
        ends: list[Ends] = []
        for count, prompt in job["prefixes"]:
            try:
                if self._marked and len(ends) > count >= self._marked.first:
                    end = ends[count].with_prompt if prompt else ends[count].without_prompt
                    length = ends[count].length
                    if texts[0].startswith(end, length):
                        found.append(length + len(end))
                        continue
                    text = texts[0][:length] + end
                else:
                    room = job["characters"] - sum(map(len, texts))
                    text = _text(self._template, job["values"], count, prompt, room)
            except Exception as error:  # whatever the compiled template raises
                found.append(_failure(error))
                if not texts:
                    break
                continue
            if texts and texts[0].startswith(text):
                found.append(len(text))
                continue
            texts.append(text)
            found.append(text)
            if len(texts) == 1 and len(job["prefixes"]) > MIN_MARKED and self._marked:
                with contextlib.suppress(Exception):
                    marked = _text(self._marked.template, job["values"], count, prompt, job["characters"])
                    ends = ends_in(marked, text)
            if len(texts) > job["texts"]:
                break
        return found


def _text(template: jinja2.Template, values: dict[str, Any], count: int, prompt: bool, limit: int) -> str:
    """What a template writes for the first `count` messages: at most `limit` characters."""
    messages = values["messages"][:count]
    parts: list[str] = []
    length = 0
    for part in template.generate({**values, "messages": messages, PROMPT: prompt}):
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
    renderer: Renderer | None = None
    answer: list[Any] | None
    for line in sys.stdin.buffer:
        limit_memory(len(line))
        request = json.loads(line)
        if renderer is None:
            limit_time(request["seconds"])
            try:
                renderer, answer = Renderer(request["source"], request["marks"]), None
            except Exception as error:  # of Jinja, or of Python, which compiles what Jinja generates
                answer = _failure(error)
        else:
            answer = []
            for job in request:
                limit_time(job["seconds"])
                answer.append(renderer.results(job))
        limit_time(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()
