import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.variants import VARIANTS, randomised, small
from tinylm.config.model import ModelConfig
from tinylm.generation.engine import window_start
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.torch_engine import Sampler, TorchEngine, generate
from tinylm.text.tokenizer import train_char
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

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
    chosen = [ids for ids, _ in generate(model, prompts, sampler, tokens.shape[1], use_cache)]
    assert torch.tensor(chosen).T.equal(tokens)
    return torch.stack(sampler.logits, dim=1)


NAMES = ("modern", "gpt2", "gemma 3", "local, relative, unscaled scores, one expert per token")


@pytest.mark.parametrize("name", NAMES)
def test_the_logits_of_a_step_are_those_of_a_forward_pass_over_the_window(name: str) -> None:
    """Prompts shorter and longer than the context. The reference is one forward pass per window, without a cache."""
    model = float64_model(config := dict(VARIANTS)[name])
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


def test_a_prompt_of_several_samples_is_processed_once() -> None:
    """The reference computes each sample without a cache. The second model has a cache of a sliding window."""
    for name in ("modern", "gemma 3"):
        model = float64_model(dict(VARIANTS)[name])
        prompt = [i % 13 for i in range(7)]
        tokens = fixed_sampler(3, 13).tokens
        expected = sampled_logits(model, [prompt] * 3, tokens, False)
        shapes: list[tuple[int, ...]] = []
        model.register_forward_pre_hook(lambda module, inputs, shapes=shapes: shapes.append(tuple(inputs[0].shape)))
        found = sampled_logits(model, [prompt] * 3, tokens, True)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
        assert shapes[:2] == [(1, 7), (3, 1)]


def test_generation_with_and_without_the_cache_agree_at_the_smallest_contexts() -> None:
    """Also for texts that differ only in length, which are not one prompt."""
    for context, preset, prompts in itertools.product((1, 2, 3, 5), ("modern", "gpt2"), (([1], [2, 3]), ([0, 0], [0]))):
        model = float64_model(small(preset, context=context, kv_heads=4))
        tokens = fixed_sampler(2, 13, 12).tokens
        cached, uncached = (sampled_logits(model, prompts, tokens, use_cache) for use_cache in (True, False))
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
    sampler = fixed_sampler(len(prompts), config.vocab_size)
    list(generate(model, prompts, sampler, STEPS, use_cache, kept_id=7))
    for row, prompt in enumerate(prompts):
        text = [*prompt, *sampler.tokens[row].tolist()]
        for step in range(STEPS):
            length = len(prompt) + step
            start = window_start(length, config.context)
            window = text[start:length] if prompt[0] != 7 else [7, *text[start + 1 : length]]
            with torch.inference_mode():
                expected = model.logits(model(torch.tensor([window])).hidden[0, -1])
            torch.testing.assert_close(sampler.logits[step][row], expected, rtol=0, atol=1e-10)


def test_tokens_are_computed_when_they_are_asked_for_and_prompts_are_not_modified() -> None:
    sampler, prompt = fixed_sampler(1, 13), [1, 2]
    tokens = generate(float64_model(small()), [prompt], sampler, STEPS)
    assert sampler.logits == []
    assert next(tokens)[0] == sampler.tokens[:, 0].tolist()
    assert len(sampler.logits) == 1 and prompt == [1, 2]


@given(st.integers(0, 2000), st.integers(1, 300))
def test_the_window_starts_at_the_first_multiple_of_half_a_context_that_leaves_room_for_the_next_token(
    length: int, context: int
) -> None:
    hop = max(1, context // 2)
    assert window_start(length, context) == next(
        start for start in itertools.count(0, hop) if length - start < max(2, context)
    )


class TiedLogits:
    """A model whose logits are largest, and equal, for the tokens 3, 7 and 20."""

    context = 8

    def make_cache(self, batch: int, length: int, starts: Tensor | None = None) -> list[Any]:
        return []

    def last_logits(self, ids: Tensor, cache: Any | None) -> Tensor:
        logits = torch.zeros(1, 50)
        logits[0, [3, 7, 20]] = 1.0
        return logits


def test_of_equal_logits_the_lowest_ids_are_the_token_and_its_candidates() -> None:
    tokenizer = train_char("".join(map(chr, range(97, 97 + 49))))
    config = GenerationConfig(max_tokens=1, temperature=0.0, logprobs=2)
    (token,) = TorchEngine(TiedLogits(), tokenizer).generate([EncodedPrompt("a", [1], [1])], config, 0)
    assert token.id == 3 and [candidate.id for candidate in token.candidates] == [3, 7]
