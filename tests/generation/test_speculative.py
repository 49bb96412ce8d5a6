"""Draft tokens, compared with counts in a dictionary; and texts, compared with generation without a draft."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.generation.test_generator import FixedSampler, float64_model, sampled_logits
from tests.variants import small
from tinylm.generation.speculative import NGRAM_LENGTHS, NGramDraft, generate_speculatively, is_worth_drafting
from tinylm.model.decoder import Decoder

STEPS = 70  # past the context of 24, and past several hops


class FixedDraft:
    """Proposes the tokens that a function returns; records the limit of each call."""

    def __init__(self, tokens_after: Callable[[Sequence[int]], list[int]]) -> None:
        self.tokens_after = tokens_after
        self.limits: list[int] = []

    def propose(self, text: Sequence[int], limit: int) -> list[int]:
        self.limits.append(limit)
        return self.tokens_after(text)[:limit]


def most_frequent(text: Sequence[int], context: Sequence[int]) -> int | None:
    """The token to propose: the one that follows the longest context found in `text` at least half of the time."""
    for length in NGRAM_LENGTHS:
        followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for start in range(len(text) - length):
            followers[tuple(text[start : start + length])][text[start + length]] += 1
        found = followers.get(tuple(context[-length:])) if len(context) >= length else None
        if found:
            token, count = min(found.items(), key=lambda item: (-item[1], item[0]))
            return token if 2 * count >= found.total() else None
    return None


@given(
    text=st.lists(st.integers(0, 2), max_size=60),
    context=st.lists(st.integers(0, 2), max_size=12),
    limit=st.integers(0, 5),
)
def test_draft_tokens_are_those_that_follow_most_often_and_stop_where_none_is_frequent(
    text: list[int], context: list[int], limit: int
) -> None:
    expected: list[int] = []
    while len(expected) < limit and (token := most_frequent(text, context + expected)) is not None:
        expected.append(token)
    assert NGramDraft(np.array(text, dtype=np.uint8)).propose(context, limit) == expected


DRAFTS = {
    "always wrong": lambda tokens, prompt: lambda text: [(tokens[len(text) - len(prompt)] + 1) % 13] * 9,
    "always right": lambda tokens, prompt: lambda text: tokens[len(text) - len(prompt) :],
    "right twice": lambda tokens, prompt: lambda text: [*tokens[len(text) - len(prompt) :][:2], 0, 0],
    "empty": lambda tokens, prompt: lambda text: [],
}


@pytest.mark.parametrize(
    ("draft", "length"), [("always wrong", 24), ("always right", 1), ("right twice", 41), ("empty", 1)]
)
def test_every_token_is_sampled_from_the_same_logits_as_without_a_draft(draft: str, length: int) -> None:
    model, prompt = float64_model(small()), [(i + 3) % 13 for i in range(length)]
    tokens = torch.randint(13, (1, STEPS), generator=torch.Generator().manual_seed(2))
    sampler = FixedSampler(tokens)
    fixed = FixedDraft(DRAFTS[draft](tokens[0].tolist(), prompt))
    generated = list(generate_speculatively(model, prompt, sampler, STEPS, fixed, max_draft_tokens=5))
    assert [token for (token,) in generated] == tokens[0].tolist()
    expected = sampled_logits(model, [prompt], tokens, use_cache=True)
    torch.testing.assert_close(torch.stack(sampler.logits, dim=1), expected, rtol=0, atol=1e-10)
    calls = len(fixed.limits)
    if draft == "always wrong":  # it pauses then; calls with a limit of 0 come in addition
        assert calls == 16 + fixed.limits.count(0)
    else:
        assert calls == STEPS if draft == "empty" else calls < STEPS / 2


def test_rejected_tokens_cannot_be_dropped_from_the_cache_of_a_sliding_window() -> None:
    model: Decoder = float64_model(small(local_window=4, local_layers=(0,)))
    sampler = FixedSampler(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="dropped"):
        list(generate_speculatively(model, [3], sampler, 3, FixedDraft(lambda text: [1]), max_draft_tokens=2))


class Uniform:
    """A model whose logits are all 0, with a context that no text here exceeds."""

    context = 10**6

    def make_cache(self, batch: int, length: int, starts: object = None) -> list[object]:
        return []

    def last_logits(self, ids: object, cache: object, count: int) -> Tensor:
        return torch.zeros(1, count, 13)


def test_drafting_pauses_for_ever_longer_unless_one_draft_token_per_pass_is_accepted() -> None:
    """Of three proposed tokens, the first `accepted` are right."""

    def calls(accepted: int, steps: int) -> int:
        tokens = torch.randint(13, (1, steps), generator=torch.Generator().manual_seed(2))
        coming = [*tokens[0].tolist(), 0, 0, 0]

        def propose(text: Sequence[int]) -> list[int]:
            following = coming[len(text) - 1 :][:3]
            return [*following[:accepted], *((token + 1) % 13 for token in following[accepted:])]

        draft = FixedDraft(propose)
        for _ in generate_speculatively(Uniform(), [3], FixedSampler(tokens), steps, draft, max_draft_tokens=3):
            pass
        return len(draft.limits)

    assert calls(0, 2000) == 5 * 16  # pauses of 128, 256, 512 and 1024 tokens
    assert calls(1, 600) == 600 / 2
    assert calls(2, 600) == 600 / 3


def test_a_draft_is_worth_its_preparation_from_a_number_of_tokens_that_grows_with_the_text() -> None:
    assert not is_worth_drafting(511, 1000) and is_worth_drafting(512, 1000)
    assert not is_worth_drafting(1999, 1_000_000) and is_worth_drafting(2000, 1_000_000)
    assert is_worth_drafting(8000, 10**9)  # of which 4 million tokens are read
