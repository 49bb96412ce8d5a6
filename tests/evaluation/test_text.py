"""Evaluation of texts; tests/commands/test_evaluate.py compares the metrics with references."""

import numpy as np

from tests.variants import small
from tinylm.evaluation.baselines import baseline_bits_per_byte
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.text import evaluate_text
from tinylm.model.build import build_model
from tinylm.reporter import LogReporter
from tinylm.text.corpus_loading import EvaluationTokens
from tinylm.text.tokenizer import Tokenizer, train_char


def test_a_text_of_control_tokens_has_a_loss_but_no_bits_per_character_and_no_baselines() -> None:
    tokenizer: Tokenizer = train_char("abc")
    ends = np.full(4, tokenizer.encode_with_special(tokenizer.special.end_of_text)[0][0])
    model = build_model(small(vocab_size=tokenizer.vocab_size))
    result = evaluate_text(model, tokenizer, EvaluationTokens("text", ends), EvaluationConfig(), "fp32", LogReporter())
    assert result.loss > 0 and (result.tokens, result.characters, result.bytes) == (3, 0, 0)
    assert not {"bits_per_character", "bits_per_byte"} & result.to_json().keys()
    assert baseline_bits_per_byte(tokenizer, ends, ends, LogReporter()) == {}
