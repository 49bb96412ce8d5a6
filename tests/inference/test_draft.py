"""Judge: counting with a dictionary, for the guesses; and the model's own pass, for what a draft may not change."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.inference.test_generator import Dictated, exact, shown
from tests.variants import small
from tinylm.inference.draft import LENGTHS, NGramDraft
from tinylm.inference.generator import generate, generate_from_draft
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.model.decoder import Decoder

STEPS = 70  # past the context of 24, and past several hops


class Told:
    """Guesses what it is told; remembers how many it was asked for."""

    def __init__(self, tell: Callable[[Sequence[int]], list[int]]) -> None:
        self.tell = tell
        self.asked: list[int] = []

    def guess(self, text: Sequence[int], most: int) -> list[int]:
        self.asked.append(most)
        return self.tell(text)[:most]


def likeliest(text: Sequence[int], known: Sequence[int]) -> int | None:
    """By hand: the longest context that the text has too, and what follows it in half of its places or more."""
    for length in LENGTHS:
        followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for place in range(len(text) - length):
            followers[tuple(text[place : place + length])][text[place + length]] += 1
        found = followers.get(tuple(known[-length:])) if len(known) >= length else None
        if found:
            token, count = min(found.items(), key=lambda item: (-item[1], item[0]))
            return token if 2 * count >= found.total() else None
    return None


@given(
    text=st.lists(st.integers(0, 2), max_size=60),
    known=st.lists(st.integers(0, 2), max_size=12),
    most=st.integers(0, 5),
)
def test_a_guess_is_what_follows_most_often_and_stops_where_nothing_does(
    text: list[int], known: list[int], most: int
) -> None:
    expected: list[int] = []
    while len(expected) < most and (token := likeliest(text, known + expected)) is not None:
        expected.append(token)
    assert NGramDraft(np.array(text, dtype=np.uint8)).guess(known, most) == expected


DRAFTS = {
    "always wrong": lambda tokens, prompt: lambda text: [(tokens[len(text) - len(prompt)] + 1) % 13] * 9,
    "always right": lambda tokens, prompt: lambda text: tokens[len(text) - len(prompt) :],
    "right twice": lambda tokens, prompt: lambda text: [*tokens[len(text) - len(prompt) :][:2], 0, 0],
    "silent": lambda tokens, prompt: lambda text: [],
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("prompt", [[3], [i % 13 for i in range(24)], [i % 13 for i in range(41)]], ids=len)
def test_every_token_is_chosen_by_the_logits_that_it_has_without_a_draft(draft: str, prompt: list[int]) -> None:
    model = exact(small())
    tokens = torch.randint(13, (1, STEPS), generator=torch.Generator().manual_seed(2))
    sampler = Dictated(tokens)
    told = Told(DRAFTS[draft](tokens[0].tolist(), prompt))
    written = list(generate_from_draft(model, prompt, sampler, STEPS, told, most=5))
    assert [token for (token,) in written] == tokens[0].tolist()
    expected = shown(model, [prompt], tokens, use_cache=True)
    torch.testing.assert_close(torch.stack(sampler.shown, dim=1), expected, rtol=0, atol=1e-10)
    looks = len(told.asked)
    assert looks == STEPS if draft in ("always wrong", "silent") else looks < STEPS / 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_what_is_drawn_does_not_depend_on_the_draft(temperature: float, penalty: float) -> None:
    model = exact(small())
    text = torch.randint(13, (500,), generator=torch.Generator().manual_seed(3))

    def sampler() -> Sampler:
        sampling = Sampling(temperature, top_k=5, repeat_penalty=penalty)
        return Sampler(sampling, 1, 1, torch.device("cpu"), 13)

    plain = list(generate(model, [[3]], sampler(), STEPS))
    draft = NGramDraft(text.numpy())
    assert list(generate_from_draft(model, [3], sampler(), STEPS, draft, most=4)) == plain
    assert list(generate_from_draft(model, [3], sampler(), 1, draft, most=4)) == plain[:1]


def test_a_wrong_guess_cannot_be_taken_back_from_a_cache_that_forgets() -> None:
    model: Decoder = exact(small(local_window=4, local_layers=(0,)))
    sampler = Dictated(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="given up"):
        list(generate_from_draft(model, [3], sampler, 3, Told(lambda text: [1]), most=2))
