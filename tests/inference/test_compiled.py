import copy
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.variants import VARIANTS, randomised, small
from tinylm.cache import is_private
from tinylm.config import ModelConfig
from tinylm.device import can_compile
from tinylm.errors import TinyLMError
from tinylm.inference import compiled as module
from tinylm.inference.arrange import arrange
from tinylm.inference.compiled import (
    PACKAGE,
    CompiledDecoder,
    code_file,
    compile_decoder,
    load_compiled,
    obstacle,
    source_digest,
    trace,
)
from tinylm.inference.generator import NextTokenModel, generate, generate_from_draft
from tinylm.inference.quantize import Int8Linear
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.model.build import build_model
from tinylm.model.cache import KVCache
from tinylm.model.decoder import Decoder

needs_compiler = pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")

IDS = torch.randint(8, (1, 24), generator=torch.Generator().manual_seed(0))
# The second has inputs that the kernel of eight bits pads, and vectors that a compiler would write into the code.
SHAPES = {
    "modern": (small(ffn_width=64), False),  # whose sums are cut in four
    "gpt2, in eight bits": (
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
    arrange(model, int8, packed=False)
    return model


def exact_logits(config: ModelConfig, seed: int = 0, int8: bool = False) -> torch.Tensor:
    """Of the model as it was, in float64 and without a cache; in eight bits by what those stand for."""
    exact = randomised(build_model(config), seed).eval()
    if int8:
        rounded = copy.deepcopy(exact)
        arrange(rounded, int8=True)
        for name, layer in exact.named_modules():
            if isinstance(layer, torch.nn.Linear) and not name.endswith(("q_proj", "k_proj", "v_proj")):
                take_rounded(layer, rounded.get_submodule(name), slice(None))
            elif name.endswith("attention"):
                width = exact.get_submodule(f"{name}.q_proj").out_features
                joined = rounded.get_submodule(f"{name}.qkv_proj")
                for number, part in enumerate("qkv"):
                    rows = slice(number * width, (number + 1) * width)
                    take_rounded(exact.get_submodule(f"{name}.{part}_proj"), joined, rows)
    with torch.inference_mode():
        return exact.double().logits(exact(IDS).hidden).float()


def take_rounded(layer: torch.nn.Module, rounded: torch.nn.Module, rows: slice) -> None:
    assert isinstance(layer, torch.nn.Linear) and isinstance(rounded, Int8Linear)
    with torch.no_grad():
        weight = rounded.weight[rows, : layer.in_features].float() * rounded.scale[rows].float().unsqueeze(1)
        assert 0 < (weight - layer.weight).abs().max() < 0.01
        layer.weight.copy_(weight)


def written(model: Decoder | CompiledDecoder, vocab_size: int, tokens: int = 60) -> list[list[int]]:
    """From a prompt of three tokens, past the context of 24 and two of its windows."""
    return list(generate(model, [[1, 2, 3]], Sampler(Sampling(), 1, 1, model.device, vocab_size), tokens))


def step_by_step(model: NextTokenModel, ids: torch.Tensor) -> torch.Tensor:
    cache = model.make_cache(1, model.context)
    with torch.inference_mode():
        return torch.cat([model.last_logits(token, cache, 1) for token in ids.split(1, dim=1)], dim=1)


class Slots(CompiledDecoder):
    """By the step that would be compiled, as it is."""

    def __init__(self, model: Decoder) -> None:
        step = module._Step(model)
        layers = len(model.layers)

        def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
            ids, slots, *cache = given
            return [step(ids, slots, cache[:layers], cache[layers:])]

        super().__init__(model, run)


def assert_close(found: torch.Tensor, expected: torch.Tensor, of_largest: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=of_largest * float(expected.abs().max()))


@compilable
def test_the_step_that_is_compiled_computes_what_the_model_does(config: ModelConfig) -> None:
    assert obstacle(decoder(config)) is None
    assert_close(step_by_step(Slots(decoder(config)), IDS), exact_logits(config), of_largest=1e-3)


@compilable
def test_the_step_can_be_traced_for_any_number_of_slots(config: ModelConfig) -> None:
    traced = trace(decoder(config)).module()

    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        ids, slots, *cache = given
        half = len(cache) // 2
        return [traced(ids, slots, cache[:half], cache[half:])]

    found = step_by_step(CompiledDecoder(decoder(config), run), IDS)
    assert_close(found, exact_logits(config), of_largest=1e-3)


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[ModelConfig, bool]:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def code(shape: tuple[ModelConfig, bool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Compiled for other weights than those it is used for, with as many threads as there are."""
    config, int8 = shape
    file = code_file(tmp_path_factory.mktemp("code") / "new", config, int8)
    torch.set_num_threads(2)
    compile_decoder(decoder(config, seed=7, int8=int8), file)
    torch.set_num_threads(1)
    assert list(file.parent.iterdir()) == [file] and is_private(file)
    yield file


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_compiled_code_serves_every_model_of_the_shape_it_was_compiled_for(
    shape: tuple[ModelConfig, bool], code: Path, seed: int, threads: int
) -> None:
    """The kernel for eight bits, which the first slot and the last are left to, rounds what it multiplies."""
    config, int8 = shape
    torch.set_num_threads(threads)
    found = step_by_step(load_compiled(decoder(config, seed, int8), code), IDS)
    torch.set_num_threads(1)
    expected = exact_logits(config, seed, int8)
    assert_close(found, expected, of_largest=0.05 if int8 else 1e-4)


@needs_compiler
def test_compiled_code_in_eight_bits_multiplies_what_it_is_given_exactly(
    code: Path, shape: tuple[ModelConfig, bool]
) -> None:
    """All slots but the last, with the first token's by the step as it is."""
    config, int8 = shape
    model = decoder(config, int8=int8)
    exactly, compiled, cache = Slots(model), load_compiled(model, code), model.make_cache(1, 24)
    layers = [layer for layer in cache if isinstance(layer, KVCache)]
    with torch.inference_mode():
        run = exactly._run
        run([IDS[:, :1], torch.empty(1), *(layer.keys for layer in layers), *(layer.values for layer in layers)])
        for layer in layers:
            layer.offset = 1
        found = torch.cat([compiled.last_logits(token, cache, 1) for token in IDS[:, 1:23].split(1, dim=1)], dim=1)
    assert_close(found, exact_logits(config, int8=int8)[:, 1:23], of_largest=1e-4)


@needs_compiler
def test_compiled_code_writes_what_the_decoder_writes(shape: tuple[ModelConfig, bool], code: Path) -> None:
    config, int8 = shape
    model = decoder(config, int8=int8)
    compiled = load_compiled(model, code)
    expected = written(Slots(model) if int8 else model, config.vocab_size)
    assert written(compiled, config.vocab_size) == written(compiled, config.vocab_size) == expected
    assert len({token for (token,) in expected}) > 3


class Wrong:
    """A draft whose guesses are nearly never right."""

    def guess(self, text: object, most: int) -> list[int]:
        return [7] * min(most, 2)


@needs_compiler
def test_a_wrong_guess_is_taken_back_from_what_compiled_code_goes_on_with(
    shape: tuple[ModelConfig, bool], code: Path
) -> None:
    config, int8 = shape
    if int8:
        pytest.skip("guesses are computed by another kernel, with other rounding")
    model = decoder(config)
    sampler = Sampler(Sampling(), 1, 1, model.device, 13)
    drafted = generate_from_draft(load_compiled(model, code), [1, 2, 3], sampler, 60, Wrong(), 2)
    assert list(drafted) == written(model, 13)


@needs_compiler
def test_several_texts_are_written_as_before(code: Path, shape: tuple[ModelConfig, bool]) -> None:
    config, int8 = shape
    model = decoder(config, int8=int8)

    def texts(model: NextTokenModel) -> list[list[int]]:
        sampler = Sampler(Sampling(), 1, 2, model.device, config.vocab_size)
        return list(generate(model, [[1], [2, 3]], sampler, 40))

    assert texts(load_compiled(model, code)) == texts(model)


def test_a_file_that_is_no_code_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "code.pt2"
    file.write_bytes(b"no code")
    with pytest.raises(TinyLMError, match=r"code\.pt2 could not be loaded .*, and was removed; --compile on"):
        load_compiled(decoder(small()), file)
    assert not file.exists()


def test_a_compiler_that_fails_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, package_path: str, **__: object) -> None:
        Path(package_path).write_bytes(b"half of it")
        raise RuntimeError("no compiler was found\nand much more")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fail)
    with pytest.raises(TinyLMError, match=r"Compiling failed \(no compiler was found\); --compile off"):
        compile_decoder(decoder(small()), tmp_path / "code" / "code.pt2")
    assert list((tmp_path / "code").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TinyLMError, match=r"Cannot keep compiled code in .*code: Not a dir.* Set TINYLM_CACHE"):
        compile_decoder(decoder(small()), tmp_path / "file" / "code" / "code.pt2")


def test_code_is_for_one_shape_format_processor_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_code_is_for_the_source_that_it_was_compiled_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tinylm"
    shutil.copytree(PACKAGE, package)
    assert source_digest(package) == source_digest()
    for changed in ("model/attention.py", "inference/compiled.py", "inference/arrange.py", "adapters/inject.py"):
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
        (decoder(small(local_window=3, local_layers=(0,))), "--local-window"),
        (decoder(small(experts=2)), "experts"),
        (decoder(small(experts=2, expert_mode="merge")), "experts"),
        (decoder(small(context=6)), "a context of 6 is too short"),
        (decoder(small()).to("meta"), "on meta"),
        (decoder(small()).bfloat16(), "for fp32 and --quantize int8"),
    ],
)
def test_what_cannot_be_compiled_is_said(model: Decoder, reason: str) -> None:
    assert reason in (obstacle(model) or "")


def test_nothing_is_compiled_where_torch_cannot_tell_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert "which processor" in (obstacle(decoder(small())) or "")


def test_a_prompt_and_the_first_and_last_slots_are_left_to_the_decoder() -> None:
    model = decoder(small())
    seen: list[int] = []

    def run(given: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(len(given[1]))
        return [torch.zeros(1, 1, 13)]

    compiled = CompiledDecoder(model, run)
    cache = compiled.make_cache(1, 24)
    for count in (1, 1, 3, 1, 16, 1, 1):
        compiled.last_logits(torch.zeros(1, count, dtype=torch.long), cache, 1)
    assert seen == [2, 6, 23]
    assert all(isinstance(layer, KVCache) and layer.offset == 24 for layer in cache)
