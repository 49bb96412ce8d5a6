import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import every_variant, randomised, small
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import generate, window_start
from tinylm.generation.sampler import Sampler
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.model_config import ModelConfig

STEPS = 40  # past the context of 24, and past two hops
PROMPTS = ([3], [1, 2, 3, 4, 5, 6, 7], list(range(12)) * 2, [i % 13 for i in range(41)])


class FixedSampler(Sampler):
    """Returns the given tokens (B, steps), and records the logits (B, V) of each step."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor) -> list[int]:
        self.logits.append(logits.clone())
        tokens: list[int] = self.tokens[:, len(self.logits) - 1].tolist()
        return tokens


def float64_model(config: ModelConfig) -> Decoder:
    return randomised(build_model(config)).double()


def fixed_sampler(rows: int, vocab_size: int, steps: int = STEPS) -> FixedSampler:
    return FixedSampler(torch.randint(vocab_size, (rows, steps), generator=torch.Generator().manual_seed(2)))


def sampled_logits(model: Decoder, prompts: Sequence[Sequence[int]], tokens: Tensor, use_cache: bool) -> Tensor:
    """The logits (B, steps, V) that the sampler is given."""
    sampler = FixedSampler(tokens)
    chosen = list(generate(model, prompts, sampler, tokens.shape[1], use_cache))
    assert torch.tensor(chosen).T.equal(tokens)
    return torch.stack(sampler.logits, dim=1)


@every_variant
def test_the_logits_of_a_step_are_those_of_a_forward_pass_over_the_window(config: ModelConfig) -> None:
    """Prompts shorter and longer than the context. The reference is one forward pass per window, without a cache."""
    model = float64_model(config)
    tokens = fixed_sampler(len(PROMPTS), config.vocab_size).tokens
    cached, uncached = (sampled_logits(model, PROMPTS, tokens, use_cache) for use_cache in (True, False))
    for row, prompt in enumerate(PROMPTS):
        text = [*prompt, *tokens[row].tolist()]
        lengths = range(len(prompt), len(prompt) + STEPS)  # of the text before each step
        for start, group in itertools.groupby(lengths, lambda length: window_start(length, config.context)):
            window = list(group)
            first, last = window[0], window[-1]
            with torch.inference_mode():
                hidden = model(torch.tensor([text[start:last]])).hidden[0, first - start - 1 :]
                expected = model.logits(hidden)
            chosen = slice(first - len(prompt), last - len(prompt) + 1)
            torch.testing.assert_close(cached[row, chosen], expected, rtol=0, atol=1e-10)
            torch.testing.assert_close(uncached[row, chosen], expected, rtol=0, atol=1e-10)


def test_the_tokens_are_the_same_with_and_without_the_cache() -> None:
    """Of one model: the logits of each variant are compared above."""
    model = float64_model(config := small())

    def generated(use_cache: bool) -> list[list[int]]:
        sampler = Sampler(SamplingConfig(temperature=1.0), 1, len(PROMPTS), config.vocab_size)
        return list(generate(model, PROMPTS, sampler, STEPS, use_cache))

    assert generated(True) == generated(False)


def test_the_logits_of_a_row_do_not_depend_on_the_other_rows() -> None:
    model = float64_model(small())
    tokens = fixed_sampler(len(PROMPTS), 13).tokens
    batched = sampled_logits(model, PROMPTS, tokens, True)
    for row, prompt in enumerate(PROMPTS):
        alone = sampled_logits(model, [prompt], tokens[row : row + 1], True)
        torch.testing.assert_close(batched[row], alone[0], rtol=0, atol=1e-10)


@every_variant
def test_a_prompt_of_several_samples_is_processed_once(config: ModelConfig) -> None:
    """The reference computes each sample without a cache."""
    model = float64_model(config)
    prompt = [i % 13 for i in range(7)]
    tokens = fixed_sampler(3, config.vocab_size).tokens
    expected = sampled_logits(model, [prompt] * 3, tokens, False)
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    found = sampled_logits(model, [prompt] * 3, tokens, True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert shapes[:2] == [(1, 7), (3, 1)]


def test_texts_that_differ_only_in_length_are_not_one_prompt() -> None:
    model = float64_model(small())
    tokens = fixed_sampler(2, 13).tokens
    cached, uncached = (sampled_logits(model, ([0, 0], [0]), tokens, use_cache) for use_cache in (True, False))
    torch.testing.assert_close(cached, uncached, rtol=0, atol=1e-10)


@pytest.mark.parametrize("context", [1, 2, 3, 5])
def test_generation_with_and_without_the_cache_agree_at_the_smallest_contexts(context: int) -> None:
    for preset in ("modern", "gpt2"):
        model = float64_model(small(preset, context=context, kv_heads=4))
        tokens = fixed_sampler(2, 13, 12).tokens
        cached, uncached = (sampled_logits(model, ([1], [2, 3, 4]), tokens, use_cache) for use_cache in (True, False))
        torch.testing.assert_close(cached, uncached, rtol=0, atol=1e-10)


def test_the_cost_of_a_token_stays_constant() -> None:
    """A step computes one token, or once per half context a window of at most the context length."""
    model = float64_model(small())
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    steps = 240
    sampled_logits(model, [[1]], fixed_sampler(1, 13, steps).tokens, True)
    prefills = [length for length in lengths if length > 1]
    assert len(lengths) == steps
    assert max(lengths) <= model.context
    assert len(prefills) <= steps // (model.context // 2)


@pytest.mark.parametrize("use_cache", [True, False])
def test_bos_stays_first_when_the_window_advances(use_cache: bool) -> None:
    """The reference is one forward pass per step over BOS and the end of the text. Without BOS, nothing stays."""
    model = float64_model(config := small())
    prompts = [[7], [7, *range(12)], [3, 4]]
    tokens = fixed_sampler(len(prompts), config.vocab_size).tokens
    sampler = FixedSampler(tokens)
    list(generate(model, prompts, sampler, STEPS, use_cache, bos_id=7))
    for row, prompt in enumerate(prompts):
        text = [*prompt, *tokens[row].tolist()]
        for step in range(STEPS):
            length = len(prompt) + step
            start = window_start(length, config.context)
            window = text[start:length] if prompt[0] != 7 else [7, *text[start + 1 : length]]
            with torch.inference_mode():
                expected = model.logits(model(torch.tensor([window])).hidden[0, -1])
            torch.testing.assert_close(sampler.logits[step][row], expected, rtol=0, atol=1e-10)


def test_tokens_are_computed_when_they_are_asked_for() -> None:
    model = float64_model(small())
    sampler = fixed_sampler(1, 13)
    tokens = generate(model, [[1, 2]], sampler, STEPS)
    assert sampler.logits == []
    assert next(tokens) == sampler.tokens[:, 0].tolist()
    assert len(sampler.logits) == 1


def test_the_prompts_are_not_modified() -> None:
    prompt = [1, 2]
    list(generate(float64_model(small()), [prompt], fixed_sampler(1, 13), 3))
    assert prompt == [1, 2]


# The start of the context window

contexts, lengths = st.integers(1, 300), st.integers(0, 2000)


@given(lengths, contexts)
def test_the_window_holds_the_end_of_the_text_and_fits_the_context(length: int, context: int) -> None:
    visible = length - window_start(length, context)
    assert visible <= context
    assert visible == length or visible > context - max(1, context // 2)


@given(lengths, contexts)
def test_the_window_advances_by_half_a_context_and_never_moves_back(length: int, context: int) -> None:
    hop = max(1, context // 2)
    start, after = window_start(length, context), window_start(length + 1, context)
    assert start % hop == 0
    assert after - start in (0, hop)


@given(contexts)
def test_the_window_starts_at_the_first_token_while_the_text_fits(context: int) -> None:
    assert window_start(context, context) == 0
    assert window_start(context + 1, context) == max(1, context // 2)
