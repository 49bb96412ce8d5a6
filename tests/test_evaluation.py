"""Judge: the float64 models of reference*.py, given the window that the documentation promises."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import reference, reference_parts
from tests.variants import randomised, small
from tinylm.errors import TinyLMError
from tinylm.evaluation import Score, evaluate, evaluate_guesses
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.objective import LanguageModel, Loss, next_token
from tinylm.text.dataset import Batch, evaluation_batches
from tinylm.text.masking import masked_evaluation_batches

CONFIG = small(context=8, dropout=0.5)
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 30).astype(np.uint8)


def decoder() -> Decoder:
    return randomised(build_model(CONFIG))


def scored(model: Decoder, batch_size: int, stride: int | None) -> Score:
    return evaluate(model, next_token, evaluation_batches(TOKENS, CONFIG.context, batch_size, stride))


def expected_loss(model: Decoder, stride: int) -> float:
    """Token by token: windows start every `stride`, and the first that reaches a token scores it."""
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    nats = 0.0
    for token in range(1, len(TOKENS)):
        start = next(s for s in range(0, len(TOKENS), stride) if s <= token - 1 and token <= s + CONFIG.context)
        logits = reference.decoder_logits(weights, CONFIG, TOKENS[start:token].tolist(), table=np.float32)
        nats += reference.cross_entropy(logits[-1:], [int(TOKENS[token])])
    return nats / (len(TOKENS) - 1)


@pytest.mark.parametrize("stride", [8, 5, 1])
def test_the_loss_is_the_formula_at_every_stride(stride: int) -> None:
    """A stride of one predicts every token from all of a full context."""
    model = decoder()
    score = scored(model.double(), 3, stride)
    assert score.tokens == len(TOKENS) - 1
    assert score.loss == pytest.approx(expected_loss(model, stride), rel=1e-12)


class SmallMemory:
    """An objective that is out of memory for more than `most` rows."""

    def __init__(self, most: int, error: type[BaseException] = torch.OutOfMemoryError) -> None:
        self.most, self.error = most, error
        self.rows: list[int] = []

    def __call__(self, model: LanguageModel, batch: Batch) -> Loss:
        self.rows.append(len(batch))
        if len(batch) > self.most:
            raise self.error("CUDA out of memory.")
        return next_token(model, batch)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_the_same_tokens_are_scored_in_fewer_rows(error: type[BaseException]) -> None:
    model, narrow = decoder(), SmallMemory(2, error)
    numbers = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 100).astype(np.uint8)
    progress: list[int] = []
    found = evaluate(model, narrow, evaluation_batches(numbers, CONFIG.context, 6, 3), progress=progress.append)
    expected = evaluate(model, next_token, evaluation_batches(numbers, CONFIG.context, 6, 3))
    assert found.tokens == expected.tokens == sum(progress) == 99
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert narrow.rows[:4] == [6, 3, 2, 1]
    assert max(narrow.rows[3:]) == 2  # what did not fit is not tried again


def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(TinyLMError, match="Out of memory while scoring one sequence; choose a smaller --context"):
        evaluate(decoder(), SmallMemory(0), evaluation_batches(TOKENS, CONFIG.context, 3))


def test_other_errors_in_scoring_are_not_taken_for_memory() -> None:
    def broken(model: LanguageModel, batch: Batch) -> Loss:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        evaluate(decoder(), broken, evaluation_batches(TOKENS, CONFIG.context, 3))


@pytest.mark.parametrize("stride", [None, 3])
def test_the_loss_is_the_same_at_any_batch_size(stride: int | None) -> None:
    model = decoder()
    losses = [scored(model, rows, stride).loss for rows in (1, 2, 3, 7, 100)]
    assert max(losses) - min(losses) < 1e-5
    assert scored(model, 4, None).loss == scored(model, 4, CONFIG.context).loss
    assert scored(model, 4, None).loss != scored(model, 4, 3).loss


def test_covered_tokens_are_scored_by_the_formula_and_counted_where_the_likeliest_is_right() -> None:
    config = small(architecture="encoder", context=8, vocab_size=4)
    model = randomised(build_model(config)).double()
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    batches = list(masked_evaluation_batches(np.tile([0, 1, 2], 30), 8, rows=3, mask=3, vocab_size=4))
    told: list[int] = []
    score, accuracy = evaluate_guesses(model.train(), iter(batches), progress=told.append)
    nats, right = [], []
    for batch in batches:
        for ids, targets, mask in zip(batch.ids, batch.targets, batch.mask, strict=True):
            logits = reference_parts.encoder_logits(weights, config, ids.tolist(), len(ids), table=np.float32)
            for place in np.flatnonzero(mask):
                nats.append(-reference_parts.log_softmax(logits[place])[targets[place]])
                right.append(logits[place].argmax() == targets[place])
    assert (score.tokens, sum(told)) == (len(nats), len(nats))
    assert score.loss == pytest.approx(sum(nats) / len(nats), rel=1e-9)
    assert accuracy == sum(right) / len(right)
    assert 0 < accuracy < 1
    assert model.training


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_while_scoring_and_the_model_left_as_it_was(training: bool) -> None:
    model = decoder().train(training)
    scores = [scored(model, 4, None).loss for _ in range(2)]
    assert scores[0] == scores[1]
    assert model.training == training


def test_progress_is_told_the_tokens_and_may_stop_the_scoring() -> None:
    told: list[int] = []
    evaluate(decoder(), next_token, evaluation_batches(TOKENS, 8, 2), progress=told.append)
    assert told == [16, 8, 5]

    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    model = decoder().train()
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, next_token, evaluation_batches(TOKENS, 8, 2), progress=stop)
    assert model.training


def test_scoring_computes_in_the_format_asked_for_and_keeps_no_graph() -> None:
    model = decoder()
    seen: list[torch.dtype] = []

    def objective(model: Decoder, batch: object) -> object:
        loss = next_token(model, batch)
        seen.append(model.logits(torch.ones(1, CONFIG.width)).dtype)
        assert not loss.nats.requires_grad
        return loss

    def batches() -> Iterator[object]:
        yield from evaluation_batches(TOKENS, 8, 2)

    exact = evaluate(model, objective, batches(), "fp32")
    rough = evaluate(model, objective, batches(), "bf16")
    assert set(seen[:3]) == {torch.float32}
    assert set(seen[3:]) == {torch.bfloat16}
    assert 0 < abs(rough.loss - exact.loss) < 0.1


@given(st.integers(1, 10**6), st.floats(1e-3, 20), st.integers(1, 10**6))
def test_perplexity_and_bits_follow_from_the_nats(tokens: int, loss: float, units: int) -> None:
    score = Score(tokens * loss, tokens)
    assert score.loss == pytest.approx(loss)
    assert score.perplexity == pytest.approx(math.e**loss)
    assert score.bits_per(units) == pytest.approx(tokens * loss * math.log2(math.e) / units)


def test_a_coin_costs_one_bit_and_the_perplexity_of_a_hopeless_model_is_infinite() -> None:
    coin = Score(100 * math.log(2), 100)
    assert (coin.perplexity, coin.bits_per(100), coin.bits_per(200)) == pytest.approx((2.0, 1.0, 0.5))
    assert Score(1e6, 1).perplexity == math.inf
