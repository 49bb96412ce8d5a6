"""Losses of conversations, pairs and windows, intervals, compared with each text alone; the scored part of a text."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.shell import story
from tests.text.test_chat_batches import random_tokens
from tests.variants import randomised, small
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import TextLosses, text_losses
from tinylm.evaluation.result import MAX_BLOCKS, MAX_UNITS, ratio_interval
from tinylm.jobs.chat.job import evaluate_chat
from tinylm.jobs.job import EvaluationTokens, Scoring
from tinylm.jobs.masked.job import evaluate_masked
from tinylm.jobs.pairs.corpus import PairTokens, pair_evaluation_batches
from tinylm.jobs.pairs.job import evaluate_pairs, first_pairs, sequence_to_sequence_losses
from tinylm.jobs.text.baselines import baseline_bits_per_byte
from tinylm.jobs.text.job import evaluate_text, first_bytes
from tinylm.objectives.loss import next_token_losses
from tinylm.reporter import LogReporter
from tinylm.system.ranks import ONE_RANK
from tinylm.text.scored_tokens import ScoredRows
from tinylm.text.tokenizer import MASK, train_bpe, train_char
from tinylm.transformer.build import build_model

TOKENIZER = train_char("abcdefghij").with_special_tokens([MASK])
SIZE = TOKENIZER.vocab_size
CONTEXT = 32


def model_of(architecture: str) -> Any:
    layers = {"encoder_layers": 1} if architecture == "encoder-decoder" else {}
    config = small(architecture=architecture, context=CONTEXT, vocab_size=SIZE, **layers)
    return randomised(build_model(config)).double().eval()


def measured(model: Any, batches: Any, losses_of: Any) -> dict[int, float]:
    """The nats of the texts by their numbers of scored tokens, for texts that all have different numbers."""
    losses = text_losses(model, batches, losses_of, "fp32", lambda tokens: None, ONE_RANK)
    assert len(set(losses.tokens.tolist())) == len(losses.tokens)
    return dict(zip(losses.tokens.tolist(), losses.nats.tolist(), strict=True))


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_each_conversation_has_the_loss_that_it_has_alone(packed: bool) -> None:
    model, tokens = model_of("decoder"), random_tokens(300, 40, SIZE)
    chosen = {}  # a conversation for each number of scored tokens
    for (index,) in tokens.examples(CONTEXT):
        ids, scored = (torch.from_numpy(part[: CONTEXT + 1]) for part in tokens.tokens(index))
        nats = F.cross_entropy(model.logits(model(ids[None, :-1]).hidden)[0], ids[1:], reduction="none")
        chosen[int(scored[1:].sum())] = (index, nats[scored[1:]].sum().item())
    rows = ScoredRows(tokens, CONTEXT, packed, np.array([[index] for index, _ in chosen.values()]))
    batches = [rows.batch(range(first, min(first + 3, len(rows)))) for first in range(0, len(rows), 3)]
    assert measured(model, batches, next_token_losses) == pytest.approx({n: nats for n, (_, nats) in chosen.items()})


@torch.no_grad()
def test_each_pair_has_the_loss_that_it_has_alone() -> None:
    model, rng, end = model_of("encoder-decoder"), np.random.default_rng(2), TOKENIZER.end_of_text_id
    sides = [rng.integers(1, 11, length) for target in range(1, 13) for length in (rng.integers(1, 9), target)]
    pairs = PairTokens(np.concatenate([np.append(side, end) for side in sides]), end)
    expected = {}
    for source, target in zip(sides[::2], sides[1::2], strict=True):
        ids = torch.tensor([[end, *target, end]])
        sources = torch.tensor([[*source, end]])
        hidden = model(ids[:, :-1], sources, torch.tensor([sources.shape[1]])).hidden
        expected[len(target) + 1] = F.cross_entropy(model.logits(hidden)[0], ids[0, 1:], reduction="sum").item()
    assert measured(model, pair_evaluation_batches(pairs, CONTEXT, 5), sequence_to_sequence_losses) == pytest.approx(
        expected
    )


KINDS = {
    "conversations": ("chat", "decoder", evaluate_chat),
    "pairs": ("pairs", "encoder-decoder", evaluate_pairs),
    "windows": ("text", "encoder", evaluate_masked),
}


def codes(kind: str, count: int) -> np.ndarray:
    """The codes of texts: a conversation of 12 tokens, a pair, or a window."""
    rng, end = np.random.default_rng(4), TOKENIZER.end_of_text_id
    if kind == "chat":
        return (4 * rng.integers(1, 11, 12 * count) + np.array([3, *[2] * 11] * count)).astype(np.uint32)
    return np.array([1, 2, end, 3, end] * count) if kind == "pairs" else rng.integers(1, 11, CONTEXT * count)


def test_conversations_pairs_and_windows_have_an_interval_from_ten_on() -> None:
    for name, (kind, architecture, evaluate) in KINDS.items():
        model, rest = model_of(architecture).float(), (EvaluationConfig(beams=1), "fp32", LogReporter())
        texts = (EvaluationTokens(kind, codes(kind, count)) for count in (9, 40))
        few, many = (evaluate(Scoring(model, TOKENIZER, text, *rest)) for text in texts)
        assert (few.loss_low, few.loss_high, few.resampled) == (None, None, None), name
        assert many.resampled == f"40 {name}"
        assert many.loss_low is not None and many.loss_high is not None
        assert many.loss_low <= many.loss <= many.loss_high
        assert {"loss_low", "loss_high", "resampled"} <= many.to_json().keys()
        assert dataclasses.replace(many, loss_low=None).to_json().keys() < many.to_json().keys()


def test_the_interval_of_texts_is_that_of_the_ratio_of_their_nats_and_tokens() -> None:
    rng = np.random.default_rng(8)
    tokens = rng.integers(1, 60, 50)
    losses = TextLosses(tokens * rng.normal(2, 0.3, 50), tokens)
    found, expected = losses.interval("pairs", LogReporter()), ratio_interval(losses.nats, tokens)
    assert expected is not None and (found["loss_low"], found["loss_high"]) == (expected.low, expected.high)


def test_many_texts_are_grouped_at_random_and_many_windows_in_order() -> None:
    count = 12_345
    tokens = np.sort(np.random.default_rng(1).integers(1, 100, count))  # as batches are sorted by length
    losses = TextLosses(2.0 * tokens, tokens)
    groups = losses.shuffled_groups()
    assert len(groups.nats) == MAX_UNITS
    assert groups.tokens.sum() == tokens.sum() and groups.nats.sum() == pytest.approx(losses.nats.sum())
    spread = np.std(groups.tokens) / np.std(tokens)  # of sums of 12.3 independent texts
    assert spread == pytest.approx((count / MAX_UNITS) ** 0.5, rel=0.1)
    blocks = TextLosses(np.arange(1000.0), np.ones(1000)).blocks()
    assert len(blocks.nats) == MAX_BLOCKS
    assert blocks.nats.tolist() == [sum(range(start, start + 5)) for start in range(0, 1000, 5)]
    few = TextLosses(np.arange(3.0), np.ones(3)).blocks()
    assert (few.nats.tolist(), few.tokens.tolist()) == ([0, 1, 2], [1, 1, 1])


def test_a_text_of_control_tokens_has_a_loss_but_no_bits_per_character_and_no_baselines() -> None:
    tokenizer = train_char("abc")
    ends = np.full(4, tokenizer.end_of_text_id)
    model = build_model(small(vocab_size=tokenizer.vocab_size))
    text, reporter = EvaluationTokens("text", ends), LogReporter()
    result = evaluate_text(Scoring(model, tokenizer, text, EvaluationConfig(), "fp32", reporter))
    assert result.loss > 0 and (result.tokens, result.characters, result.bytes) == (3, 0, 0)
    assert not {"bits_per_character", "bits_per_byte"} & result.to_json().keys()
    assert baseline_bits_per_byte(tokenizer, ends, ends, LogReporter()) == {}


PAIRS = np.array([1, 9, 2, 2, 9, 3, 9, 4, 9, 5, 9, 6, 6, 6])  # the last target has no end


def test_the_first_pairs_are_whole_within_the_limits_and_the_last_one_may_lack_its_end() -> None:
    expected = {(1, 100): 5, (2, 100): 9, (3, 100): 14, (9, 100): 14, (9, 13): 9, (9, 7): 5, (9, 4): 0}
    found = {limits: first_pairs(PAIRS, 9, *limits).tolist() for limits in expected}  # by pairs and tokens
    assert found == {limits: PAIRS[:length].tolist() for limits, length in expected.items()}


def test_tokenizers_score_the_same_text_up_to_one_token() -> None:
    text = story(4000) + " ä"
    for tokenizer in (train_char("".join(sorted(set(text)))), train_bpe([text], 400)):
        tokens = np.asarray(tokenizer.encode(text))
        found = first_bytes(tokenizer, tokens, 1000)
        assert 1000 - 20 <= len(tokenizer.decode(found).encode()) <= 1000
        assert len(tokenizer.decode(tokens[: len(found) + 1]).encode()) > 1000
        assert first_bytes(tokenizer, tokens, 10**6).tolist() == tokens.tolist()
