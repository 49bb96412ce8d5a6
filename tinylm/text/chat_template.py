"""Chat templates: Jinja programs that turn a conversation into the text that a chat model was trained on.

A template is untrusted, so it runs in the environment of `template_sandbox`, with a budget of work.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from tinylm.errors import TinyLMError, UsageError
from tinylm.run_config import MAX_TEMPLATE
from tinylm.text.template_sandbox import RefusedError, TemplateEnvironment, size

Message = Mapping[str, Any]  # role, content, and other keys that the template uses

# The work budget of a rendering, which then takes seconds at most. It is enough for hundreds of messages with published
# templates that nest two loops over all messages, and for more than 10,000 messages with all others.
MAX_WORK = 50_000_000
WORK_PER_INPUT = 200  # added to MAX_WORK for each unit of work that copying the conversation takes

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

# Unicode noncharacters that mark the scored spans in the output of a template; no conversation may contain them.
BEGIN, END = "\ufdd0", "\ufdd1"
_INVALID = re.compile(f"[{BEGIN}{END}\ud800-\udfff]")


class ChatTemplate:
    """A chat template, compiled.

    special: texts of the tokenizer's special tokens by their names in templates: bos_token, eos_token, pad_token.
    marks_answers: whether the source has `{% generation %}` blocks.

    Raises TinyLMError for a source that is not a Jinja template or has more than MAX_TEMPLATE characters.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        if len(source) > MAX_TEMPLATE:
            raise TinyLMError(f"The chat template has {len(source)} characters; it can have at most {MAX_TEMPLATE}.")
        self.source = source
        self.special = dict(special or {})
        self._environment = TemplateEnvironment([_Generation, loopcontrols])
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # of Jinja, or of Python, which compiles what Jinja generates
            raise TinyLMError(f"The chat template is not a Jinja template ({_reason(error)}).") from error
        self.marks_answers = "endgeneration" in source

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the next answer begins.

        Raises UsageError for a conversation that the template refuses or that has invalid characters, and TinyLMError
        for a template that fails.
        """
        text = self._render(messages, tools, add_generation_prompt)
        return text.replace(BEGIN, "").replace(END, "")

    def marked(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[str, list[range]]:
        """The text of a conversation, and the ranges of its characters that come from `{% generation %}` blocks.

        Raises UsageError and TinyLMError as `render` does.
        """
        plain, spans, length = [], [], 0
        for number, part in enumerate(self._render(messages, tools, False).split(BEGIN)):
            answer, _, rest = part.partition(END) if number else ("", "", part)
            rest = rest.replace(END, "")
            if number:
                spans.append(range(length, length + len(answer)))
            plain += [answer, rest]
            length += len(answer) + len(rest)
        return "".join(plain), spans

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, prompt: bool) -> str:
        _require_valid_texts((messages, tools))
        self._environment.left = MAX_WORK + WORK_PER_INPUT * size((messages, tools), sys.maxsize)
        try:
            values = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": prompt}
            text = "".join(self._template.generate(**self.special, **values))
            text.encode()
        except RefusedError as error:
            raise UsageError(f"The chat template refuses the conversation: {_reason(error)}.") from error
        except Exception as error:  # whatever the compiled template raises
            raise TinyLMError(f"The chat template fails on the conversation ({_reason(error)}).") from error
        return text


def _require_valid_texts(values: Any) -> None:
    """Raise UsageError if a text in the JSON values has a lone surrogate, BEGIN or END."""
    pending = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            if not value.isascii() and (found := _INVALID.search(value)):
                raise UsageError(
                    f"The conversation contains U+{ord(found[0]):04X}, which is not a character; remove it."
                )
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            pending += value


class _Generation(Extension):
    """`{% generation %}answer{% endgeneration %}`: puts BEGIN and END around the answer."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block into a call of `_mark` with the content of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{BEGIN}{caller()}{END}"


def _reason(error: Exception) -> str:
    """The message of an error in one line of printable characters."""
    if isinstance(error, (RecursionError, MemoryError)):
        return "it is nested too deeply or too large"
    text = str(error)
    if isinstance(error, SyntaxError):  # without the line number, which refers to the compiled template
        text = error.msg
    elif isinstance(error, jinja2.TemplateError):
        text = error.message or ""
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {text}"
    line = " ".join((text or type(error).__name__)[:1000].split())[:200].rstrip(".")
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in line)
