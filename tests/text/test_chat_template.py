"""Chat templates: equal to transformers' rendering, and harmless if they are hostile."""

import contextlib
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tinylm.errors import TinyLMError, UsageError
from tinylm.text.chat_template import CHATML, ChatTemplate

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello <b>\n\n  you"},
    {"role": "assistant", "content": " Hi! "},
    {"role": "user", "content": "1 < 2?"},
    {"role": "assistant", "content": "Yes."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "chatml": CHATML,
    # As Llama 2: text before and after, trimmed contents, special tokens by name, a loop with a condition.
    "llama": (
        "{{ bos_token }}{% for m in messages if m['role'] != 'system' %}"
        "{% if m.role == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
        "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    # A namespace, a macro, slices, loop variables, tests, and tools as JSON.
    "tools": (
        "{% macro head(role) %}<|{{ role }}|>{% endmacro %}{% set ns = namespace(n=0) %}"
        "{% if tools %}{{ tools | tojson(indent=2) }}\n{% endif %}"
        "{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}{{ head(m.role) }}{{ ns.n }}/{{ loop.length }}"
        "{% if loop.last and not m.tool_calls is defined %}!{% endif %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
    ),
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def by_transformers(template: str, **options: Any) -> tuple[str, list[tuple[int, int]]]:
    texts, spans = render_jinja_template(
        [CONVERSATION], chat_template=template, return_assistant_tokens_mask=True, **SPECIAL, **options
    )
    return texts[0], [tuple(span) for span in spans[0]]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_does(name: str, tools: Any, prompt: bool) -> None:
    expected, _ = by_transformers(TEMPLATES[name], tools=tools, add_generation_prompt=prompt)
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert template.render(CONVERSATION, tools, add_generation_prompt=prompt) == expected


def test_chatml_is_the_published_format_and_marks_each_answer_with_its_end() -> None:
    text, spans = ChatTemplate(CHATML).marked(CONVERSATION[1:3])
    assert text == "<|im_start|>user\nHello <b>\n\n  you<|im_end|>\n<|im_start|>assistant\n Hi! <|im_end|>\n"
    assert [text[span.start : span.stop] for span in spans] == [" Hi! <|im_end|>"]
    expected_text, expected_spans = by_transformers(CHATML)
    text, spans = ChatTemplate(CHATML).marked(CONVERSATION)
    assert (text, [(span.start, span.stop) for span in spans]) == (expected_text, expected_spans)


def test_a_template_can_refuse_a_conversation_with_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        template.render(CONVERSATION)


@pytest.mark.parametrize("mark", ["\ufdd0", "\ufdd1"])
def test_a_conversation_cannot_forge_the_marks_of_answers(mark: str) -> None:
    with pytest.raises(UsageError, match="U\\+FDD0"):
        ChatTemplate(CHATML).marked([{"role": "user", "content": f"a{mark}b"}])


ATTACKS = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a format": "{{ '{0.__class__}'.format(messages) }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a method": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "self": "{{ self._TemplateReference__context }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over characters": "{% set a = 'x' * 100000 %}{% for b in a %}{% for c in a %}{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(900) }}",
    "exponential calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a long text": "{{ 'x' * 10**12 }}",
    "a doubled text": "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "a joined text": "{% set ns = namespace(a='xx') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "a replaced text": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "a method that replaces": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "a joined list": "{{ (range(99999) | list) | join('y' * 100000) }}",
    "a padded text": "{{ 'x'.ljust(10**12) }}",
    "a formatted text": "{{ '%1000000000d' % 1 }}",
    "a filter that pads": "{{ 'x' | center(10**12) }}",
    "a huge number": "{{ 9 ** 9 ** 9 }}",
    "an indented text": "{{ (('x\n' * 10000) | indent(10**9)) | length }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
    "a syntax error": "{% for %}",
    "an unknown filter": "{{ 'x' | pickle }}",
    "deep nesting": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "a captured text": (
        "{% set ns = namespace(a='xx') %}{% for i in range(99) %}{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}"
        "{% set ns.a = b %}{% endfor %}"
    ),
    "filters in loops": "{% for i in range(99999) %}{{ range(99999) | list | length * 0 }}{% endfor %}",
    "slices in loops": "{% set a = 'x' * 2000000 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
    "a squared number": "{% set ns = namespace(n=2) %}{% for i in range(90) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "batches": "{{ range(99999) | batch(1000000000, 'x') | list | length }}",
    "rounding": "{{ 1.5 | round(10**9) }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_template_ends_within_seconds_without_effect(name: str) -> None:
    start = time.monotonic()
    text = ""
    with contextlib.suppress(TinyLMError):
        text = ChatTemplate(ATTACKS[name]).render(CONVERSATION)
    assert len(text) < 100 and "root" not in text  # Jinja renders what it denies as an empty text
    assert time.monotonic() - start < 20
