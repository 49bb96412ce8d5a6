"""Scored tokens of conversations, compared token by token with transformers and with a reference that decodes."""

import re
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.text.templates import CONVERSATIONS, LLAMA_2, LLAMA_3, QWEN, SPECIAL_TOKENS
from tests.text.test_answer_spans import ANSWERS, chat, conversation
from tinylm.errors import TinyLMError, UsageError
from tinylm.text.answer_spans import ScoredText
from tinylm.text.chat_template import CHATML
from tinylm.text.chat_tokens import CHAT_ENCODING, ChatTokens, encode_example, ids_of
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

TEMPLATES = {"chatml": CHATML, "llama-2": LLAMA_2, "llama-3": LLAMA_3, "qwen": QWEN}
TEXTS = [chat(template).render(conversation(turns)).text for template in ANSWERS for turns in CONVERSATIONS]
TOKENIZERS = {
    "char": train_char("".join(sorted(set("".join(TEXTS)))), SPECIAL_TOKENS),
    "bpe": train_bpe(TEXTS * 3, 340, SPECIAL_TOKENS),
}


def encoded(tokenizer: Tokenizer, template: str, turns: list[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    tokens = ChatTokens(encode_example(chat(template).render(conversation(turns)), tokenizer))
    ids, scored = tokens.tokens(0)
    return ids.tolist(), scored.tolist()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_chatml_is_masked_as_by_transformers(kind: str) -> None:
    library = tokenizers.Tokenizer.from_str(TOKENIZERS[kind].to_str())
    peer = PreTrainedTokenizerFast(tokenizer_object=library, chat_template=CHATML)
    for turns in CONVERSATIONS:
        expected = peer.apply_chat_template(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, scored = encoded(TOKENIZERS[kind], CHATML, turns)
        assert ids == expected["input_ids"]
        assert scored == [bool(one) for one in expected["assistant_masks"]]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_scored_tokens_are_those_whose_text_begins_in_an_answer(kind: str, name: str) -> None:
    """The reference decodes growing prefixes of the ids to find where each token begins."""
    tokenizer, template = TOKENIZERS[kind], TEMPLATES[name]
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    for turns in CONVERSATIONS:
        ids, scored = encoded(tokenizer, template, turns)
        whole = library.decode(ids, skip_special_tokens=False)
        answers = [match.span(1) for match in re.finditer(ANSWERS[template], whole, re.DOTALL)]
        assert len(answers) == sum(turn["role"] == "assistant" for turn in turns)
        for number, flag in enumerate(scored):
            before = library.decode(ids[:number], skip_special_tokens=False).rstrip("\ufffd")
            assert whole.startswith(before)
            assert flag == any(start <= len(before) < stop for start, stop in answers), (number, before)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_are_recognised_as_the_library_does_and_elsewhere_are_text(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    text = "<|im_start|>user\n<|im_start|Hello<|im_end|><s></s>"
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    if kind == "bpe":
        assert tokenizer.encode_with_special(text)[0].tolist() == library.encode(text).ids
    ids, starts = tokenizer.encode_with_special("<|im_start|>a<|im_end|>")
    assert [library.id_to_token(i) for i in ids] == ["<|im_start|>", "a", "<|im_end|>"]
    assert starts.tolist() == [0, 12, 13]
    plain = tokenizer.encode("<|im_start|>")
    assert len(plain) > 1 and tokenizer.decode(plain) == "<|im_start|>"


def test_several_conversations_are_found_in_one_array() -> None:
    examples = [
        ScoredText("Hello<|im_end|>", [range(2, 15)]),
        ScoredText("abc", []),
        ScoredText("a", [range(1)]),  # nothing precedes the only token, so it is not scored
        ScoredText("ab", [range(2)]),
    ]
    tokenizer = TOKENIZERS["char"]
    (batch,) = CHAT_ENCODING.batches(iter(examples), tokenizer)
    assert batch.characters == 15 + 3 + 1 + 2
    codes = CHAT_ENCODING.encode(batch.content, tokenizer)
    tokens = ChatTokens(codes)
    assert tokenizer.decode(ids_of(codes)) == "Helloabcaab"
    assert len(tokens) == 4
    assert tokens.lengths.tolist() == [6, 3, 1, 2]
    assert tokens.first_scored.tolist() == [2, 3, 1, 1]
    assert tokens.n_scored == 5
    assert tokens.unscored == 2
    assert tokens.usable(8).tolist() == [0, 3]
    assert tokens.usable(1).tolist() == [3]
    assert tokens.inputs(4).tolist() == [4, 2, 0, 1]
    assert tokens.tokens(0)[1].tolist() == [False, False, True, True, True, True]
    assert [len(ChatTokens(codes[:0])), ChatTokens(codes[:0]).unscored] == [0, 0]


def test_codes_that_do_not_begin_with_a_conversation_and_characters_without_an_id_are_errors() -> None:
    with pytest.raises(UsageError, match="Unknown characters: 'ß'"):
        TOKENIZERS["char"].encode_with_special("<|im_start|>ß")
    with pytest.raises(TinyLMError, match="damaged"):
        ChatTokens(np.array([8, 9], dtype=np.uint16))
