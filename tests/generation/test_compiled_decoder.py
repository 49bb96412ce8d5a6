import copy
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.variants import VARIANTS, randomised, small
from tinylm.cache_directory import is_private
from tinylm.device import can_compile
from tinylm.generation import compiled_decoder as module
from tinylm.generation.compiled_decoder import (
    PACKAGE,
    CompiledDecoder,
    code_file,
    compile_decoder,
    load_compiled,
    obstacle,
    source_digest,
    trace,
)
from tinylm.generation.fuse_layers import fuse_model
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import NextTokenModel, generate
from tinylm.generation.quantize import Int8Linear
from tinylm.generation.sampler import Sampler
from tinylm.generation.speculative import generate_speculatively
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.model.kv_cache import KVCache
from tinylm.model_config import ModelConfig

needs_compiler = pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")

IDS = torch.randint(8, (1, 24), generator=torch.Generator().manual_seed(0))
# The second has input widths that the int8 kernel pads, and vectors so short that the compiler could inline them.
SHAPES = {
    "modern": (small(ffn_width=64), False),  # its dot products are computed as partial sums
    "gpt2, int8": (
        small("gpt2", kv_heads=2, heads=2, width=8, ffn_width=40, vocab_size=8, tie=False),
        True,
    ),
}
compilable = pytest.mark.parametrize(
    "config", [pytest.param(c, id=name) for name, c in VARIANTS if c.local_window is None and c.experts == 1]
)


def decoder(config: ModelConfig, seed: int = 0, int8: bool = False) -> Decoder:
    model = randomised(build_model(config), seed).eval()
    assert isinstance(model, Decoder)
    fuse_model(model, int8, prepack=False)
    return model


def exact_logits(config: ModelConfig, seed: int = 0, int8: bool = False) -> torch.Tensor:
    """Logits of the unfused model in float64, without a cache. With `int8`, its weights are the dequantized ones."""
    exact = randomised(build_model(config), seed).eval()
    if int8:
        quantized = copy.deepcopy(exact)
        fuse_model(quantized, int8=True)
        for name, layer in exact.named_modules():
            if isinstance(layer, torch.nn.Linear) and not name.endswith(("q_proj", "k_proj", "v_proj")):
                copy_dequantized(layer, quantized.get_submodule(name), slice(None))
            elif name.endswith("attention"):
                width = exact.get_submodule(f"{name}.q_proj").out_features
                fused = quantized.get_submodule(f"{name}.qkv_proj")
                for number, part in enumerate("qkv"):
                    rows = slice(number * width, (number + 1) * width)
                    copy_dequantized(exact.get_submodule(f"{name}.{part}_proj"), fused, rows)
    with torch.inference_mode():
        return exact.double().logits(exact(IDS).hidden).float()


def copy_dequantized(layer: torch.nn.Module, quantized: torch.nn.Module, rows: slice) -> None:
    assert isinstance(layer, torch.nn.Linear) and isinstance(quantized, Int8Linear)
    with torch.no_grad():
        weight = quantized.weight[rows, : layer.in_features].float() * quantized.scale[rows].float().unsqueeze(1)
        assert 0 < (weight - layer.weight).abs().max() < 0.01
        layer.weight.copy_(weight)


def generated(model: Decoder | CompiledDecoder, vocab_size: int, tokens: int = 60) -> list[list[int]]:
    """Tokens after a prompt of three, past the context of 24 and two advances of the window."""
    return list(generate(model, [[1, 2, 3]], Sampler(SamplingConfig(), 1, 1, vocab_size), tokens))


def step_by_step(model: NextTokenModel, ids: torch.Tensor) -> torch.Tensor:
    cache = model.make_cache(1, model.context)
    with torch.inference_mode():
        return torch.cat([model.last_logits(token, cache, 1) for token in ids.split(1, dim=1)], dim=1)


class EagerStep(CompiledDecoder):
    """Runs the step that would be compiled, without compiling it."""

    def __init__(self, model: Decoder) -> None:
        step = module._Step(model)
        layers = len(model.layers)

        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            ids, slots, *cache = inputs
            return [step(ids, slots, cache[:layers], cache[layers:])]

        super().__init__(model, run)


def assert_close(found: torch.Tensor, expected: torch.Tensor, fraction_of_largest: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=fraction_of_largest * float(expected.abs().max()))


@compilable
def test_the_step_before_compiling_has_the_logits_of_the_model(config: ModelConfig) -> None:
    assert obstacle(decoder(config)) is None
    assert_close(step_by_step(EagerStep(decoder(config)), IDS), exact_logits(config), fraction_of_largest=1e-3)


@pytest.mark.slow
@compilable
def test_the_exported_step_has_the_logits_of_the_model_at_any_number_of_slots(config: ModelConfig) -> None:
    traced = trace(decoder(config)).module()

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        ids, slots, *cache = inputs
        half = len(cache) // 2
        return [traced(ids, slots, cache[:half], cache[half:])]

    found = step_by_step(CompiledDecoder(decoder(config), run), IDS)
    assert_close(found, exact_logits(config), fraction_of_largest=1e-3)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[ModelConfig, bool]:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def code(shape: tuple[ModelConfig, bool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Code that was compiled on two threads, with other weights than those it is tested with."""
    config, int8 = shape
    file = code_file(tmp_path_factory.mktemp("code") / "new", config, int8)
    torch.set_num_threads(2)
    compile_decoder(decoder(config, seed=7, int8=int8), file)
    torch.set_num_threads(1)
    assert list(file.parent.iterdir()) == [file] and is_private(file)
    yield file


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_compiled_code_has_the_logits_of_every_model_of_its_shape(
    shape: tuple[ModelConfig, bool], code: Path, seed: int, threads: int
) -> None:
    """The first and last slots use the eager int8 kernel, which rounds its inputs: hence the tolerance for int8."""
    config, int8 = shape
    torch.set_num_threads(threads)
    found = step_by_step(load_compiled(decoder(config, seed, int8), code), IDS)
    torch.set_num_threads(1)
    expected = exact_logits(config, seed, int8)
    assert_close(found, expected, fraction_of_largest=0.05 if int8 else 1e-4)


@pytest.mark.slow
@needs_compiler
def test_compiled_code_does_not_round_the_inputs_of_int8_products(code: Path, shape: tuple[ModelConfig, bool]) -> None:
    """All slots but the last. The keys and values of the first token come from the step before compiling."""
    config, int8 = shape
    model = decoder(config, int8=int8)
    eager, compiled, cache = EagerStep(model), load_compiled(model, code), model.make_cache(1, 24)
    layers = [layer for layer in cache if isinstance(layer, KVCache)]
    with torch.inference_mode():
        run = eager._run
        run([IDS[:, :1], torch.empty(1), *(layer.keys for layer in layers), *(layer.values for layer in layers)])
        for layer in layers:
            layer.offset = 1
        found = torch.cat([compiled.last_logits(token, cache, 1) for token in IDS[:, 1:23].split(1, dim=1)], dim=1)
    assert_close(found, exact_logits(config, int8=int8)[:, 1:23], fraction_of_largest=1e-4)


@pytest.mark.slow
@needs_compiler
def test_compiled_code_generates_the_tokens_of_the_decoder(shape: tuple[ModelConfig, bool], code: Path) -> None:
    config, int8 = shape
    model = decoder(config, int8=int8)
    compiled = load_compiled(model, code)
    expected = generated(EagerStep(model) if int8 else model, config.vocab_size)
    assert generated(compiled, config.vocab_size) == generated(compiled, config.vocab_size) == expected
    assert len({token for (token,) in expected}) > 3


class RejectedDraft:
    """Proposes tokens that are nearly always rejected."""

    def propose(self, text: object, limit: int) -> list[int]:
        return [7] * min(limit, 2)


@pytest.mark.slow
@needs_compiler
def test_rejected_tokens_are_dropped_from_the_cache_of_compiled_code(
    shape: tuple[ModelConfig, bool], code: Path
) -> None:
    config, int8 = shape
    if int8:
        pytest.skip("draft tokens are computed by another kernel, with other rounding")
    model = decoder(config)
    sampler = Sampler(SamplingConfig(), 1, 1, 13)
    drafted = generate_speculatively(load_compiled(model, code), [1, 2, 3], sampler, 60, RejectedDraft(), 2)
    assert list(drafted) == generated(model, 13)


@pytest.mark.slow
@needs_compiler
def test_a_batch_of_texts_is_generated_by_the_eager_decoder(code: Path, shape: tuple[ModelConfig, bool]) -> None:
    config, int8 = shape
    model = decoder(config, int8=int8)

    def texts(model: NextTokenModel) -> list[list[int]]:
        sampler = Sampler(SamplingConfig(), 1, 2, config.vocab_size)
        return list(generate(model, [[1], [2, 3]], sampler, 40))

    assert texts(load_compiled(model, code)) == texts(model)


def test_the_file_depends_on_shape_format_processor_and_torch_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small()
    file = code_file(tmp_path, config, False)
    assert file == code_file(tmp_path, small(dropout=0.1, attention_dropout=0.2, initialisation="gpt2"), False)
    others = {
        code_file(tmp_path, config, True),
        code_file(tmp_path, dataclasses.replace(config, context=25), False),
        code_file(tmp_path, dataclasses.replace(config, rope_theta=100.0), False),
    }
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx9": True})
        others.add(code_file(tmp_path, config, False))
    monkeypatch.setattr(torch, "__version__", "3.0")
    others.add(code_file(tmp_path, config, False))
    assert len(others) == 5 and file not in others


def test_the_file_depends_on_the_source_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tinylm"
    shutil.copytree(PACKAGE, package)
    assert source_digest(package) == source_digest()
    for changed in ("model/attention.py", "kernels/onednn.py", "generation/compiled_decoder.py", "adapters/inject.py"):
        text = (package / changed).read_text()
        (package / changed).write_text(text + "\n")
        assert source_digest(package) != source_digest()
        (package / changed).write_text(text)
    file = code_file(tmp_path, small(), False)
    monkeypatch.setattr(module, "source_digest", lambda: "another")
    assert code_file(tmp_path, small(), False) != file


@pytest.mark.parametrize(
    "model, reason",
    [
        (decoder(small(local_window=3, local_layers=(0,))), "local_window"),
        (decoder(small(experts=2)), "experts"),
        (decoder(small(experts=2, expert_mode="merge")), "experts"),
        (decoder(small(context=6)), "the context of 6 tokens is too short"),
        (decoder(small()).to("meta"), "on meta"),
        (decoder(small()).bfloat16(), "for fp32 and `quantize"),
    ],
)
def test_the_reason_why_a_model_cannot_be_compiled_is_given(model: Decoder, reason: str) -> None:
    assert reason in (obstacle(model) or "")


def test_nothing_is_compiled_if_torch_does_not_report_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert "does not report the processor" in (obstacle(decoder(small())) or "")


def test_nothing_is_compiled_if_torch_has_no_loader_of_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_aoti")
    assert "cannot load compiled code" in (obstacle(decoder(small())) or "")


def test_prefill_and_the_first_and_last_slots_use_the_eager_decoder() -> None:
    model = decoder(small())
    slots: list[int] = []

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        slots.append(len(inputs[1]))
        return [torch.zeros(1, 1, 13)]

    compiled = CompiledDecoder(model, run)
    cache = compiled.make_cache(1, 24)
    for count in (1, 1, 3, 1, 16, 1, 1):
        compiled.last_logits(torch.zeros(1, count, dtype=torch.long), cache, 1)
    assert slots == [2, 6, 23]
    assert all(isinstance(layer, KVCache) and layer.offset == 24 for layer in cache)
