"""Scored characters of rendered conversations, compared with spans that are found without prefixes or marks."""

import re
from dataclasses import replace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.text.corpora import require_errors
from tests.text.templates import CONVERSATIONS, LLAMA_2, LLAMA_3, QWEN, QWEN_3, SPECIAL_TOKENS, compiled, messages
from tinylm.errors import UsageError
from tinylm.text.chat import Conversation
from tinylm.text.chat_format import ChatFormat
from tinylm.text.chat_template import CHATML, ChatTemplate

# A pattern of the scored text of each format: the answer and its end token.
ANSWERS = {
    CHATML: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
    LLAMA_2: r"\[/INST\]( .*? </s>)",
    LLAMA_3: r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    QWEN: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
}


def chat(template: str, train_on: str = "assistant") -> ChatFormat:
    return ChatFormat(compiled(template), SPECIAL_TOKENS, train_on)


def conversation(turns: list[dict[str, Any]]) -> Conversation:
    return Conversation(tuple(turns), location="chat.jsonl, line 7")


@pytest.mark.parametrize("template", ANSWERS)
def test_answers_with_their_end_tokens_are_scored_and_nothing_else(template: str) -> None:
    for turns in (*CONVERSATIONS, messages(("user", "Hello"))):  # the last one has no answer
        text, spans = chat(template).render(conversation(turns))
        expected = [match.span(1) for match in re.finditer(ANSWERS[template], text, re.DOTALL)]
        assert [(span.start, span.stop) for span in spans] == expected
        assert len(spans) == sum(turn["role"] == "assistant" for turn in turns)
        assert text == compiled(template).render(turns)
        assert chat(template, "last").render(conversation(turns)) == (text, spans[-1:])
        assert chat(template, "all").render(conversation(turns)) == (text, [range(len(text))])


def test_the_last_answer_is_found_where_only_earlier_ones_change() -> None:
    text, spans = chat(QWEN_3, "last").render(conversation(CONVERSATIONS[2]))
    assert [text[span.start : span.stop] for span in spans] == ["<think>\n\n</think>\n\nf, g<|im_end|>"]
    followed = [*CONVERSATIONS[2], *messages(("user", "g"))]  # what follows the answer is left out
    assert chat(QWEN_3, "last").render(conversation(followed)) == (text, spans)
    (expected,), _ = render_jinja_template([CONVERSATIONS[2]], chat_template=QWEN_3)
    assert text == expected


# Templates that read the first message, as most published ones do, and cannot render a conversation without messages.
READS_FIRST = (
    "{%- if messages[0].role == 'system' %}{{- 'Begin: ' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
GREETING = messages(("assistant", "Good day."), ("user", "Who are you?"), ("assistant", "A clerk."))


@pytest.mark.parametrize("template", [READS_FIRST, QWEN, CHATML])
def test_a_conversation_may_begin_with_the_assistant(template: str) -> None:
    text, spans = chat(template).render(conversation(GREETING))
    (expected,), _ = render_jinja_template([GREETING], chat_template=template)
    assert text == expected
    assert [text[span.start : span.stop] for span in spans] == ["Good day.<|im_end|>", "A clerk.<|im_end|>"]


def test_a_conversation_whose_answers_cannot_be_found_is_refused_with_its_line_and_what_works() -> None:
    opened = QWEN.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    changed = "the chat template renders the beginning of this conversation differently when "
    works, blocks = (
        "set `train_on` to last, which works here, or to all, or use a",
        "`chat_template` with {% generation %}",
    )
    rows = [
        (QWEN_3, CONVERSATIONS[2], f"{changed}other messages follow message 2: '<think>.*{works} {blocks}"),
        (opened, CONVERSATIONS[2], f"{changed}message 2 .*; set `train_on` to all, or use a {blocks}"),
        (opened, CONVERSATIONS[0], f"{changed}message 2 is its answer: '<think>\\\\n' becomes 'Hi!"),
        (LLAMA_2, messages(("user", "a"), ("user", "b")), "The chat template refuses .* Roles must alternate"),
        ("{{ 'a' + messages[0].weight }}", CONVERSATIONS[0], "The chat template fails"),
        ("{% if false %}a{% endif %}", CONVERSATIONS[0], "The chat template renders no text"),
        # Without a generation prompt.
        (
            READS_FIRST.replace("{%- if add", "{%- if false and add"),
            GREETING,
            f"The beginning of the answer in message 1 cannot be found.*{works}",
        ),
    ]
    require_errors(
        lambda template, turns: chat(template).render(conversation(turns)),
        [(template, turns, f"^chat.jsonl, line 7: {words}") for template, turns, words in rows],
    )
    with pytest.raises(UsageError, match="set `train_on` to all, or use a"):
        chat(opened, "last").render(conversation(CONVERSATIONS[2]))
    # The answers of a preference all count, so that `train_on` is no way out of it.
    answers = replace(conversation(CONVERSATIONS[2]), is_preference=True)
    advised = "found; give the answers before the last one the 'weight' 0, which works here, or use a `chat_template`"
    with pytest.raises(UsageError, match=advised):
        chat(QWEN_3).render(answers)
    weighted = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in answers.messages[:-1]]
    text, spans = chat(QWEN_3).render(replace(answers, messages=(*weighted, answers.messages[-1])))
    assert len(spans) == 1 and answers.messages[-1]["content"] in text[spans[0].start : spans[0].stop]
    with pytest.raises(UsageError, match="found; use a `chat_template` with "):
        chat(opened).render(answers)


def test_an_answer_ends_with_a_special_token_or_with_the_text_after_it() -> None:
    ends = {CHATML: "<|im_end|>", LLAMA_2: "</s>", LLAMA_3: "<|eot_id|>", QWEN: "<|im_end|>"}
    for template, end in ends.items():
        assert (chat(template).end_token, chat(template).end_text) == (end, None), template
    lines = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    texts = {CHATML: "<|im_end|>", lines: None, lines.replace("}}", "}}\n## END "): "## END"}
    for template, text in texts.items():
        format = ChatFormat(ChatTemplate(template), ("</s>",))
        assert (format.end_token, format.end_text) == (None, text), template


# The answer d is not scored.
TURNS = messages(*zip(("user", "assistant") * 3, "abcdef", strict=True))
WEIGHTS = [{**turn, "weight": turn["content"] != "d"} for turn in TURNS]


@pytest.mark.parametrize("template", ANSWERS)
def test_answers_with_the_weight_0_are_context(template: str) -> None:
    text, spans = chat(template).render(conversation(WEIGHTS))
    answers = [range(*match.span(1)) for match in re.finditer(ANSWERS[template], text, re.DOTALL)]
    assert spans == [answers[0], answers[2]]
    assert text == compiled(template).render(WEIGHTS)
    everything = chat(template, "all").render(conversation(WEIGHTS))
    assert everything == (text, [range(answers[1].start), range(answers[1].stop, len(text))])
    # The last answer that is scored, without what follows it.
    for turns, count, answer in ((WEIGHTS[:4], 2, "b"), (WEIGHTS, 6, "f")):
        last = chat(template, "last").render(conversation(turns))
        assert last.text == compiled(template).render(turns[:count])
        assert [last.text[span.start :].strip()[0] for span in last.spans] == [answer]
    unscored = [{**turn, "weight": 0} for turn in WEIGHTS]
    assert chat(template).render(conversation(unscored)).spans == []


# As Hermes and Qwen: tools and calls as JSON.
WITH_TOOLS = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] %}{{- '<call>' + call.function | tojson + '</call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "w"}}]}
CALLS = [*messages(("user", "weather?")), CALL, *messages(("tool", "sunny"), ("assistant", "It is sunny."))]
TOOLS = ({"type": "function", "function": {"name": "weather"}},)


def test_calls_and_tools_are_scored_where_the_template_writes_them_and_else_refused() -> None:
    text, spans = chat(WITH_TOOLS).render(Conversation(tuple(CALLS), TOOLS))
    (expected,), _ = render_jinja_template([CALLS], chat_template=WITH_TOOLS, tools=list(TOOLS))
    assert text == expected
    assert [text[span.start : span.stop] for span in spans] == [
        '<call>{"name": "w"}</call><|im_end|>',
        "It is sunny.<|im_end|>",
    ]
    last_call = WITH_TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[-1:]")
    two_calls = [CALLS[0], {**CALL, "tool_calls": CALL["tool_calls"] * 2}]
    rows = [
        (CHATML, CALLS, None, "the tool calls of message 2"),
        (CHATML, CALLS, TOOLS, "the tool calls of message 2"),
        (CHATML, CONVERSATIONS[0], TOOLS, "the tools"),
        (last_call, two_calls, None, "the tool calls of message 2"),
    ]

    def render(template: str, turns: list[dict[str, Any]], tools: Any, train_on: str) -> object:
        asked = Conversation(tuple(turns), tools, "chat.jsonl, line 7")
        return chat(template, train_on).render(asked) if train_on else chat(template).prompt(asked)

    require_errors(
        render,
        [
            (*row[:3], train_on, rf"{'line 7: ' if train_on else ''}The chat template does not write {row[3]}\.")
            for row in rows
            for train_on in ("assistant", "last", "all", "")
        ],
    )
    hosted = ({"type": "web_search"},)  # a tool without a name is left to the template
    assert chat(CHATML).render(Conversation(tuple(CONVERSATIONS[0]), hosted)).spans


def test_conversations_are_rendered_alike_alone_and_in_batches() -> None:
    many = [conversation(turns) for turns in CONVERSATIONS * 100]  # more than a batch
    for template in ANSWERS:
        found = list(chat(template).render_each(many))
        assert found == [chat(template).render(one) for one in many[:3]] * 100


def test_each_answer_of_a_long_conversation_is_found() -> None:
    turns = [turn for i in range(250) for turn in messages(("user", f"Question {i}?"), ("assistant", f"Answer {i}."))]
    text, spans = chat(LLAMA_3).render(conversation(turns))
    assert [text[span.start : span.stop] for span in spans] == [f"Answer {i}.<|eot_id|>" for i in range(250)]
