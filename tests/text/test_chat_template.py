"""Chat templates: equal to transformers' rendering, and harmless if they are hostile."""

import json
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from tinylm.errors import TinyLMError, UsageError
from tinylm.text import chat_template
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
    # As Mistral: the last of the messages that a filter selects, compared with each message.
    "selected": (
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{{ users | length }}"
        "{% for m in messages %}{% if m == users[-1] %}[LAST]{% endif %}{{ m.content }}{% endfor %}"
        "{{ messages | rejectattr('role', 'in', ['user', 'tool']) | map(attribute='content') | map('trim') | join }}"
        "{{ messages | map(attribute='role') | unique | list }}{{ [0, 1, '', none] | select | list }}"
        "{{ [1, 2, 3] | reject('odd') | list }}{{ messages | map(attribute='x', default='-') | join }}"
        "{{ messages | selectattr('tool_calls') | list | length }}{{ messages | selectattr('name', 'defined') | list }}"
    ),
    # As Qwen3: backwards, with what precedes and follows a mark in a text.
    "thinking": (
        "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}"
        "{% set i = (messages | length - 1) - loop.index0 %}"
        "{% if ns.last < 0 and m.role == 'user' and not (m.content.startswith('<a>') and m.content.endswith('</a>')) %}"
        "{% set ns.last = i %}{% endif %}{% endfor %}{{ ns.last }}{% for m in messages %}{% if 'l' in m.content %}"
        "{{ m.content.split('l')[-1].lstrip('\n') ~ '|' ~ m.content.rstrip('\n').split('l')[0] }}"
        "{% elif loop.previtem is defined and loop.previtem.role not in ('user', 'tool') %}{{ loop.previtem.role }}"
        "{% endif %}{% endfor %}{{ 1 < ns.last < 4 <= 9 }}"
    ),
    # As DeepSeek and Gemma: texts collected in a namespace, alternation by %, macros with a caller, sorted dicts.
    "collected": (
        "{% macro wrap(tag) %}<{{ tag }}>{{ caller(tag | upper) }}</{{ tag }}>{% endmacro %}"
        "{% macro walk(value, depth=0) %}{% if value is mapping %}{% for k, v in value | dictsort %}"
        "{{ '  ' * depth }}{{ k }}:{{ walk(v, depth + 1) }}{% endfor %}{% elif value is string %}{{ value | tojson }}"
        "{% elif value is iterable %}{{ value | list }}{% else %}{{ value }}{% endif %}{% endmacro %}"
        "{% set ns = namespace(text='', items=[]) %}{% for m in messages %}{% set ns.items = ns.items + [m.role] %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 1) %}{% continue %}{% endif %}"
        "{% set ns.text = ns.text + m['content'] | trim + '\\n' %}{% endfor %}{{ ns.text }}"
        "{{ ns.items | groupby(0) | length }}"
        "{% call(up) wrap('b') %}{{ up }}{{ ns.items | join('/') }}{% endcall %}{% filter upper %}abc{% endfilter %}"
        "{% for t in tools or [] recursive %}{{ walk(t) }}{{ t.function.parameters.items() | list }}"
        "{% else %}-{% endfor %}"
        "{% set block %}{{ ns.items[0] }}{% endset %}{{ block ~ 1 ~ none ~ true }}{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 * 'ab' }}"
    ),
    "filters": (
        "{{ 'a\r\nb\n\nc' | indent(2) }}{{ 'a\nb' | indent('> ', true) }}{{ 'a-b' | replace('-', '+') | capitalize }}"
        "{{ [3, 1, 2] | sort | reverse | list }}{{ [[1], [2]] | sum(start=[]) }}{{ [1, 2] | sum }}"
        "{{ ['b', 'A'] | min }}"
        "{{ {'b': 1, 'a': [2, {'c': none}]} | tojson(indent=1, sort_keys=true) }}"
        "{{ '<é>' | tojson(ensure_ascii=true) }}"
        "{{ [1, 2] | tojson(separators=(',', ':')) }}{{ '<' | e }}{{ ('<' | safe) + '<' }}{{ ' x ' | trim }}"
        "{{ 'xyx' | trim('x') }}"
        "{{ none | default('d') }}{{ '' | default('d', true) }}{{ '3.7' | float | int }}"
        "{{ 'a b' | wordcount | string }}"
        "{{ messages | first | items | list }}{{ (messages | last).role | title }}{{ -3 | abs }}{{ 'k' in {'k': 1} }}"
        "{{ messages[0].get('x', 'none') }}{{ messages | length is divisibleby 5 }}{{ 4 is even }}"
        "{{ 'ab'[::-1] }}{{ (1, 2)[1:] }}{{ (1, 2).list is defined }}"
        "{% for group in messages | groupby('role') %}{{ group.grouper }}{{ group.list | length }}{% endfor %}"
    ),
    # A filter that selects yields its values once, and is true even if there are none.
    "generators": (
        "{% set found = messages | selectattr('role', 'eq', 'user') %}{{ found | list | length }}"
        "{{ found | list | length }}"
        "{{ messages | join(', ', attribute='role') }}{{ ['a', 'b'] | join('-') }}{{ [1, 2] | join }}"
        "{% if messages | select('none') %}yes{% endif %}{% for m in messages | map(attribute='role') %}"
        "{{ loop.length }}{{ m }}"
        "{% if not loop.last %},{% endif %}{% endfor %}"
    ),
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


@pytest.mark.parametrize("place", ["messages", "tools"])
@pytest.mark.parametrize(("character", "name"), [("\ufdd0", "FDD0"), ("\ufdd1", "FDD1"), ("\ud800", "D800")])
def test_a_conversation_has_no_marks_of_answers_and_no_lone_surrogates(place: str, character: str, name: str) -> None:
    value = {"role": "user", "content": f"a{character}b"}
    messages, tools = ([value], None) if place == "messages" else (CONVERSATION, [value])
    with pytest.raises(UsageError, match=f"U\\+{name}"):
        ChatTemplate(CHATML).marked(messages, tools)


def test_marks_that_a_template_itself_writes_do_not_appear_in_the_text() -> None:
    nested = "{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}"
    template = ChatTemplate(nested + "{{ '\\ufdd1' }}d{{ '\\ufdd0' }}e")
    assert template.render(CONVERSATION) == template.marked(CONVERSATION)[0] == "abcde"


def test_a_template_that_writes_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TinyLMError, match="surrogates not allowed"):
        ChatTemplate("{{ '\\ud800' }}").render(CONVERSATION)


# Texts that are not a template, with a part of the error.
NOT_TEMPLATES = {
    "{% for %}": "line 1: ",
    "\n\n{{ 'x' | pickle }}": "line 3: No filter named 'pickle'",
    "{% break %}": "'break' outside loop",
    "{% if 1 %}{% continue %}{% endif %}": "'continue' not properly in loop",
    "{% for a in b %}{% macro f() %}{% break %}{% endmacro %}{% endfor %}": "'break' outside loop",
    "{% macro f(a, a) %}{% endmacro %}": "duplicate argument",
    "{{ dict(a=1, a=2) }}": "keyword argument repeated",
    "{{ messages[1:2, 3] }}": "invalid syntax",
    "{{ 1 in [1] in [[1]] }}": "a chain of comparisons with in is not supported",
    "{% include '/etc/passwd' %}": "{% include %} is not supported",
    "{% if 0 %}{% import 'os' as os %}{% endif %}": "{% import %} is not supported",
    "{% from 'os' import system %}": "{% from %} is not supported",
    "{% extends 'x' %}": "{% extends %} is not supported",
    "{% block a %}{% endblock %}": "{% block %} is not supported",
    "{% autoescape true %}{% endautoescape %}": "{% autoescape %} is not supported",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}": "nested too deeply",
    "{{ " + "[" * 150 + "]" * 150 + " }}": "nested",
    "{{ " + "-" * 9000 + "1 }}": "nested too deeply",
    "{{ " + "+".join(["1"] * 9000) + " }}": "nested too deeply",
    "{{ 1" + "|string" * 9000 + " }}": "nested too deeply",
    "{% if 1 %}" * 150 + "{% endif %}" * 150: "too many levels of indentation",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000: "nested too deeply",
    "{% if 0 %}" + "{% elif 0 %}" * 5000 + "{% endif %}": "nested too deeply",
    "{% for a in b %}" * 30 + "{% endfor %}" * 30: "too many statically nested blocks",
    "{% \x1b[31m %}": "unexpected char '\\x1b'",
    "{{ 'x' }}" * 20_000: "can have at most 131072",
}


@pytest.mark.parametrize("source", NOT_TEMPLATES, ids=lambda source: source[:40])
def test_what_cannot_be_compiled_is_an_error_in_one_line(source: str) -> None:
    with pytest.raises(TinyLMError) as info:
        ChatTemplate(source)
    assert NOT_TEMPLATES[source] in str(info.value)
    assert str(info.value).isprintable()


def test_compiling_warns_of_nothing() -> None:
    with pytest.raises(TinyLMError, match="not subscriptable"):  # Python warns when it compiles 1[1:2] and 1()
        ChatTemplate("{{ 1[1:2] }}{{ 1() }}{{ 'a'() }}").render(CONVERSATION)


def test_reasons_are_one_line_of_printable_characters() -> None:
    template = ChatTemplate("{{ raise_exception('a\\nb \\u001b[31m\\u202e' ~ messages[0].content) }}")
    with pytest.raises(UsageError) as refused:
        template.render([{"role": "user", "content": "\x07" + "c" * 999}])
    assert str(refused.value).startswith("The chat template refuses the conversation: a b \\u001b[31m\\u202e\\u0007ccc")
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400
    with pytest.raises(TinyLMError) as failed:
        ChatTemplate("{{ nothing['\\u001b\\n'].x }}").render(CONVERSATION)
    assert str(failed.value).isprintable()


LOOP, END = "{% for i in range(99999) %}", "{% endfor %}"
SPACE = "{% set ns = namespace(x='x', y=[], t=(), d={}) %}"
LONG = "{% set b = 'x' * 1000000 %}{% set c = b ~ 'y' %}{% set d = b ~ 'z' %}"
# Small lists and tuples of many entries that are the same large one, and what reads all of them.
LISTS = SPACE + "".join(f"{{% set ns.{name} = [range(29999) | list] * 149999 %}}" for name in "xy")
TUPLES = SPACE + "{% macro f() %}{% set ns.x = (varargs,) * 149999 %}{% endmacro %}{{ f(*range(29999)) }}"
LIST_USES = (
    *("{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x | tojson(indent=2) }}", "{{ ns.x ~ '' }}", "{{ ns.x | join }}"),
    *("{{ ns.x == ns.y }}", "{{ ns.x in [ns.y] }}", "{{ [ns.x, ns.y] | sort }}", "{{ [ns.x, ns.y] | max }}"),
    *("{{ ns.x | string }}", "{{ ns.x | trim }}", "{{ ns.x is eq(ns.y) }}", "{{ raise_exception(ns.x) }}"),
    *("{{ messages[ns.x].y }}", "{{ [ns.x].index(ns.y) }}", "{{ 'x' | replace('x', ns.x) }}"),
    "{% for i in [ns.x, ns.y] %}{{ loop.changed(i) }}{% endfor %}",
)
TUPLE_USES = (
    *("{{ {ns.x: 1} }}", "{{ messages[0].get(ns.x) }}", "{{ ns.x in messages[0] }}", "{{ dict([(ns.x, 1)]) }}"),
    *("{{ messages[0][ns.x] }}", "{{ [ns.x] | unique | list }}", "{{ ns.x in ns.d.keys() }}"),
)
ATTACKS = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a class by subscript": "{{ ''['__class__']['__mro__'] }}",
    "a class by filter": "{{ [''] | map(attribute='__class__.__mro__') | list }}",
    "a format": "{{ '{0.__class__}'.format(messages) }}",
    "a format of a dict": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a method": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "self": "{{ self._TemplateReference__context }}",
    "a namespace's class": "{{ namespace().__class__.__init__.__globals__ }}",
    "a generic alias": SPACE + "{% for i in range(60) %}{% set ns.x = dict[ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') | length }}",
    "nested loops": LOOP + LOOP + END + END,
    "a loop filter": LOOP + "{% for j in range(99999) if false %}{% endfor %}" + END,
    "loops over characters": LONG + "{% for i in b %}{% for j in b %}{% endfor %}{% endfor %}",
    "a large body": LOOP + "{% if a %}{% endif %}" * 5000 + END,
    "a recursive macro": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(900) }}",
    "exponential calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a wide recursive loop": (
        "{% for a in messages recursive %}{% if loop.depth < 60 %}{{ loop([a, a]) }}{% endif %}{% endfor %}"
    ),
    "a large range": "{% for i in range(1000000000) %}{% endfor %}",
    "a long text": "{{ ('x' * 2000000000) | length }}{{ 'x' * 1000000000000 }}",
    "a doubled text": SPACE + LOOP + "{% set ns.x = ns.x + ns.x %}" + END,
    "a joined text": SPACE + LOOP + "{% set ns.x = ns.x ~ ns.x %}" + END,
    "a captured text": SPACE + LOOP + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}" + END,
    "a literal text, captured": "{% set x %}{% for i in range(50000) %}"
    + "y" * 30000
    + END
    + "{% endset %}{{ x | length }}",
    "a literal text of a macro": (
        "{% macro f() %}" + "y" * 60000 + "{% endmacro %}{% set x %}" + LOOP + "{{ f() }}" + END + "{% endset %}"
    ),
    "many texts": SPACE + LONG + LOOP + "{% set n = namespace(a=ns.x) %}{% set n.b = b[1:] %}{% set ns.x = n %}" + END,
    "many lists": SPACE
    + LOOP
    + "{% set n = namespace(a=ns.x) %}{% set n.b = range(9999) | list %}{% set ns.x = n %}"
    + END,
    "many parts of texts": (
        SPACE
        + "{% set b = '€€,' * 200000 %}"
        + LOOP
        + "{% set n = namespace(a=ns.x) %}{% set n.b = b.split(',') %}{% set ns.x = n %}"
        + END
    ),
    "chained generators": SPACE + (LOOP + "{% set ns.y = ns.y | map('upper') %}" + END) * 2 + "{{ ns.y | list }}",
    "a replaced text": LONG + "{{ b | replace('x', b[:1500]) | length }}",
    "a method that replaces": LONG + "{{ b.replace('', b[:1500]) | length }}",
    "a joined list": LONG + "{{ range(1500) | join(b) | length }}",
    "a method that joins": LONG + "{{ b.join(range(1500) | map('string')) | length }}",
    "a method that joins long texts": LONG + "{{ ''.join([b] * 1500) | length }}",
    "a padded text": "{{ 'x'.ljust(1000000000000) }}{{ 'x'.zfill(1000000000000) }}",
    "a formatted text": "{{ '%1000000000d' % 1 }}",
    "a text formatted by a test": "{{ '%1000000000d' is even }}",
    "a text formatted by a division": "{{ '%1000000000d' is divisibleby 3 }}",
    "an undefined value in a format": "{{ '%1000000000s' % nothing }}",
    "a huge number": "{{ 9 ** (9 ** 9) }}",
    "a squared number": "{% set ns = namespace(n=3) %}" + LOOP + "{% set ns.n = ns.n * ns.n %}" + END,
    "a number of many digits": (
        "{% set n = ('f' * 99999) | int(base=16) %}{% set m = ('e' * 49999) | int(base=16) %}"
        + LOOP
        + "{{ n // m }}"
        + END
    ),
    "an infinite number": "{{ 1e999 }}",
    "an indented text": "{{ ('x\n' * 10000) | indent(1000000000) | length }}",
    "an indented JSON": "{{ messages | tojson(indent=1000000000) }}",
    "long separators": LONG + "{{ (range(1500) | list) | tojson(separators=(b, b)) | length }}",
    "searching for a short text": LONG + "{% set n = 'x' * 90 ~ 'y' %}" + LOOP + "{{ n in b }}" + END,
    "searching from the end": LONG + LOOP + "{{ b.rfind('xy' ~ b[:500000]) }}" + END,
    "splitting from the end": LONG + LOOP + "{{ b.rsplit(sep='xy' ~ b[:500000]) | length }}" + END,
    "stripping many characters": LONG + LOOP + "{{ b.strip('y' * 1000000 ~ 'x') | length }}" + END,
    "trimming many characters": LONG + LOOP + "{{ b | trim('y' * 1000000 ~ 'x') | length }}" + END,
    "searching in a list": LONG + LOOP + "{{ c in [d, d] }}" + END,
    "searching in a range": LOOP + "{{ 'a' in range(99999) }}" + END,
    "equal beginnings": LONG + "{{ ([c] * 99999) | select('equalto', d) | list | length }}",
    "a sum of lists": "{{ ([[1]] * 299999) | sum(start=[]) | length }}",
    "a long attribute": LONG + "{{ range(99999) | sort(attribute=b.replace('x', 'x,')) }}",
    "filters in loops": LOOP + "{{ range(99999) | list | length * 0 }}" + END,
    "selecting nothing": LOOP + "{{ range(99999) | select('string') | first }}" + END,
    "selecting nothing without a test": LOOP + "{{ ([0] * 9999) | select | list | length }}" + END,
    "slices in loops": LONG + LOOP + "{% set x = b[1:] %}" + END,
    "differences of keys": (
        "{% set d = dict((range(9999) | map('string') | list) | groupby(0)) %}"
        + LOOP
        + "{{ d.keys() - d.keys() }}"
        + END
    ),
    "doubled arguments": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}{% endmacro %}"
        "{{ f(60, 1) }}"
    ),
    "deep namespaces": SPACE + LOOP + "{% set ns.x = namespace(x=ns.x) %}" + END,
    "deep tuples": SPACE + LOOP + "{% set ns.t = (ns.t,) %}" + END + "{{ {ns.t: 1} | length }}",
    "a cyclic namespace": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x | tojson }}",
    "batches": "{{ range(99999) | batch(1000000000, 'x') | list | length }}",
    "rounding": "{{ 1.5 | round(1000000000) }}",
    "a date": "{{ strftime_now('%1000000000Y') | length }}{{ strftime_now('%c' * 1000) }}",
    "a slice": "{{ messages[::0] }}",
    "nested lists": SPACE + "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested tuples": SPACE + "{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    "nested dicts": SPACE + "{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x }}",
    "nested namespaces": SPACE
    + "{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    **{f"large lists: {use}": LISTS + use for use in LIST_USES},
    **{f"large tuples: {use}": TUPLES + use for use in TUPLE_USES},
}


PROGRAM = """
import json, resource, sys, time
from tinylm.errors import TinyLMError
from tinylm.text import chat_template

resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
chat_template.MAX_WORK = 10_000_000  # a fifth, to be done sooner
messages, attacks = json.load(sys.stdin)
for name, source in attacks.items():
    start = time.monotonic()
    try:
        text = chat_template.ChatTemplate(source).render(messages)
    except TinyLMError as error:
        text = str(error)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    print(json.dumps([name, text[:1000], time.monotonic() - start, memory]), flush=True)
"""


@pytest.fixture(scope="module")
def attacked() -> dict[str, tuple[str, float, float]]:
    """Of each attack, run in order in a process of their own: text or error, seconds, and MB at the most so far."""
    data = json.dumps([CONVERSATION, {"nothing": ""} | ATTACKS])
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(data, timeout=100)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return {name: tuple(result) for name, *result in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_template_ends_without_effect(name: str, attacked: dict[str, tuple[str, float, float]]) -> None:
    assert name in attacked, "it did not end"
    text, seconds, memory = attacked[name]
    assert text.isprintable() and len(text) < 400
    assert "root" not in text and "class '" not in text  # what is denied is an empty text
    assert seconds < 20
    assert memory < attacked["nothing"][2] + 150


NAMES = st.sampled_from(["ns.x", "ns.x", "ns.y", "messages", "messages[0]", "messages[0].content", "f", "i", "nothing"])
CONSTANTS = st.sampled_from(
    ["0", "1", "-3", "9999", "1.5", "true", "none", "''", "'x'", "'%9999d'", "'é'", "[]", "()", "{}", "1000000000"]
)
METHODS = (
    "join",
    "replace",
    "split",
    "rsplit",
    "strip",
    "rfind",
    "get",
    "items",
    "keys",
    "upper",
    "count",
    "format",
    "x",
)
FILTERS = (
    *("join", "replace", "tojson", "indent", "list", "map", "select", "selectattr", "sort", "unique", "groupby", "sum"),
    *(
        "length",
        "trim",
        "string",
        "upper",
        "reverse",
        "first",
        "items",
        "dictsort",
        "default",
        "int",
        "max",
        "e",
        "safe",
    ),
)
TESTS = ("even", "in", "equalto", "lt", "string", "sequence", "defined", "divisibleby", "lower")
OPERATORS = ("+", "-", "*", "/", "//", "%", "~", "==", "<", "in", "and", "or")


def larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions of others."""
    arguments = st.lists(parts, max_size=2).map(", ".join)
    return st.one_of(
        st.builds("({} {} {})".format, parts, st.sampled_from(OPERATORS), parts),
        st.builds("[{0}, {0}, {1}]".format, parts, parts),
        st.builds("({0}, {0})".format, parts),
        st.builds("{{{}: {}}}".format, parts, parts),
        st.builds("({})[{}]".format, parts, parts),
        st.builds("({})[{}:{}:{}]".format, parts, parts, parts, parts),
        st.builds("({}).{}({})".format, parts, st.sampled_from(METHODS), arguments),
        st.builds("({} | {}({}))".format, parts, st.sampled_from(FILTERS), arguments),
        st.builds("({} is {}({}))".format, parts, st.sampled_from(TESTS), arguments),
        st.builds("({} if {} else {})".format, parts, parts, parts),
        st.builds(
            "{}({})".format, st.sampled_from(["f", "f", "range", "dict", "namespace", "loop", "caller"]), arguments
        ),
        st.builds("f(*({}))".format, parts),
    )


EXPRESSIONS = st.recursive(NAMES | CONSTANTS, larger, max_leaves=4)


def blocks(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Statements around others."""
    return st.one_of(
        st.builds("{}{}".format, parts, parts),
        st.builds("{{% for i in {} %}}{}{{% endfor %}}".format, EXPRESSIONS | st.just("range(9999)"), parts),
        st.builds(
            "{{% for i in {} recursive %}}{}{{{{ loop({}) }}}}{{% endfor %}}".format, EXPRESSIONS, parts, EXPRESSIONS
        ),
        st.builds("{{% for i in {} if {} %}}{}{{% endfor %}}".format, EXPRESSIONS, EXPRESSIONS, parts),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, parts),
        st.builds("{{% macro f(b={}) %}}{}{{% endmacro %}}".format, EXPRESSIONS, parts),
        st.builds("{{% call f({}) %}}{}{{% endcall %}}".format, EXPRESSIONS, parts),
        st.builds("{{% set ns.x %}}{}{{% endset %}}".format, parts),
        st.builds("{{% filter replace('x', {}) %}}{}{{% endfilter %}}".format, EXPRESSIONS, parts),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, parts),
    )


STATEMENTS = st.recursive(
    st.one_of(
        st.builds("{{{{ {} }}}}".format, EXPRESSIONS),
        st.builds("{{% set ns.x = {} %}}".format, EXPRESSIONS),
        st.builds("{{% set ns.y = [ns.y, {}] %}}".format, EXPRESSIONS),
        st.sampled_from(["{% break %}", "{% continue %}", "text", "{% set ns.x = ns.x + ns.x %}", "{% set ns = ns %}"]),
    ),
    blocks,
    max_leaves=6,
)


@settings(max_examples=75)
@given(STATEMENTS, st.integers(0, 2))
def test_any_template_ends_within_its_budget_of_time_and_memory(statements: str, loops: int) -> None:
    macro = "{% macro f(b='x') %}{{ b }}{{ varargs }}{% endmacro %}"
    source = SPACE + macro + LOOP * loops + statements + END * loops + "{{ ns.x }}{{ ns.y | tojson }}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template, "MAX_WORK", 500_000)  # a hundredth
        start = time.monotonic()
        tracemalloc.start()
        try:
            ChatTemplate(source).render(CONVERSATION[:2])
        except TinyLMError as error:
            assert str(error).isprintable()
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert time.monotonic() - start < 10
    assert peak < 50e6


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_budget_is_enough_for_long_conversations(name: str) -> None:
    """Of thousands of messages, and of a message of a million characters."""
    many = [{"role": ("user", "assistant")[i % 2], "content": "a word and another " * (i % 9)} for i in range(2000)]
    long = [*CONVERSATION, {"role": "user", "content": "a word,\nand <another>\n" * 50_000}]
    tools = TOOLS * 20
    for messages in (many, long):
        expected, _ = render_jinja_template(
            [messages], chat_template=TEMPLATES[name], tools=tools, return_assistant_tokens_mask=True, **SPECIAL
        )
        assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, tools) == expected[0]


def test_deeply_nested_data_are_an_error() -> None:
    value: Any = "x"
    for _ in range(10_000):
        value = [value]
    messages = [{"role": "user", "content": "a", "extra": value}]
    assert ChatTemplate("{{ messages[0].content }}").render(messages) == "a"
    for expression in ("messages | tojson", "messages", "m.extra == m.extra[0]", "messages | string | length"):
        with pytest.raises(TinyLMError, match="nested too deeply"):
            ChatTemplate("{% set m = messages[0] %}{{ " + expression + " }}").render(messages)


def test_data_with_the_names_of_methods_and_attributes_are_data() -> None:
    data = {
        "role": "user",
        "content": "a",
        "copy": 1,
        "pop": 2,
        "__class__": 3,
        "format": "4",
        "items": 5,
        "number": 6**999,
    }
    source = "{{ m.copy }}{{ m.pop }}{{ m['__class__'] }}{{ m.format }}{{ m['items'] }}{{ m.items() | list | length }}"
    assert ChatTemplate("{% set m = messages[0] %}" + source).render([data]) == "123458"
    assert json.loads(ChatTemplate("{{ messages | tojson }}").render([data])) == [data]
