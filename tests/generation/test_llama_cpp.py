"""llama.cpp as the engine gives the tokens of torch. A double computes its part; llama.cpp itself is run by name:

pytest tests/generation/test_llama_cpp.py -m "llamacpp or not llamacpp"
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.formats.test_gguf_writer import CHARACTERS, own_model
from tests.generation.llama_cpp_double import LlamaCppDouble
from tinylm.errors import TinyLMError
from tinylm.formats.gguf_writer import write_gguf
from tinylm.generation import llama_cpp
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import generate
from tinylm.generation.llama_cpp import LlamaCppDecoder, import_llama_cpp
from tinylm.generation.sampler import Sampler
from tinylm.generation.speculative import generate_speculatively
from tinylm.model.decoder import Decoder

CONTEXT = 48  # of the models
CASES = ("untied", "experts", "llama", "qwen2")
PROMPTS = ([3], [1, 2, 3, 4, 5, 6, 7], list(range(20)) * 3)  # the last is longer than the context


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> LlamaCppDouble:
    double = LlamaCppDouble()
    monkeypatch.setattr(llama_cpp, "import_llama_cpp", lambda: double)
    return double


@pytest.fixture(params=["double", pytest.param("llama.cpp", marks=pytest.mark.llamacpp)])
def library(request: pytest.FixtureRequest) -> Any:
    if request.param == "double":
        return request.getfixturevalue("double")
    assert import_llama_cpp() is not None, "llama-cpp-python is not installed"
    return import_llama_cpp()


def opened(folder: Path, case: str = "modern", kind: str = "f32", threads: int = 1) -> tuple[Decoder, LlamaCppDecoder]:
    """A model in torch and in llama.cpp."""
    model, exported = own_model(case)
    write_gguf(folder / "model.gguf", exported, kind)
    return model.eval(), LlamaCppDecoder(folder / "model.gguf", model.context, threads)


def sampler(rows: int, temperature: float = 1.0) -> Sampler:
    return Sampler(SamplingConfig(temperature=temperature), 5, rows, CHARACTERS.vocab_size)


@pytest.mark.parametrize("case", ["modern", *(pytest.param(case, marks=pytest.mark.llamacpp) for case in CASES)])
def test_logits_and_texts_are_those_of_torch(case: str, library: Any, tmp_path: Path) -> None:
    """Texts of prompts of different lengths, also past the context, and of samples of one prompt."""
    models = opened(tmp_path, case, threads=2)
    ids = torch.randint(CHARACTERS.vocab_size, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = models[0].logits(models[0](ids).hidden)
    found = torch.tensor(models[1].last_logits(ids.numpy(), None, CONTEXT))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for prompts in (PROMPTS, [PROMPTS[1]] * 2, [PROMPTS[2]] * 2):
        ours, theirs = ([*generate(model, prompts, sampler(len(prompts)), CONTEXT)] for model in models)
        assert ours == theirs


def test_rejected_draft_tokens_leave_no_trace(library: Any, tmp_path: Path) -> None:
    """The draft proposes the tokens of the text itself, with every third one changed."""
    reference, model = opened(tmp_path)
    prompt = [1, 2, 3]
    expected = [*generate(reference, [prompt], sampler(1), CONTEXT)]
    complete = prompt + [token for (token,) in expected]

    class Draft:
        def propose(self, text: Any, limit: int) -> list[int]:
            coming = complete[len(text) : len(text) + limit]
            return [token if (len(text) + index) % 3 else 1 - min(token, 1) for index, token in enumerate(coming)]

    assert [*generate_speculatively(model, prompt, sampler(1), CONTEXT, Draft())] == expected


def test_a_file_that_cannot_be_opened_is_deleted_and_a_failure_is_an_error(
    double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, model = opened(tmp_path)
    monkeypatch.setattr(double, "llama_decode", lambda context, batch: 1)
    with pytest.raises(TinyLMError, match="could not compute"):
        model.last_logits(np.array([[1]]), model.make_cache(1, 5), 1)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and nothing else")
    with pytest.raises(TinyLMError, match=r"cannot open .*model\.gguf"):
        LlamaCppDecoder(file, CONTEXT, threads=1)
    assert not file.exists()


def test_keys_and_values_have_16_bits_if_weights_have_fewer_than_32_and_several_rows_use_flash_attention(
    double: LlamaCppDouble, tmp_path: Path
) -> None:
    f32, f16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
    for kind, rows, bits, flash in (("f32", 1, f32, 0), ("f32", 3, f32, 0), ("f16", 1, f16, 0), ("q8_0", 3, f16, -1)):
        opened(tmp_path, kind=kind)[1].make_cache(rows, 9)
        options = double.contexts[-1]
        assert (options.type_k, options.type_v, options.flash_attn_type) == (bits, bits, flash), (kind, rows)
