"""Conversations with an imported model: the loss that transformers computes under its own mask of the answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tinylm
from tests.formats.peers import save_peer
from tests.text.templates import LLAMA_2

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
    result = tinylm.load(folder).evaluate(chats)
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
