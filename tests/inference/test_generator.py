from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import every_variant, randomised, small
from tinylm.config import ModelConfig
from tinylm.inference.generator import generate, window_start
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder

STEPS = 40  # past the context of 24, and past two hops
PROMPTS = ([3], [1, 2, 3, 4, 5, 6, 7], list(range(12)) * 2, [i % 13 for i in range(41)])


class Dictated(Sampler):
    """Chooses what it was told to, and remembers the logits it was shown."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.shown: list[Tensor] = []

    def __call__(self, logits: Tensor) -> Tensor:
        self.shown.append(logits.clone())
        return self.tokens[:, len(self.shown) - 1]


def exact(config: ModelConfig) -> Decoder:
    return randomised(build_model(config)).double()


def dictated(rows: int, vocab_size: int, steps: int = STEPS) -> Dictated:
    return Dictated(torch.randint(vocab_size, (rows, steps), generator=torch.Generator().manual_seed(2)))


def shown(model: Decoder, prompts: Sequence[Sequence[int]], tokens: Tensor, use_cache: bool) -> Tensor:
    """The logits (B, steps, V) that the sampler sees."""
    sampler = Dictated(tokens)
    chosen = list(generate(model, prompts, sampler, tokens.shape[1], use_cache))
    assert torch.tensor(chosen).T.equal(tokens)
    return torch.stack(sampler.shown, dim=1)


@every_variant
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
def test_every_logit_is_the_models_own_for_the_window(config: ModelConfig, use_cache: bool) -> None:
    """Prompts of unequal length, shorter and longer than the context, far past it, against one plain pass a token."""
    model = exact(config)
    tokens = dictated(len(PROMPTS), config.vocab_size).tokens
    logits = shown(model, PROMPTS, tokens, use_cache)
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for step in range(STEPS):
            window = torch.tensor([text[window_start(len(text), config.context) :]])
            with torch.inference_mode():
                expected = model.logits(model(window).hidden[0, -1])
            torch.testing.assert_close(logits[row, step], expected, rtol=0, atol=1e-10)
            text.append(int(tokens[row, step]))


@every_variant
def test_the_cache_changes_no_token(config: ModelConfig) -> None:
    model = exact(config)

    def written(use_cache: bool) -> list[list[int]]:
        sampler = Sampler(Sampling(temperature=1.0), 1, len(PROMPTS), torch.device("cpu"), config.vocab_size)
        return list(generate(model, PROMPTS, sampler, STEPS, use_cache))

    assert written(True) == written(False)


def test_a_batch_equals_its_members_one_by_one() -> None:
    model = exact(small())
    tokens = dictated(len(PROMPTS), 13).tokens
    together = shown(model, PROMPTS, tokens, True)
    for row, prompt in enumerate(PROMPTS):
        alone = shown(model, [prompt], tokens[row : row + 1], True)
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_the_smallest_contexts_work(context: int) -> None:
    for preset in ("modern", "gpt2"):
        model = exact(small(preset, context=context, kv_heads=4))
        tokens = dictated(2, 13, 12).tokens
        cached, uncached = (shown(model, ([1], [2, 3, 4]), tokens, how) for how in (True, False))
        torch.testing.assert_close(cached, uncached, rtol=0, atol=1e-10)


def test_the_cost_of_a_token_stays_constant() -> None:
    """One token a step, and a window of at most the context once in half a context."""
    model = exact(small())
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    steps = 240
    shown(model, [[1]], dictated(1, 13, steps).tokens, True)
    prefills = [length for length in lengths if length > 1]
    assert len(lengths) == steps
    assert max(lengths) <= model.context
    assert len(prefills) <= steps // (model.context // 2)


def test_tokens_come_one_at_a_time() -> None:
    model = exact(small())
    sampler = dictated(1, 13)
    tokens = generate(model, [[1, 2]], sampler, STEPS)
    assert sampler.shown == []
    assert next(tokens) == sampler.tokens[:, 0].tolist()
    assert len(sampler.shown) == 1


def test_the_prompts_are_left_as_they_were() -> None:
    prompt = [1, 2]
    list(generate(exact(small()), [prompt], dictated(1, 13), 3))
    assert prompt == [1, 2]


# Where the window begins

contexts, texts = st.integers(1, 300), st.integers(0, 2000)


@given(texts, contexts)
def test_the_window_holds_the_end_of_the_text_and_fits_the_context(length: int, context: int) -> None:
    seen = length - window_start(length, context)
    assert seen <= context
    assert seen == length or seen > context - max(1, context // 2)


@given(texts, contexts)
def test_the_window_hops_by_half_a_context_and_never_back(length: int, context: int) -> None:
    hop = max(1, context // 2)
    start, after = window_start(length, context), window_start(length + 1, context)
    assert start % hop == 0
    assert after - start in (0, hop)


@given(contexts)
def test_the_window_begins_at_the_beginning_while_the_text_fits(context: int) -> None:
    assert window_start(context, context) == 0
    assert window_start(context + 1, context) == max(1, context // 2)
