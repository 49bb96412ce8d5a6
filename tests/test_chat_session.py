"""Conversations. Reference: the text that transformers' renderer makes of the same messages, continued greedily."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import render_jinja_template

import tinylm
from tests.formats.peers import CONTEXT, VOCABULARY, save_peer
from tinylm.chat_session import ChatSession
from tinylm.errors import UsageError
from tinylm.generation.generation_config import GenerationConfig

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
GREEDY = GenerationConfig(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, tinylm.Model]:
    """A peer and the same model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "llama"
    peer = save_peer("llama", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return peer, tinylm.load(folder)


@torch.no_grad()
def greedy_answer(peer: Any, model: tinylm.Model, messages: list[dict[str, str]]) -> str:
    (text,), _ = render_jinja_template([messages], chat_template=TEMPLATE, add_generation_prompt=True)
    ids: list[int] = []
    for part in text.split("</s>"):
        ids += [*model.encode(part), 1]
    ids = ids[:-1]
    answer: list[int] = []
    while len(answer) < GREEDY.max_tokens:
        logits = peer(torch.tensor([[*ids, *answer]])).logits[0, -1, : VOCABULARY - 8]
        if int(logits.argmax()) == 1:
            break
        answer.append(int(logits.argmax()))
    return model.decode(answer)


def test_each_answer_continues_the_whole_conversation(loaded: tuple[Any, tinylm.Model]) -> None:
    peer, model = loaded
    session = ChatSession(model, model.chat_format(), GREEDY, system="x")
    messages = [{"role": "system", "content": "x"}]
    for question in ("hi", "you"):
        messages.append({"role": "user", "content": question})
        expected = greedy_answer(peer, model, messages)
        assert "".join(session.ask(question)) == expected
        messages.append({"role": "assistant", "content": expected})
    assert session.transcript() == messages
    session.reset()
    assert session.transcript() == messages[:1]


def test_the_oldest_turns_are_dropped_and_the_system_message_is_kept(loaded: tuple[Any, tinylm.Model]) -> None:
    peer, model = loaded
    session = ChatSession(model, model.chat_format(), GREEDY, system="s")
    questions = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    for question in questions:
        answer = "".join(session.ask(question))
    assert session.dropped in (2, 4) and len(session.messages) == 6
    kept = [*session.transcript()[:1], *session.messages[session.dropped : -1]]
    assert answer == greedy_answer(peer, model, kept)


def test_a_question_longer_than_the_context_changes_nothing(loaded: tuple[Any, tinylm.Model]) -> None:
    _, model = loaded
    assert model.chat_format().end_token == "</s>"
    session = ChatSession(model, model.chat_format(), GREEDY)
    with pytest.raises(UsageError, match=f"the context of {CONTEXT}"):
        session.ask("a b c d " * 50)
    assert session.messages == []


def test_an_answer_that_is_left_early_is_kept_as_far_as_it_was_read(loaded: tuple[Any, tinylm.Model]) -> None:
    _, model = loaded
    session = ChatSession(model, model.chat_format(), GREEDY)
    answer = session.ask("hi")
    first = next(answer)
    answer.close()
    assert session.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first}]


def test_a_model_without_a_template_says_what_to_give(run: Path) -> None:
    with pytest.raises(UsageError, match="chat_template"):
        tinylm.load(run).chat_format()
