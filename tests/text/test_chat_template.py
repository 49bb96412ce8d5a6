"""Chat templates: equal to transformers' rendering, and harmless if they are hostile."""

import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.text.templates import LLAMA_2, LLAMA_3, QWEN, QWEN_3, SPECIAL
from tinylm.errors import TinyLMError, UsageError
from tinylm.text import chat_template, template_worker
from tinylm.text.chat import Conversation
from tinylm.text.chat_format import ChatFormat, ScoredText
from tinylm.text.chat_template import CHATML, ChatTemplate, RenderJob, text_of, unmarked

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
    # A namespace, a macro, slices, loop variables, tests, and tools as JSON.
    "tools": (
        "{% macro head(role) %}<|{{ role }}|>{% endmacro %}{% set ns = namespace(n=0) %}"
        "{% if tools %}{{ tools | tojson(indent=2) }}\n{% endif %}"
        "{% for m in messages[1:] %}{% set ns.n = ns.n + 1 %}{{ head(m.role) }}{{ ns.n }}/{{ loop.length }}"
        "{% if loop.last and not m.tool_calls is defined %}!{% endif %}{{ m.content }}"
        "{% if loop.index > 4 %}{% break %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"
    ),
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
    # What Jinja's sandbox allows beyond what published templates commonly use.
    "formats": (
        "{{ '%5.1f|%s' | format(3.14159, 'x') }}{{ '%d of %s' % (3, 'é') }}{{ '{:>5}{a}'.format('r', a=1) }}"
        "{{ 3.14159 | round(2) }}{{ 2.5 | round(method='ceil') | int }}{{ 'a b/ü' | urlencode }}{{ 'a'.zfill(3) }}"
        "{{ 2 ** 3 }}{{ 'x'.ljust(3) ~ 'x'.center(4) }}|{{ {'b': 1} | pprint }}{{ 123456 | filesizeformat }}"
        "{{ 'a b c' | truncate(4) }}{{ 'a long text' | wordwrap(4) }}{{ '<b>a &amp; b</b>' | striptags }}"
        "{{ 'a b' | wordcount }}{{ range(5) | batch(2) | list }}{{ range(4) | slice(2) | list }}"
        "{{ {'class': 'x'} | xmlattr }}{{ 'a'.encode() }}{{ dict.fromkeys(['a'], 1) }}{{ namespace(a=1, self=2).self }}"
        "{{ messages | map('upper') | list | length }}{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}"
        "{{ 'é' | tojson }}{{ (1.5, none, true) | tojson }}{{ lipsum(n=1, min=3, max=4) | length > 3 }}"
        "{% block a %}{{ 1 }}{% endblock %}{% autoescape true %}{{ '<' }}{% endautoescape %}"
        "{{ strftime_now('%Y') | length }}{{ 1 in [1] in [[1]] }}{{ 'a' if nothing else 'b' }}"
    ),
}


def by_transformers(
    template: str, turns: list[dict[str, Any]] = CONVERSATION, **options: Any
) -> tuple[str, list[tuple[int, int]]]:
    texts, spans = render_jinja_template(
        [turns], chat_template=template, return_assistant_tokens_mask=True, **SPECIAL, **options
    )
    return texts[0], [tuple(span) for span in spans[0]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_transformers_does(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    for tools in (None, TOOLS):
        for prompt in (False, True):
            expected, _ = by_transformers(TEMPLATES[name], tools=tools, add_generation_prompt=prompt)
            assert template.render(CONVERSATION, tools, add_generation_prompt=prompt) == expected


def test_each_beginning_is_what_transformers_renders_for_it_alone() -> None:
    """Also where the text changes when messages follow, as that of the last of them, or where a beginning fails."""
    prefixes = [(5, False), *((count, prompt) for count in range(6) for prompt in (True, False))]
    for source in (*TEMPLATES.values(), LLAMA_2, LLAMA_3, QWEN, QWEN_3):
        (found,) = ChatTemplate(source, SPECIAL).render_each([RenderJob(CONVERSATION, None, prefixes)])
        for rendering, (count, prompt) in zip(found, prefixes, strict=True):
            try:
                expected, _ = by_transformers(source, CONVERSATION[:count], add_generation_prompt=prompt)
            except Exception:
                assert isinstance(rendering, TinyLMError)
            else:
                assert unmarked(text_of(rendering, first=str(found[0])))[0] == expected


def marked(source: str, turns: list[dict[str, Any]], tools: Any = None) -> ScoredText:
    return ChatFormat(ChatTemplate(source)).render(Conversation(tuple(turns), tools))


def test_chatml_is_the_published_format_and_marks_each_answer_with_its_end() -> None:
    text, spans = marked(CHATML, CONVERSATION[1:3])
    assert text == "<|im_start|>user\nHello <b>\n\n  you<|im_end|>\n<|im_start|>assistant\n Hi! <|im_end|>\n"
    assert [text[span.start : span.stop] for span in spans] == [" Hi! <|im_end|>"]
    expected_text, expected_spans = by_transformers(CHATML)
    text, spans = marked(CHATML, CONVERSATION)
    assert (text, [(span.start, span.stop) for span in spans]) == (expected_text, expected_spans)


def test_marks_that_a_template_writes_do_not_appear_and_those_of_a_conversation_are_refused() -> None:
    nested = "{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}"
    template = ChatTemplate(nested + "{{ '\\ufdd1' }}d{{ '\\ufdd0' }}e")
    assert (
        template.render(CONVERSATION) == ChatFormat(template).render(Conversation(tuple(CONVERSATION))).text == "abcde"
    )
    for character, name in (("\ufdd0", "FDD0"), ("\ufdd1", "FDD1"), ("\ud800", "D800")):
        value = {"role": "user", "content": f"a{character}b"}
        for messages, tools in (([value], None), (CONVERSATION, [value])):
            with pytest.raises(UsageError, match=f"U\\+{name}"):
                marked(CHATML, messages, tools)
    for source, name in (("{{ '\\ud800' }}", "D800"), ("{{ '\\ufdd0' }}", "FDD0")):
        with pytest.raises(TinyLMError, match=rf"writes U\+{name}, which is not a character"):
            ChatTemplate(source).render(CONVERSATION)


# Texts that cannot be compiled, with a part of the error.
NOT_TEMPLATES = {
    "{% for %}": "line 1: ",
    "\n\n{{ 'x' | pickle }}": "line 3: No filter named 'pickle'",
    "{% break %}": "'break' outside loop",
    "{{ dict(a=1, a=2) }}": "keyword argument repeated",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}": "nested too deeply",
    "{{ " + "+".join(["a"] * 9000) + " }}": "nested too deeply",
    "{% if 1 %}" * 150 + "{% endif %}" * 150: "too many levels of indentation",
    "{% \x1b[31m %}": "unexpected char '\\x1b'",
    "{{ 9 ** (9 ** 9) }}": "it computes for more than 0 s",  # by Jinja's optimizer
    "{{ 'x' }}" * 20_000: "can have at most 131072",
}


def test_what_cannot_be_compiled_and_reasons_are_one_line_that_is_printable() -> None:
    for source, words in NOT_TEMPLATES.items():
        with pytest.raises(TinyLMError) as info:
            ChatTemplate(source, seconds=0.4).render(CONVERSATION)
        assert words in str(info.value), source[:40]
        assert str(info.value).isprintable(), source[:40]
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
LONG = "{% set b = 'x' * 1000000 %}"
ATTACKS = {
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a class by subscript": "{{ ''['__class__']['__mro__'] }}",
    "a class by filter": "{{ [''] | map(attribute='__class__.__mro__') | list }}",
    "a class by a filter of attributes": "{{ '' | attr('__class__') | attr('__mro__') }}",
    "a format": "{{ '{0.__class__}'.format(messages) }}",
    "a format that is called later": "{{ ['{0.__class__}'.format] | map('call', messages) | list }}",
    "a format of a dict": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a method": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "self": "{{ self._TemplateReference__context }}",
    "a namespace's class": "{{ namespace().__class__.__init__.__globals__ }}",
    "a namespace with hidden entries": "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}{{ os }}",
    "a change of the conversation": "{{ messages.append(1) }}",
    "bytes": "{{ (1).to_bytes(100000000000, 'big') | length }}",
    "nested loops": LOOP + LOOP + END + END,
    "exponential calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive macro": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(900) }}",
    "a recursive loop": "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "a large range": "{% for i in range(1000000000) %}{% endfor %}",
    "a long text": "{% set n = 100000000000 %}{{ ('x' * n) | length }}",
    "a doubled text": SPACE + LOOP + "{% set ns.x = ns.x + ns.x %}" + END,
    "a captured text": SPACE + LOOP + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}" + END,
    "many lists": SPACE + LOOP + "{% set n = namespace(a=ns.x, b=range(9999) | list) %}{% set ns.x = n %}" + END,
    "a text without end": LONG + LOOP + "{{ b }}" + END,
    "a replaced text": LONG + "{{ b | replace('x', b) | length }}",
    "a padded text": "{{ 'x'.ljust(100000000000) }}",
    "a formatted text": "{% set n = 1 %}{{ '%100000000000d' % n }}",
    "a format of width": "{{ '{:>100000000000}'.format(1) }}",
    "a huge number": "{% set n = 9 %}{{ n ** (n ** n) }}",
    "a squared number": "{% set ns = namespace(n=3) %}" + LOOP + "{% set ns.n = ns.n * ns.n %}" + END,
    "an indented JSON": "{{ messages | tojson(indent=100000000000) }}",
    "searching from the end": LONG + LOOP + "{{ b.rfind('xy' ~ b[:500000]) }}" + END,
    "deep tuples": SPACE + LOOP + "{% set ns.t = (ns.t,) %}" + END + "{{ {ns.t: 1} | length }}",
    "a cyclic namespace": "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns.x }}{{ ns.x | tojson }}",
    "batches": "{{ range(99999) | batch(100000000000, 'x') | list | length }}",
    "a date": "{{ strftime_now('%1000000000Y') | length }}",
    "a slice": "{{ messages[::0] }}",
    "nested lists": SPACE + "{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested dicts": SPACE + "{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x }}",
}


@pytest.mark.slow
def test_a_hostile_template_ends_without_effect() -> None:
    """All run in one process, which prints each name, its text or error, the seconds, and the most memory so far."""
    program = """
import json, resource, sys, time
from tinylm.errors import TinyLMError
from tinylm.text.chat_template import ChatTemplate

messages, attacks = json.load(sys.stdin)
for name, source in attacks.items():
    start = time.monotonic()
    try:
        text = ChatTemplate(source, seconds=0.2).render(messages)
    except TinyLMError as error:
        text = str(error)
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    print(json.dumps([name, text[:1000], time.monotonic() - start, memory]), flush=True)
"""
    data = json.dumps([CONVERSATION, {"nothing": ""} | ATTACKS])
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, input=data, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    results = {name: result for name, *result in map(json.loads, done.stdout.splitlines())}
    assert set(results) == {"nothing", *ATTACKS}
    wrong = [
        f"{name}: {result}"
        for name, result in results.items()
        for text, seconds, memory in [result]
        if not text.isprintable()
        or len(text) >= 400
        or "root" in text
        or "class '" in text  # what is denied is an empty text
        or seconds >= 20
        or memory >= template_worker.MEMORY / 1e6
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
def test_a_template_that_escaped_from_the_sandbox_could_open_no_file_and_see_no_environment() -> None:
    program = """
import os, sys
sys.path += sys.argv[1:]
from tinylm.text.template_worker import lock_down
print([name for name in ("torch", "numpy", "tokenizers") if name in sys.modules])
import socket
lock_down()
print(dict(os.environ))
for act in (lambda: open("/etc/passwd"), lambda: open("new", "w"), socket.socket, os.pipe):
    try: print(act())
    except OSError as error: print(error.errno)
"""
    command = [sys.executable, "-I", "-S", "-c", program, *filter(None, sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"TOKEN": "secret"})
    assert done.stdout.split() == ["[]", "{}", *[str(errno.EMFILE)] * 4]


def test_the_process_starts_with_the_first_text_and_ends_with_the_template() -> None:
    template = ChatTemplate(CHATML)
    assert template._process is None
    first = template.render(CONVERSATION)
    child = template._process._child
    assert template.render(CONVERSATION) == first and template._process._child is child
    child.kill()
    child.wait()
    assert template.render(CONVERSATION) == first  # in a new process
    child = template._process._child
    del template
    gc.collect()
    assert child.returncode is not None


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interrupted_rendering_does_not_answer_the_next_one() -> None:
    template = ChatTemplate("{% if messages[0].content == 'a' %}" + LOOP + LOOP + END + END + "{% endif %}b")
    a, b = ([{"role": "user", "content": content}] for content in "ab")
    assert template.render(b) == "b"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        template.render(a)
    signal.signal(signal.SIGINT, before)
    assert template.render(b) == "b"


PARENT = """
import signal, sys, time
from tinylm.text.chat_template import CHATML, ChatTemplate
if sys.argv[1] == "ignored":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
template = ChatTemplate(CHATML)
template.render([])
print(template._process._child.pid, flush=True)
if sys.argv[1] != "exit": time.sleep(60)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("end", ["exit", "ignored", "kill"])
def test_the_process_ends_with_its_parent_even_if_that_is_killed(end: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, end], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if end != "exit":
            parent.kill()
        parent.wait(60)
    for _ in range(600):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 0)
            if Path(f"/proc/{child}/stat").exists() and Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
                return  # not yet reaped by process 1
            time.sleep(0.1)
            continue
        return
    pytest.fail("the process is still there")


@pytest.mark.parametrize("name", ["collected", "filters", "thinking"])
def test_the_limits_are_enough_for_long_conversations(name: str) -> None:
    """Of thousands of messages, and of a message of a million characters."""
    many = [{"role": ("user", "assistant")[i % 2], "content": "a word and another " * (i % 9)} for i in range(2000)]
    long = [*CONVERSATION, {"role": "user", "content": "a word,\nand <another>\n" * 50_000}]
    for messages in (many, long):
        (expected,), _ = render_jinja_template([messages], chat_template=TEMPLATES[name], tools=TOOLS * 20, **SPECIAL)
        assert ChatTemplate(TEMPLATES[name], SPECIAL).render(messages, TOOLS * 20) == expected


def test_the_time_for_the_beginnings_of_a_conversation_grows_with_their_messages_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def job(messages: int) -> RenderJob:
        beginnings = [(count, False) for count in range(messages, 0, -1)]
        return RenderJob([{"role": "user", "content": "a"}] * messages, None, beginnings)

    def limit(messages: int) -> float:
        request = ChatTemplate(CHATML)._request(job(messages))
        assert not isinstance(request, TinyLMError)
        return request.seconds

    for messages in (1, 100, 1000, 6000):
        assert limit(messages) > 2 * 13e-6 * messages * (messages + 1) / 2, messages  # twice the slowest of TEMPLATES
    assert 600 < limit(10_000) < limit(40_000) < 630  # what is added for the bytes grows on
    monkeypatch.setattr(chat_template, "MAX_SECONDS_OF_PREFIXES", 0.2)
    ((failed,),) = ChatTemplate(LOOP + LOOP + END + END, seconds=0.2).render_each([job(2000)])
    assert "computes for more than" in str(failed)


def test_a_batch_with_a_hostile_rendering_gives_the_others_and_one_error() -> None:
    source = "{% if messages[0].content == 'x' %}" + LOOP + LOOP + END + END + "{% endif %}a"
    template = ChatTemplate(source, seconds=0.4)
    jobs = [RenderJob([{"role": "user", "content": text}], None, [(1, False)]) for text in "axa"]
    assert [next(iter(found)) for found in template.render_each([jobs[0], jobs[2]])] == ["a", "a"]
    first, failed, last = (found[0] for found in template.render_each(jobs))
    assert (first, last) == ("a", "a") and "computes for more than" in str(failed)
    with pytest.raises(TinyLMError, match="it renders too long a text"):
        ChatTemplate(LONG + LOOP + "{{ b }}" + END).render(CONVERSATION)


def test_data_have_any_names_and_are_an_error_if_they_are_deeply_nested() -> None:
    data = {"role": "user", "content": "a", "__class__": 3, "number": 6**999, "keys": "4"}
    source = "{% set m = messages[0] %}{{ m['__class__'] }}{{ m['keys'] }}{{ m.keys() | list | length }}"
    assert ChatTemplate(source).render([data]) == "345"
    assert json.loads(ChatTemplate("{{ messages | tojson }}").render([data])) == [data]
    value: Any = "x"
    for _ in range(10_000):
        value = [value]
    with pytest.raises(UsageError, match="nested too deeply"):
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "a", "extra": value}])
