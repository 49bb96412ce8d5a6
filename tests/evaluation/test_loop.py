"""The evaluation loop, compared with models in float64: on one window per token, and on masked windows."""

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests import reference, reference_parts
from tests.training.trainer_bench import rows_at_most, watched
from tests.variants import randomised, small
from tinylm.errors import TinyLMError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import EvaluationLoss, evaluate_loss
from tinylm.jobs.job import EvaluationTokens, Scoring
from tinylm.jobs.masked.job import masked_evaluation_batches, masked_losses_and_accuracy
from tinylm.objectives.loss import next_token
from tinylm.reporter import LogReporter
from tinylm.text.batches import evaluation_batches
from tinylm.text.tokenizer import train_char
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

CONFIG = small(context=8, dropout=0.5)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 30).astype(np.uint8)


def decoder() -> Decoder:
    return randomised(build_model(CONFIG))


def evaluate(model: Decoder, batch_size: int, stride: int | None) -> EvaluationLoss:
    return evaluate_loss(model, next_token, evaluation_batches(TOKENS, CONFIG.context, batch_size, stride))


def expected_loss(model: Decoder, stride: int) -> float:
    """Token by token: windows start every `stride` tokens, and the first that contains a target scores it."""
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    nats = 0.0
    for token in range(1, len(TOKENS)):
        start = next(s for s in range(0, len(TOKENS), stride) if s <= token - 1 and token <= s + CONFIG.context)
        logits = reference_parts.decoder_logits_with_parts(
            weights, CONFIG, TOKENS[start:token].tolist(), table=np.float32
        )
        nats += reference.cross_entropy(logits[-1:], [int(TOKENS[token])])
    return nats / (len(TOKENS) - 1)


@pytest.mark.parametrize("stride", [8, 5, 1])
def test_the_loss_equals_the_formula_at_every_stride(stride: int) -> None:
    """With a stride of one, every token after the first window is predicted from a full context."""
    model = decoder()
    result = evaluate(model.double(), 3, stride)
    assert result.tokens == len(TOKENS) - 1
    assert result.loss == pytest.approx(expected_loss(model, stride), rel=1e-12)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_if_memory_runs_out_the_same_tokens_are_scored_in_fewer_rows(error: type[BaseException]) -> None:
    model, rows, progress = decoder(), [], []
    numbers = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 100).astype(np.uint8)
    found, expected = (
        evaluate_loss(model, loss, evaluation_batches(numbers, CONFIG.context, 6, 3), progress=progress.append)
        for loss in (rows_at_most(2, rows, error), next_token)
    )
    assert found.tokens == expected.tokens == sum(progress) // 2 == 99
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert rows[:4] == [6, 3, 2, 1]
    assert max(rows[3:]) == 2  # batches that are too large are not tried again


def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_do_unlike_other_errors() -> None:
    message = "Out of memory while evaluating a single sequence; choose a smaller `context`"
    bug = Mock(side_effect=RuntimeError("a bug"))
    for objective, error, match in ((rows_at_most(0, []), TinyLMError, message), (bug, RuntimeError, "a bug")):
        with pytest.raises(error, match=match):
            evaluate_loss(decoder(), objective, evaluation_batches(TOKENS, CONFIG.context, 3))


@pytest.mark.parametrize("training", [True, False])
def test_the_loss_is_the_same_at_any_batch_size_without_dropout_and_the_mode_is_restored(training: bool) -> None:
    model = decoder().train(training)
    for stride in (None, 3):
        losses = [evaluate(model, rows, stride).loss for rows in (1, 2, 7, 100)]
        assert max(losses) - min(losses) < 1e-5
    assert evaluate(model, 4, None).loss == evaluate(model, 4, CONFIG.context).loss
    assert evaluate(model, 4, None).loss != evaluate(model, 4, 3).loss
    assert model.training == training


def test_progress_gets_the_tokens_of_each_batch_and_may_stop_the_evaluation() -> None:
    counts, model, stop = [], decoder().train(), Mock(side_effect=KeyboardInterrupt)
    evaluate_loss(model, next_token, evaluation_batches(TOKENS, 8, 2), progress=counts.append)
    assert counts == [16, 8, 5]
    with pytest.raises(KeyboardInterrupt):
        evaluate_loss(model, next_token, evaluation_batches(TOKENS, 8, 2), progress=stop)
    assert model.training


def test_evaluation_uses_the_given_number_format_and_no_gradients() -> None:
    model, seen = decoder(), []
    objective = watched(lambda m, batch: seen.append((m.logits(torch.ones(1, 16)).dtype, torch.is_grad_enabled())))
    fp32, bf16 = (evaluate_loss(model, objective, evaluation_batches(TOKENS, 8, 2), name) for name in ("fp32", "bf16"))
    assert seen == [(torch.float32, False)] * 3 + [(torch.bfloat16, False)] * 3
    assert 0 < abs(bf16.loss - fp32.loss) < 0.1


def test_perplexity_and_bits_follow_from_the_loss() -> None:
    result = EvaluationLoss(30.0, 20)
    assert (result.loss, result.perplexity) == pytest.approx((1.5, math.e**1.5))
    assert result.bits_per(80) == pytest.approx(30 * math.log2(math.e) / 80)
    assert result.bits_per(0) is None, "control tokens encode no text"
    assert EvaluationLoss(1e6, 1).perplexity == math.inf


def test_the_loss_and_accuracy_of_masked_tokens_equal_their_formulas() -> None:
    config = small(architecture="encoder", context=8, vocab_size=4)
    model = randomised(build_model(config)).double()
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    batches = list(masked_evaluation_batches(np.tile([0, 1, 2], 30), 8, rows=3, mask_id=3, vocab_size=4))
    reporter, text = LogReporter(), EvaluationTokens("text", np.zeros(0))
    scoring = Scoring(model.train(), train_char("ab"), text, EvaluationConfig(), "fp32", reporter)
    found, accuracy = masked_losses_and_accuracy(scoring, iter(batches))
    losses, correct = [], []
    for batch in batches:
        for ids, targets, mask in zip(batch.ids, batch.targets, batch.mask, strict=True):
            logits = reference_parts.encoder_logits(weights, config, ids.tolist(), len(ids), table=np.float32)
            for position in np.flatnonzero(mask):
                losses.append(-reference_parts.log_softmax(logits[position])[targets[position]])
                correct.append(logits[position].argmax() == targets[position])
    assert found.total.tokens == len(losses)
    assert found.total.loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert accuracy == sum(correct) / len(correct)
    assert 0 < accuracy < 1
    assert model.training
