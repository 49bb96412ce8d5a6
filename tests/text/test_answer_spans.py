"""Scored characters of rendered conversations, compared with spans that are found without prefixes or marks."""

import re
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.text.templates import CONVERSATIONS, LLAMA_2, LLAMA_3, QWEN, QWEN_3, SPECIAL, SPECIAL_TOKENS, messages
from tinylm.errors import UsageError
from tinylm.text import answer_spans
from tinylm.text.answer_spans import ChatFormat
from tinylm.text.chat import Conversation
from tinylm.text.chat_template import CHATML, ChatTemplate

# A pattern of the scored text of each format: the answer and its end token.
ANSWERS = {
    CHATML: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
    LLAMA_2: r"\[/INST\]( .*? </s>)",
    LLAMA_3: r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)",
    QWEN: r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)",
}


def chat(template: str, train_on: str = "assistant") -> ChatFormat:
    return ChatFormat(ChatTemplate(template, SPECIAL), SPECIAL_TOKENS, train_on)


def conversation(turns: list[dict[str, Any]]) -> Conversation:
    return Conversation(tuple(turns), location="chat.jsonl, line 7")


@pytest.mark.parametrize("turns", CONVERSATIONS)
@pytest.mark.parametrize("template", ANSWERS)
def test_answers_with_their_end_tokens_are_scored_and_nothing_else(template: str, turns: list[dict[str, Any]]) -> None:
    text, spans = chat(template).render(conversation(turns))
    expected = [match.span(1) for match in re.finditer(ANSWERS[template], text, re.DOTALL)]
    assert [(span.start, span.stop) for span in spans] == expected
    assert len(spans) == sum(turn["role"] == "assistant" for turn in turns)
    assert text == ChatTemplate(template, SPECIAL).render(turns)
    last = chat(template, "last").render(conversation(turns))
    assert last.text == text and last.spans == spans[-1:]
    assert chat(template, "all").render(conversation(turns)) == (text, [range(len(text))])


def test_a_system_turn_that_a_template_adds_is_part_of_the_text_and_not_scored() -> None:
    text, spans = chat(QWEN).render(conversation(CONVERSATIONS[0]))
    assert text.startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHello")
    assert [text[span.start : span.stop] for span in spans] == ["Hi!<|im_end|>"]


def test_tools_are_handed_to_the_template() -> None:
    text, spans = chat(QWEN).render(Conversation(tuple(CONVERSATIONS[0]), ({"name": "add"},)))
    assert text.startswith('<|im_start|>system\n# Tools\n{"name": "add"}<|im_end|>\n<|im_start|>user')
    assert [text[span.start : span.stop] for span in spans] == ["Hi!<|im_end|>"]


def test_a_conversation_without_an_answer_has_no_scored_text_unless_all_is_scored() -> None:
    turns = messages(("user", "Hello"))
    for template in ANSWERS:
        assert chat(template).render(conversation(turns)).spans == []
        assert chat(template, "last").render(conversation(turns)).spans == []
        assert chat(template, "all").render(conversation(turns)).spans != []


def test_a_template_whose_prefixes_do_not_agree_is_refused_with_the_line() -> None:
    with pytest.raises(UsageError, match=r"chat.jsonl, line 7: the chat template renders the beginning") as caught:
        chat(QWEN_3).render(conversation(CONVERSATIONS[2]))
    assert "other messages follow message 2: '<think>" in str(caught.value)
    assert "{% generation %}" in str(caught.value) and "set `train_on` to last, which works here" in str(caught.value)


def test_the_last_answer_is_found_where_only_earlier_ones_change() -> None:
    text, spans = chat(QWEN_3, "last").render(conversation(CONVERSATIONS[2]))
    assert [text[span.start : span.stop] for span in spans] == ["<think>\n\n</think>\n\nf, g<|im_end|>"]


# As in Qwen 3: the reasoning is dropped from answers before the last question. A conversation needs a question.
REASONING = (
    "{%- set found = namespace(last=-1) %}"
    "{%- for m in messages[::-1] %}"
    "{%- if found.last < 0 and m.role == 'user' %}{%- set found.last = messages | length - loop.index %}{%- endif %}"
    "{%- endfor %}"
    "{%- if found.last < 0 %}{{- raise_exception('There is no question.') }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- set content = m.content %}{%- set reasoning = m.reasoning_content or '' %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if m.role == 'assistant' and loop.index0 > found.last and (loop.last or reasoning) %}"
    "{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
THOUGHTS = {
    "no reasoning": [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    "reasoning in the contents": [
        *(("system", "s"), ("user", "a"), ("assistant", "<think>\nx\n</think>\n\nb"), ("user", "c")),
        ("assistant", "<think>\ny\n</think>\n\nd"),
    ],
    "calls of tools": [
        *(("user", "a"), ("assistant", "<think>x</think>b"), ("tool", "c"), ("assistant", "<think>y</think>d")),
    ],
    "a question at the end": [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_the_last_answer_is_found_where_earlier_reasoning_is_dropped(name: str) -> None:
    """Reference: transformers' text of the messages up to the last answer, and a pattern of its answers."""
    turns = messages(*THOUGHTS[name])
    upto = turns[: max(i for i, turn in enumerate(turns) if turn["role"] == "assistant") + 1]
    (expected,), _ = render_jinja_template([upto], chat_template=REASONING)
    text, spans = chat(REASONING, "last").render(conversation(turns))
    assert text == expected
    answers = [match.span(1) for match in re.finditer(ANSWERS[QWEN], expected, re.DOTALL)]
    assert [(span.start, span.stop) for span in spans] == answers[-1:]
    assert text[spans[-1].start :].startswith("<think>\n")


@pytest.mark.parametrize("name", THOUGHTS)
def test_where_only_the_last_answer_can_be_found_the_error_says_so(name: str) -> None:
    turns = messages(*THOUGHTS[name])
    if name == "calls of tools":  # all of them follow the last question
        assert len(chat(REASONING).render(conversation(turns)).spans) == 2
    else:
        with pytest.raises(UsageError, match="set `train_on` to last, which works here, or to all"):
            chat(REASONING).render(conversation(turns))


def test_where_no_answer_can_be_found_the_error_does_not_promise_the_last() -> None:
    template = QWEN.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    for train_on in ("assistant", "last"):
        with pytest.raises(UsageError, match="set `train_on` to all, or use a") as caught:
            chat(template, train_on).render(conversation(CONVERSATIONS[2]))
        assert "works here" not in str(caught.value)


def test_a_generation_prompt_that_the_answer_does_not_begin_with_is_refused() -> None:
    template = QWEN.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    with pytest.raises(UsageError, match=r"line 7: .* message 2 is its answer: '<think>\\n' becomes 'Hi!"):
        chat(template).render(conversation(CONVERSATIONS[0]))


def test_a_refusal_of_the_template_names_the_line() -> None:
    turns = messages(("user", "a"), ("user", "b"))
    with pytest.raises(UsageError, match=r"chat.jsonl, line 7: The chat template refuses .* Roles must alternate"):
        chat(LLAMA_2).render(conversation(turns))


def test_a_template_that_fails_names_the_line() -> None:
    with pytest.raises(UsageError, match=r"chat.jsonl, line 7: The chat template fails"):
        chat("{{ messages[0].content + messages[0].weight }}").render(conversation(CONVERSATIONS[0]))


def test_a_template_that_renders_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="line 7: The chat template renders no text"):
        chat("{% if false %}a{% endif %}").render(conversation(CONVERSATIONS[0]))


def test_the_end_token_of_a_template_is_that_after_its_answers() -> None:
    ends = {CHATML: "<|im_end|>", LLAMA_2: "</s>", LLAMA_3: "<|eot_id|>", QWEN: "<|im_end|>"}
    assert {template: chat(template).end_token for template in ends} == ends
    assert {chat(template).end_text for template in ends} == {None}


def test_without_an_end_token_the_text_after_an_answer_ends_it() -> None:
    lines = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    ends = {CHATML: "<|im_end|>", lines: None, lines.replace("}}", "}}\n## END "): "## END"}
    formats = {template: ChatFormat(ChatTemplate(template), ("</s>",)) for template in ends}
    assert {template: format.end_text for template, format in formats.items()} == ends
    assert {format.end_token for format in formats.values()} == {None}


def test_ordinary_text_is_what_is_between_special_tokens() -> None:
    text = "<|im_start|>user\nHello<|im_end|><|im_end|> </s"
    assert list(chat(CHATML).ordinary_text(text)) == ["user\nHello", " </s"]
    assert list(ChatFormat(ChatTemplate(CHATML)).ordinary_text(text)) == [text]


# An answer that is not scored, between two that are.
WEIGHTS = messages(
    ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"), ("assistant", "f")
)
WEIGHTS = [{**turn, "weight": turn["content"] != "d"} for turn in WEIGHTS]


@pytest.mark.parametrize("template", ANSWERS)
def test_answers_with_the_weight_0_are_context(template: str) -> None:
    text, spans = chat(template).render(conversation(WEIGHTS))
    answers = [range(*match.span(1)) for match in re.finditer(ANSWERS[template], text, re.DOTALL)]
    assert spans == [answers[0], answers[2]]
    assert text == ChatTemplate(template, SPECIAL).render(WEIGHTS)
    everything = chat(template, "all").render(conversation(WEIGHTS))
    assert everything == (text, [range(answers[1].start), range(answers[1].stop, len(text))])
    # The last answer that is scored, without what follows it.
    for turns, count in ((WEIGHTS[:4], 2), (WEIGHTS, 6)):
        last = chat(template, "last").render(conversation(turns))
        assert last.text == ChatTemplate(template, SPECIAL).render(turns[:count])
        assert last.text[last.spans[0].start :].strip().startswith("b" if count == 2 else "f") and len(last.spans) == 1
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


def test_calls_of_tools_are_scored_where_the_template_writes_them() -> None:
    text, spans = chat(WITH_TOOLS).render(Conversation(tuple(CALLS), TOOLS))
    (expected,), _ = render_jinja_template([CALLS], chat_template=WITH_TOOLS, tools=list(TOOLS))
    assert text == expected
    assert [text[span.start : span.stop] for span in spans] == [
        '<call>{"name": "w"}</call><|im_end|>',
        "It is sunny.<|im_end|>",
    ]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_calls_and_tools_that_the_template_does_not_write_are_refused(train_on: str) -> None:
    cases = [
        (CHATML, CALLS, None, "the tool calls of message 2"),
        (CHATML, CALLS, TOOLS, "the tool calls of message 2"),
        (CHATML, CONVERSATIONS[0], TOOLS, "the tools"),
        # Only the last of several calls.
        (
            WITH_TOOLS.replace("m.tool_calls or []", "(m.tool_calls or [])[-1:]"),
            [CALLS[0], {**CALL, "tool_calls": CALL["tool_calls"] * 2}],
            None,
            "the tool calls of message 2",
        ),
    ]
    for template, turns, tools, words in cases:
        asked = Conversation(tuple(turns), tools, "chat.jsonl, line 7")
        with pytest.raises(UsageError, match=rf"line 7: The chat template does not write {words}\."):
            chat(template, train_on).render(asked)
        with pytest.raises(UsageError, match="does not write"):
            chat(template).prompt(asked)


def test_tools_without_a_name_are_left_to_the_template() -> None:
    hosted = ({"type": "web_search"},)
    assert chat(CHATML).render(Conversation(tuple(CONVERSATIONS[0]), hosted)).spans


# Templates that read the first message, as most published ones do, and cannot render a conversation without messages.
READS_FIRST = (
    "{%- if messages[0].role == 'system' %}{{- 'Begin: ' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.mark.parametrize("template", [READS_FIRST, QWEN, CHATML])
def test_a_conversation_may_begin_with_the_assistant(template: str) -> None:
    turns = messages(("assistant", "Good day."), ("user", "Who are you?"), ("assistant", "A clerk."))
    text, spans = chat(template).render(conversation(turns))
    (expected,), _ = render_jinja_template([turns], chat_template=template)
    assert text == expected
    assert [text[span.start : span.stop] for span in spans] == ["Good day.<|im_end|>", "A clerk.<|im_end|>"]


def test_a_first_answer_that_cannot_be_found_is_an_error_that_says_what_works() -> None:
    template = READS_FIRST.replace("{%- if add", "{%- if false and add")  # without a generation prompt
    turns = messages(("assistant", "Good day."), ("user", "Who are you?"), ("assistant", "A clerk."))
    with pytest.raises(UsageError, match="line 7: The beginning of the answer in message 1 cannot be found") as caught:
        chat(template).render(conversation(turns))
    assert "set `train_on` to last, which works here, or to all" in str(caught.value)


def test_conversations_are_rendered_alike_alone_and_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [conversation(turns) for turns in CONVERSATIONS * 5]
    for template in ANSWERS:
        found = list(chat(template).render_each(many))
        assert found == [chat(template).render(one) for one in many[:3]] * 5
        for size in (1, 4):
            monkeypatch.setattr(answer_spans, "BATCH", size)
            assert list(chat(template).render_each(many)) == found
