"""Conversations. Reference: what transformers' renderer makes of the same messages, continued greedily or scored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

import tinylm
from tests.formats.peers import CONTEXT, VOCABULARY, save_peer
from tests.text.templates import LLAMA_2
from tinylm.errors import UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.text_generator import ChatSession

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


def test_an_error_of_the_engine_before_the_first_chunk_leaves_the_conversation_unchanged(tmp_path: Path) -> None:
    save_peer("llama", tmp_path / "llama")
    (tmp_path / "llama/chat_template.jinja").write_text(TEMPLATE)
    model = tinylm.load(tmp_path / "llama")
    session = ChatSession(model, model.chat_format(), GenerationConfig(engine="llama.cpp", cache=False))
    for _ in range(2):
        with pytest.raises(UsageError, match="not possible"):
            list(session.ask("hi"))
    assert session.messages == []


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


# Training and evaluation on conversations, with an imported model

GENERATION = LLAMA_2.replace(
    "{{ ' ' + content.strip() + ' ' + eos_token }}",
    "{% generation %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endgeneration %}",
)
RECORDS = [
    {"messages": [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"{i} and the sea"}]}
    for i in range(12)
]
RECORDS[3]["messages"] += [{"role": "user", "content": "Again"}, {"role": "assistant", "content": "The old man"}]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Path]:
    folder = tmp_path / "llama"
    peer = save_peer("llama", folder)
    (folder / "chat_template.jinja").write_text(LLAMA_2)
    return peer, folder


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return file


def test_the_loss_of_answers_is_that_of_the_peer(saved: tuple[Any, Path], chats: Path) -> None:
    peer, folder = saved
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    nats, count = 0.0, 0
    for record in RECORDS:
        encoded = tokenizer.apply_chat_template(
            record["messages"],
            chat_template=GENERATION,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors="pt",
        )
        ids = encoded["input_ids"]
        mask = torch.as_tensor(encoded["assistant_masks"]).view(ids.shape).bool()
        labels = ids.masked_fill(~mask, -100)
        with torch.no_grad():
            logits = peer(ids).logits[0, :-1].double()
        nats += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        count += int(mask.sum())
    result = tinylm.load(folder, dtype="fp32").evaluate(chats)
    assert result.tokens == count
    assert result.loss == pytest.approx(nats / count, rel=1e-5)


def test_adapters_and_full_fine_tuning_take_the_template_of_the_model(saved: tuple[Any, Path], chats: Path) -> None:
    _, folder = saved
    before = tinylm.load(folder).evaluate(chats).loss
    options: dict[str, Any] = {"steps": 10, "lr": 0.01, "eval_every": 5, "show_examples": 1}
    for name, train in (("lora", tinylm.finetune_lora), ("adapter", tinylm.finetune_adapter)):
        result = train(chats, model=folder, out=chats.parent / name, **options)
        adapted = tinylm.load(folder, adapters=[result.run])
        assert adapted.chat_template == LLAMA_2
        assert adapted.evaluate(chats).loss < before
    result = tinylm.train(chats, out=chats.parent / "full", init_from=folder, **options)
    model = result.load()
    assert model.chat_template == LLAMA_2 and model.config.family == "llama"
    assert model.evaluate(chats).loss < before
    assert model.tokenizer.special == tinylm.load(folder).tokenizer.special


def test_chatml_can_be_added_to_an_imported_model(saved: tuple[Any, Path], chats: Path) -> None:
    """Its tokens get rows of the embedding: padding rows where there are enough."""
    _, folder = saved
    shape = tinylm.load(folder).network.embedding.weight.shape
    result = tinylm.train(
        chats, out=chats.parent / "full", init_from=folder, steps=2, chat_template="chatml", eval_every=2
    )
    model = result.load()
    assert model.network.embedding.weight.shape == shape
    ids = model.tokenizer.encode_with_special("<|im_start|>user<|im_end|>")[0]
    assert (ids[0], ids[-1]) == (shape[0] - 8, shape[0] - 7)
    assert ids[-1] in model.tokenizer.stop_ids
