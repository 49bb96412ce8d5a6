"""Beginnings of conversations, rendered at once: equal to transformers' rendering of each beginning alone."""

import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from jinja2.ext import loopcontrols
from transformers.utils.chat_template_utils import render_jinja_template

from tests.text.templates import LLAMA_3, QWEN, QWEN_3, messages
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat import Conversation
from tinylm.text.chat_template import ChatTemplate
from tinylm.text.template_worker import Renderer, marked_template

HEADS = (
    *("{{ bos_token }}", "{% set list = messages %}", "{{ messages[0].role }}", "{% set x = 'y' %}", "{{ tools }}"),
    "{% if messages[0].role == 'system' %}S{{ messages[1].content }}{% endif %}",
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}",
    "{% if add_generation_prompt %}P{% endif %}",
    *("{{ messages | length }}", "{% set ns.x = messages[1].role %}"),
    "{% for a in [1, 2] %}{{ loop.last }}{% endfor %}",
)
BODIES = (
    *("{{ m.content }}", "<{{ m.role }}>\n", "{% set ns.x = ns.x ~ m.role %}", "{{ ns.x }}", "{{ loop.index }}"),
    *("{% if loop.first %}F{% endif %}", "{% if loop.last %}L{% endif %}", "{{ messages | length }}", "{{ f(m) }}"),
    *("{{ messages[0].role }}", "{{ messages[1].content }}", "{{ messages[-1].role }}", "{{ loop.nextitem.role }}"),
    *("{% if m.content == 'b' %}{% break %}{% endif %}", "{% if loop.index is odd %}{% continue %}{% endif %}"),
    *("{% for c in m.content %}{{ loop.last }}{% endfor %}", "{% set x = m.role %}", "{{ x }}"),
    *("{% for n in messages %}{{ n.role }}{% endfor %}", "{{ raise_exception('no') if m.content == 'c' }}"),
    *("{% if add_generation_prompt %}G{% endif %}", "{% set messages = [] %}", "{% set m = 1 %}", "\ufdd3"),
    *("{% for c in m.content %}{{ messages[2].role }}{% endfor %}", "{{ m == messages[0] }}"),
)
TAILS = (
    *("{% if add_generation_prompt %}<a>\n{% endif %}", "{{ ns.x }}", "{{ x }}", "{{ m }}", "end\n", "{{ f(ns) }}"),
    *("{% if not add_generation_prompt %}E{% else %}{{ ns.x + 'a' }}{% endif %}", "{% set ns.x = 'z' %}", "{{ loop }}"),
    *("{{ messages[0].role }}", "{{ messages[-1].role }}", "{% if messages %}M{% endif %}", "{{ eos_token }}"),
    "{% for m in messages %}{{ m.role }}{% endfor %}",
)
TURNS = messages(
    ("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "a\ufdd3"), ("assistant", "d"), ("user", "c")
)
PREFIXES = [(6, False), *((count, prompt) for count in range(7) for prompt in (True, False))]


def by_transformers(source: str, turns: list[dict[str, Any]], count: int, prompt: bool) -> str | None:
    """The text of the first messages; `None` if the template fails."""
    values: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    values["add_generation_prompt"] = prompt
    try:
        return render_jinja_template([turns[:count]], chat_template=source, **values)[0][0]
    except Exception:
        return None


def rendered(source: str, turns: list[dict[str, Any]]) -> list[str | None]:
    """The same texts from the results of the template's process."""
    values = {"bos_token": "<s>", "eos_token": "</s>", "messages": turns, "tools": None, "documents": None}
    job = {"values": values, "prefixes": PREFIXES, "texts": 99, "characters": 10**6}
    found = Renderer(source, ("", "")).results(job)
    return [found[0][:one] if isinstance(one, int) else one if isinstance(one, str) else None for one in found]


def parts(of: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(of), max_size=3).map("".join)


@settings(max_examples=50)
@given(parts(HEADS), parts(BODIES), parts(TAILS), st.sampled_from(["messages", "list", "messages[1:]", "list if 1"]))
def test_each_beginning_is_what_transformers_renders_for_it_alone(head: str, body: str, tail: str, over: str) -> None:
    macro = "{% set ns = namespace(x='') %}{% macro f(v) %}{% set ns.x = ns.x + '.' %}{{ v.role }}{% endmacro %}"
    source = f"{macro}{head}{{% for m in {over} %}}{body}{{% endfor %}}{tail}"
    for turns in (TURNS, TURNS[:3] + TURNS[4:5] * 3):
        expected = [by_transformers(source, turns, *prefix) for prefix in PREFIXES]
        assert rendered(source, turns) == expected[:1] if expected[0] is None else rendered(source, turns) == expected


DEPENDENT = ("{{ messages | length }}", "{{ loop.last }}", "{{ messages[-1] }}", "{{ messages[1:] }}", "{{ f(loop) }}")


def test_templates_that_write_one_message_after_the_other_are_recognised() -> None:
    environment = Environment(extensions=[loopcontrols])
    plain = LLAMA_3.replace("messages %}", "list %}").replace("{{ bos", "{% set list = messages %}{{ bos")
    for source in (LLAMA_3, plain, QWEN, QWEN_3.replace("and loop.last", "")):
        assert marked_template(environment, source) is not None
    assert marked_template(environment, QWEN_3) is None
    for use in DEPENDENT:
        assert marked_template(environment, f"{{% for m in messages %}}{use}{{% endfor %}}") is None


def test_the_time_for_a_conversation_grows_with_its_length_not_with_the_square() -> None:
    turns = [turn for i in range(2000) for turn in messages(("user", f"Question {i}?"), ("assistant", f"Answer {i}."))]
    start = time.monotonic()
    text, spans = ChatFormat(ChatTemplate(LLAMA_3)).render(Conversation(tuple(turns)))
    assert time.monotonic() - start < 20  # 2,000 messages took 37 s when each beginning was rendered alone
    answers = [text[span.start : span.stop] for span in spans]
    assert answers == [f"Answer {i}.<|eot_id|>" for i in range(2000)]
