"""Evaluation of texts, and the part of a text that is scored. tests/commands/test_evaluate.py compares the metrics."""

import numpy as np

from tests.shell import story
from tests.variants import small
from tinylm.evaluation.baselines import baseline_bits_per_byte
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.excerpt import first_bytes, first_pairs
from tinylm.evaluation.text import evaluate_text
from tinylm.model.build import build_model
from tinylm.reporter import LogReporter
from tinylm.text.corpus_loading import EvaluationTokens
from tinylm.text.tokenizer import train_bpe, train_char


def test_a_text_of_control_tokens_has_a_loss_but_no_bits_per_character_and_no_baselines() -> None:
    tokenizer = train_char("abc")
    ends = np.full(4, tokenizer.end_of_text_id)
    model = build_model(small(vocab_size=tokenizer.vocab_size))
    result = evaluate_text(model, tokenizer, EvaluationTokens("text", ends), EvaluationConfig(), "fp32", LogReporter())
    assert result.loss > 0 and (result.tokens, result.characters, result.bytes) == (3, 0, 0)
    assert not {"bits_per_character", "bits_per_byte"} & result.to_json().keys()
    assert baseline_bits_per_byte(tokenizer, ends, ends, LogReporter()) == {}


END = 9
PAIRS = np.array([1, END, 2, 2, END, 3, END, 4, END, 5, END, 6, 6, 6])  # the last target has no end


def test_the_first_pairs_are_whole_within_the_limits_and_the_last_one_may_lack_its_end() -> None:
    expected = {(1, 100): 5, (2, 100): 9, (3, 100): 14, (9, 100): 14, (9, 13): 9, (9, 7): 5, (9, 4): 0}
    found = {limits: first_pairs(PAIRS, END, *limits).tolist() for limits in expected}  # by pairs and tokens
    assert found == {limits: PAIRS[:length].tolist() for limits, length in expected.items()}


def test_tokenizers_score_the_same_text_up_to_one_token() -> None:
    text = story(4000) + " ä"
    for tokenizer in (train_char("".join(sorted(set(text)))), train_bpe([text], 400)):
        tokens = np.asarray(tokenizer.encode(text))
        found = first_bytes(tokenizer, tokens, 1000)
        assert 1000 - 20 <= len(tokenizer.decode(found).encode()) <= 1000
        assert len(tokenizer.decode(tokens[: len(found) + 1]).encode()) > 1000
        assert first_bytes(tokenizer, tokens, 10**6).tolist() == tokens.tolist()
