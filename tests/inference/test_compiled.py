import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.variants import VARIANTS, randomised, small
from tinylm.config import ModelConfig
from tinylm.device import can_compile
from tinylm.errors import TinyLMError
from tinylm.inference import compiled as module
from tinylm.inference.arrange import arrange
from tinylm.inference.compiled import CompiledDecoder, code_file, compile_decoder, load_compiled, obstacle
from tinylm.inference.generator import NextTokenModel, generate, generate_from_draft
from tinylm.inference.sampler import Sampler, Sampling
from tinylm.model.build import build_model
from tinylm.model.cache import KVCache
from tinylm.model.decoder import Decoder

needs_compiler = pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")

SHAPES = {
    "modern": (small(), False),
    "gpt2, in eight bits": (small("gpt2", kv_heads=4, ffn_width=40), True),  # 40 inputs, which the kernel pads to 48
}


def decoder(config: ModelConfig, seed: int = 0, int8: bool = False) -> Decoder:
    model = randomised(build_model(config), seed).eval()
    assert isinstance(model, Decoder)
    arrange(model, int8, packed=False)
    return model


def written(model: NextTokenModel, tokens: int = 60) -> list[list[int]]:
    """From a prompt of three tokens, past the context of 24 and two of its windows."""
    return list(generate(model, [[1, 2, 3]], Sampler(Sampling(), 1, 1, model.device, 13), tokens))


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


@pytest.mark.parametrize(
    "config", [pytest.param(config, id=name) for name, config in VARIANTS if config.local_window is None]
)
def test_the_step_that_is_compiled_computes_what_the_model_does(config: ModelConfig) -> None:
    """Against the model as it was in float64, without a cache."""
    exact = randomised(build_model(config)).double()
    ids = torch.randint(config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = exact.logits(exact(ids).hidden).float()
    found = step_by_step(Slots(decoder(config)), ids)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> tuple[ModelConfig, bool]:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def code(shape: tuple[ModelConfig, bool], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    config, int8 = shape
    folder = tmp_path_factory.mktemp("code")
    file = code_file(folder / "new", config, decoder(config, int8=int8), int8)
    compile_decoder(decoder(config, seed=7, int8=int8), file)
    assert list(file.parent.iterdir()) == [file]
    return file


@needs_compiler
def test_compiled_code_serves_every_model_of_the_shape_it_was_compiled_for(
    shape: tuple[ModelConfig, bool], code: Path
) -> None:
    """The code was compiled for other weights. Eight bits are compared with the step as it is, since the kernel for
    them rounds what it multiplies.
    """
    config, int8 = shape
    ids = torch.randint(config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(0))
    for seed in (0, 1):
        model = decoder(config, seed, int8)
        expected = step_by_step(Slots(model) if int8 else model, ids)
        found = step_by_step(load_compiled(model, code), ids)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@needs_compiler
def test_compiled_code_writes_what_the_decoder_writes(shape: tuple[ModelConfig, bool], code: Path) -> None:
    config, int8 = shape
    model = decoder(config, int8=int8)
    expected = written(Slots(model) if int8 else model)
    compiled = load_compiled(model, code)
    assert written(compiled) == written(compiled) == expected
    assert len({token for (token,) in expected}) > 3


class Wrong:
    """A draft whose guesses are nearly never right."""

    def guess(self, text: object, most: int) -> list[int]:
        return [12] * min(most, 2)


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
    assert list(drafted) == written(model)


@needs_compiler
def test_several_texts_are_written_as_before(code: Path, shape: tuple[ModelConfig, bool]) -> None:
    config, int8 = shape
    model = decoder(config, int8=int8)

    def texts(model: NextTokenModel) -> list[list[int]]:
        return list(generate(model, [[1], [2, 3]], Sampler(Sampling(), 1, 2, model.device, 13), 40))

    assert texts(load_compiled(model, code)) == texts(model)


def test_a_file_that_is_no_code_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "code.pt2"
    file.write_bytes(b"no code")
    with pytest.raises(TinyLMError, match=r"code\.pt2 cannot be loaded"):
        load_compiled(decoder(small()), file)


def test_a_compiler_that_fails_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, package_path: str, **__: object) -> None:
        Path(package_path).write_bytes(b"half of it")
        raise RuntimeError("no compiler was found\nand much more")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fail)
    with pytest.raises(TinyLMError, match=r"torch cannot compile this model \(no compiler was found\)"):
        compile_decoder(decoder(small()), tmp_path / "code" / "code.pt2")
    assert list((tmp_path / "code").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TinyLMError, match=r"Cannot keep compiled code in .*code: Not a dir.* Set TINYLM_CACHE"):
        compile_decoder(decoder(small()), tmp_path / "file" / "code" / "code.pt2")


def test_code_is_for_one_shape_format_and_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model = small(), decoder(small())
    file = code_file(tmp_path, config, model, False)
    assert file == code_file(tmp_path, small(), decoder(small(), seed=1), False)
    others = {
        code_file(tmp_path, config, model, True),
        code_file(tmp_path, dataclasses.replace(config, context=25), model, False),
        code_file(tmp_path, config, decoder(config).bfloat16(), False),
    }
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    others.add(code_file(tmp_path, config, model, False))
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "3.0")
    others.add(code_file(tmp_path, config, model, False))
    assert len(others) == 5 and file not in others


def test_layers_that_forget_and_other_devices_are_not_compiled() -> None:
    assert obstacle(decoder(small())) is None
    assert "--local-window" in (obstacle(decoder(small(local_window=3, local_layers=(0,)))) or "")
    assert "on meta" in (obstacle(decoder(small()).to("meta")) or "")


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
