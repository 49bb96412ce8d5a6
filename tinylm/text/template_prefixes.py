"""All beginnings of a conversation in one rendering, for chat templates that write one message after the other.

To render each beginning alone takes time quadratic in the number of messages. Many templates have a single loop over
the messages and read no later message in it, as their syntax tree shows. In a copy of such a template, the text after
the loop is also written before each message, between marks. It belongs to the process of `template_worker`.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

import jinja2
from jinja2 import nodes

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
