"""The part of a text that the report scores."""

import numpy as np

from tests.shell import story
from tinylm.evaluation.excerpt import first_bytes, first_pairs
from tinylm.text.tokenizer import train_bpe, train_char

END = 9
PAIRS = np.array([1, END, 2, 2, END, 3, END, 4, END, 5, END, 6, 6, 6])  # the last target has no end


def test_the_first_pairs_are_whole_and_the_last_one_may_lack_its_end() -> None:
    assert first_pairs(PAIRS, END, 1, 100).tolist() == [1, END, 2, 2, END]
    assert first_pairs(PAIRS, END, 2, 100).tolist() == [1, END, 2, 2, END, 3, END, 4, END]
    assert first_pairs(PAIRS, END, 3, 100).tolist() == PAIRS.tolist()
    assert first_pairs(PAIRS, END, 9, 100).tolist() == PAIRS.tolist()


def test_a_pair_beyond_the_limit_of_tokens_is_left_out() -> None:
    assert first_pairs(PAIRS, END, 9, 13).tolist() == [1, END, 2, 2, END, 3, END, 4, END]
    assert first_pairs(PAIRS, END, 9, 7).tolist() == [1, END, 2, 2, END]
    assert first_pairs(PAIRS, END, 9, 4).tolist() == []


def test_tokenizers_score_the_same_text_up_to_one_token() -> None:
    text = story(4000) + " ä"
    characters, bpe = train_char("".join(sorted(set(text)))), train_bpe([text], 400)
    for tokenizer in (characters, bpe):
        tokens = np.asarray(tokenizer.encode(text))
        found = first_bytes(tokenizer, tokens, 1000)
        assert 1000 - 20 <= len(tokenizer.decode(found).encode()) <= 1000
        assert len(tokenizer.decode(tokens[: len(found) + 1]).encode()) > 1000
        assert first_bytes(tokenizer, tokens, 10**6).tolist() == tokens.tolist()
