"""The engine that captures CUDA graphs, with plain calls in place of graphs. tests/test_gpu.py captures them."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tinylm
from tests.variants import VARIANTS, randomised, small
from tinylm.config.model import ModelConfig
from tinylm.errors import TinyLMError
from tinylm.generation import graph_engine as module
from tinylm.generation.engine import Engine
from tinylm.generation.generation_config import GenerationConfig, SamplingConfig
from tinylm.generation.graph_engine import GraphEngine, has_fixed_shapes
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.torch_engine import Sampler, TorchEngine
from tinylm.kernels.graphs import Step
from tinylm.models.model import Model
from tinylm.text.tokenizer import train_char
from tinylm.transformer.build import build_model

CHARACTERS = train_char("abcdefghijkl")
PROMPTS = ([3], [1, 2, 3, 4, 5, 6, 7], list(range(12)) * 2, [i % 13 for i in range(41)])
CAPTURED = [(name, config) for name, config in VARIANTS if has_fixed_shapes(config)]


def tokens(engine: Engine, prompts: Any, **settings: Any) -> list[list[int | None]]:
    """The tokens of each row."""
    config = GenerationConfig(**{"max_tokens": 60, "seed": 3, **settings})
    rows: list[list[int | None]] = [[] for _ in prompts]
    for token in engine.generate([EncodedPrompt("", list(ids), list(ids)) for ids in prompts], config, 0):
        rows[token.row].append(token.id)
    return rows


def engines(config: ModelConfig, start_id: int | None = None) -> tuple[GraphEngine, TorchEngine]:
    model, tokenizer = randomised(build_model(config)).double(), copy.copy(CHARACTERS)
    tokenizer.start_id = start_id
    return GraphEngine(model, tokenizer, lambda step: step), TorchEngine(model, tokenizer)


def test_models_with_experts_or_relative_positions_and_requests_for_logits_have_no_graph() -> None:
    """And short texts and large batches."""
    captured = {name for name, _ in CAPTURED}
    assert captured == {name for name, config in VARIANTS if config.experts == 1 and config.position != "relative"}
    assert 8 < len(captured) < len(VARIANTS)
    assert not has_fixed_shapes(small(architecture="encoder"))
    graph, _ = engines(small())
    assert graph.suits(GenerationConfig())
    schema = {"type": "integer"}
    for choices in (
        {"logprobs": 1},
        {"json_schema": schema},
        {"cache": False},
        {"max_tokens": 15},
        {"num_samples": 257},
    ):
        assert not graph.suits(GenerationConfig(**choices))


@pytest.mark.parametrize(("name", "config"), CAPTURED, ids=[name.replace(" ", "-") for name, _ in CAPTURED])
def test_the_tokens_are_those_of_the_plain_path(name: str, config: ModelConfig) -> None:
    """Beyond the context of 24, for prompts of different lengths and one of several samples."""
    graph, plain = engines(config)
    for prompts in (PROMPTS, [PROMPTS[1]] * 3, PROMPTS[2:3]):
        expected = tokens(plain, prompts)
        assert tokens(graph, prompts) == expected
        assert len({token for row in expected for token in row}) > 5
        assert all(len(row) == 60 for row in expected)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repeat_penalty": 1.5},
    {"top_k": 3, "repeat_penalty": 1.3},
    {"top_p": 0.6, "temperature": 1.4},
    {"min_p": 0.2, "max_tokens": 1},
    {"max_tokens": 300, "seed": 2**40},
)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_and_seeds_have_the_effect_of_the_plain_path(settings: dict[str, Any]) -> None:
    """300 tokens use more random numbers than are copied to a device at a time. Token 7 stays first in each window."""
    graph, plain = engines(small(), start_id=7)
    prompts = [[7], [7, *range(12)], [3, 4]]
    assert tokens(graph, prompts, **settings) == tokens(plain, prompts, **settings)


def test_a_bos_token_stays_first_in_the_windows_of_both_paths() -> None:
    """The windows of a text of 3 tokens advance after 21 more, at a context of 24."""
    for number in range(2):
        kept, other = (tokens(engines(small(), start_id)[number], [[7, 1, 2]])[0] for start_id in (7, None))
        assert kept[:21] == other[:21] and kept[21:] != other[21:]


def test_the_smallest_contexts_have_the_tokens_of_the_plain_path() -> None:
    for context in (1, 2, 3, 5):
        graph, plain = engines(small("gpt2", context=context, kv_heads=4))
        for prompts in ([[1], [2, 3]], [[0, 0], [0]]):
            assert tokens(graph, prompts, max_tokens=12) == tokens(plain, prompts, max_tokens=12)


def test_a_step_is_captured_once_for_each_kind_of_request_and_nothing_of_the_capture_stays() -> None:
    """Also when a window advances. A capture calls the step, which stores a key and marks a token as seen."""
    graph, plain = engines(small())
    captured: list[Step] = []

    def capture(step: Step) -> Step:
        step()
        captured.append(step)
        return step

    engine = GraphEngine(graph.model, CHARACTERS, capture)
    settings: dict[str, Any] = {"repeat_penalty": 2.0, "temperature": 1.0}
    for number, (prompts, seed, others, captures) in enumerate(
        (
            (PROMPTS, 3, {}, 1),
            (PROMPTS[::-1], 4, {}, 1),
            (PROMPTS, 3, {"top_k": 3}, 2),
            (PROMPTS[:2], 3, {"top_k": 3}, 3),
            (PROMPTS[1:3], 5, {"top_k": 3, "max_tokens": 20}, 3),
        )
    ):
        choices = {**settings, **others, "seed": seed}
        assert tokens(engine, prompts, **choices) == tokens(plain, prompts, **choices), number
        assert len(captured) == captures


def test_requests_at_the_same_time_do_not_disturb_each_other() -> None:
    """And a request after one that ended early, or in inference mode."""
    engine, plain = engines(small())
    config = GenerationConfig(max_tokens=60, seed=3)
    prompts = [EncodedPrompt("", list(ids), list(ids)) for ids in PROMPTS[:2]]
    together = zip(*(engine.generate([prompt], config, 0) for prompt in prompts), strict=True)
    expected = [tokens(plain, [prompt.ids])[0] for prompt in prompts]
    assert [list(row) for row in zip(*((a.id, b.id) for a, b in together), strict=True)] == expected
    early = engine.generate(prompts[:1], config, 0)
    next(early)
    early.close()
    with torch.inference_mode():
        first = engine.generate(prompts[1:], config, 0)
        ids = [next(first).id]
    assert [*ids, *(token.id for token in first)] == expected[1]


def test_tokens_beyond_the_shown_ones_are_few() -> None:
    """An iteration that ends at a stop sequence leaves at most AHEAD tokens that nobody reads."""
    graph, _ = engines(small(context=1000))
    steps: list[None] = []
    engine = GraphEngine(graph.model, CHARACTERS, lambda step: lambda: (steps.append(None), step())[1])
    found = engine.generate([EncodedPrompt("", [1], [1])], GenerationConfig(max_tokens=500), 0)
    shown = [next(found) for _ in range(20)]
    found.close()
    assert len(shown) <= len(steps) + 1 <= len(shown) + module.AHEAD


def test_logits_that_are_not_finite_are_an_error_unless_they_are_of_padding() -> None:
    """Later ones, of tokens that a graph has computed, give some token of the vocabulary, as on the plain path."""
    graph, _ = engines(small(vocab_size=16, tie=False))
    assert graph.model.output is not None
    with torch.no_grad():
        graph.model.output.weight[13:] = float("nan")
    assert tokens(graph, [[1]]) == tokens(TorchEngine(graph.model, CHARACTERS), [[1]])
    with torch.no_grad():
        graph.model.output.weight[5] = float("nan")
    with pytest.raises(TinyLMError, match="not finite"):
        tokens(graph, [[1]])
    sampler = Sampler(SamplingConfig(), 2, 13)
    sampler.start(0)
    sampler.prepare()
    assert all(0 <= token < 13 for token in sampler.sample(torch.full((2, 16), float("nan"))).flatten().tolist())


def with_graphs(model: Model, capture: Callable[[Step], Step], notes: list[str]) -> Model:
    """The model with the engine that it has on a GPU, where `capture` captures."""
    network, reporter = model.engine.torch.model, SimpleNamespace(note=notes.append)
    model.engine.torch = TorchEngine(network, model.tokenizer, GraphEngine(network, model.tokenizer, capture, reporter))
    return model


def test_a_model_generates_with_graphs_and_if_a_capture_fails_without(run: Path) -> None:
    """Plain calls replace graphs. The failure is noted."""
    notes: list[str] = []
    captured: list[Step] = []

    def capture(step: Step) -> Step:
        captured.append(step)
        if len(captured) > 1:
            raise RuntimeError("CUDA error: not permitted\nand much more")
        return step

    plain, model = tinylm.load(run), with_graphs(tinylm.load(run), capture, notes)
    settings: dict[str, Any] = {"max_tokens": 40, "seed": 1, "engine": "torch"}
    # With a first capture, with the same again, with one that fails, and without another one after it
    for others, captures in (({}, 1), ({}, 1), ({"top_k": 3}, 2), ({"top_k": 4}, 2)):
        assert model.generate("the", **settings, **others) == plain.generate("the", **settings, **others)
        assert len(captured) == captures
    assert notes == ["Capturing a CUDA graph failed (CUDA error: not permitted); continuing without it."]


def test_the_caches_of_the_last_request_are_freed_before_those_of_another_kind() -> None:
    graph, _ = engines(small())
    steps: list[Any] = []

    def capture(step: Step) -> Step:
        assert all(earlier() is None for earlier in steps)
        steps.append(weakref.ref(step))
        return step

    engine = GraphEngine(graph.model, CHARACTERS, capture)
    for count in (1, 2, 3):
        tokens(engine, PROMPTS[:count])
    assert len(steps) == 3


def test_another_adapter_is_captured_anew(run: Path, adapter: Path) -> None:
    """The scale of an adapter is a constant of the graph."""
    captured: list[Step] = []
    plain, model = tinylm.load(run, adapters=[adapter]), tinylm.load(run, adapters=[adapter])
    model = with_graphs(model, lambda step: captured.append(step) or step, [])
    settings: dict[str, Any] = {"max_tokens": 40, "seed": 1, "engine": "torch"}
    for number, index in enumerate((0, None, 0), start=1):
        for chosen in (model, plain):
            chosen.select_adapter(index)
        assert model.generate("the", **settings) == plain.generate("the", **settings)
        assert len(captured) == number
