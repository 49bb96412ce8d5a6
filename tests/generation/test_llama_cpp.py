"""llama.cpp as the engine gives the tokens of torch. A double computes its part; llama.cpp itself is run by name:

pytest tests/generation/test_llama_cpp.py -m "llamacpp or not llamacpp"
"""

import itertools
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.formats.test_gguf_writer import BPE, CHARACTERS, SIZES, own_model
from tests.generation.llama_cpp_double import LlamaCppDouble
from tinylm.errors import TinyLMError
from tinylm.formats.gguf_writer import write_gguf
from tinylm.formats.imported import ForeignModel
from tinylm.generation import llama_cpp
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.generator import generate
from tinylm.generation.llama_cpp import FIRST_WAIT, TRIAL_STEPS, LlamaCppDecoder, fastest_threads, import_llama_cpp
from tinylm.generation.sampler import Sampler
from tinylm.generation.speculative import generate_speculatively
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.presets import make_model_config
from tinylm.run_config import SpecialTokens

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


def test_rows_that_pad_the_embedding_have_the_logits_of_torch(library: Any, tmp_path: Path) -> None:
    config = make_model_config(vocab_size=BPE.vocab_size + 7, size="nano", preset="modern", **SIZES)
    model = build_model(config).eval()
    assert isinstance(model, Decoder)
    exported = ForeignModel(None, config, model.state_dict(), BPE.to_str(), SpecialTokens(), None)
    write_gguf(tmp_path / "model.gguf", exported, "f32")
    ids = torch.tensor([[1, 2]])
    with torch.inference_mode():
        expected = model.logits(model(ids).hidden)
    found = LlamaCppDecoder(tmp_path / "model.gguf", model.context, threads=1).last_logits(ids.numpy(), None, 2)
    assert found.shape == (1, 2, BPE.vocab_size + 7)
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=1e-4)


def test_a_file_that_cannot_be_opened_is_deleted_and_named(library: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and nothing else")
    with pytest.raises(TinyLMError, match=r"cannot open .*model\.gguf"):
        LlamaCppDecoder(file, CONTEXT, threads=1)
    assert not file.exists()


def test_samples_process_their_prompt_once_and_the_model_is_freed_after_its_contexts(
    double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also after a failure."""
    _, model = opened(tmp_path)
    [*generate(model, [[1, 2, 3]] * 4, sampler(4), 3)]
    assert double.decoded == [3, 4, 4]
    assert double.freed == ["context"]
    cache = model.make_cache(1, 5)
    monkeypatch.setattr(double, "llama_decode", lambda context, batch: 1)
    with pytest.raises(TinyLMError, match="could not compute") as error:
        model.last_logits(np.array([[1]]), cache, 1)
    del model, error
    assert double.freed == ["context"]
    del cache
    assert double.freed == ["context", "context", "model"]


def test_options_that_llama_cpp_needs_for_correct_and_reproducible_logits(
    double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys and values have 16 bits if weights have fewer than 32; several rows use flash attention then. Weights are
    not stored for AMX, where llama.cpp crashes."""
    f32, f16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16
    for kind, rows, bits, flash in (("f32", 1, f32, 0), ("f32", 3, f32, 0), ("f16", 1, f16, 0), ("q8_0", 3, f16, -1)):
        opened(tmp_path, kind=kind)[1].make_cache(rows, 9)
        options = double.contexts[-1]
        assert (options.type_k, options.type_v, options.flash_attn_type) == (bits, bits, flash), (kind, rows)
    given: list[Any] = []
    monkeypatch.setattr(double, "llama_model_load_from_file", lambda path, options: given.append(options))
    for processor in ("x86_64", "AMD64", "arm64"):
        monkeypatch.setattr(llama_cpp.platform, "machine", lambda processor=processor: processor)
        with pytest.raises(TinyLMError, match="cannot open"):
            LlamaCppDecoder(tmp_path / "model.gguf", CONTEXT, threads=1)
        assert getattr(given[-1], "use_extra_bufts", True) == (processor == "arm64")


def always(threads: int) -> Generator[int, float, None]:
    """As `fastest_threads`, without trials."""
    while True:
        yield threads


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("case", "kind", "rows"),
    [("modern", "f32", 1), ("llama", "f32", 5), ("modern", "f16", 2), ("llama", "f16", 1), ("modern", "q8_0", 5)],
)
def test_logits_do_not_depend_on_the_number_of_threads_and_are_close_to_those_of_torch(
    case: str, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of prompts and of single tokens, after more than the 512 from which llama.cpp splits a row among threads."""
    length, steps = 600, 3
    model, exported = own_model(case, context=1024)
    write_gguf(tmp_path / "model.gguf", exported, kind)
    ids = torch.randint(CHARACTERS.vocab_size, (rows, length + steps), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model.eval().logits(model(ids).hidden)[:, length - 1 :].numpy()
    found = []
    monkeypatch.setattr(llama_cpp, "fastest_threads", always)
    for threads in (1, 2, 3):
        decoder = LlamaCppDecoder(tmp_path / "model.gguf", 1024, threads)
        cache = decoder.make_cache(rows, length + steps)
        first = decoder.last_logits(ids[:, :length].numpy(), cache, 1)
        single = [decoder.last_logits(ids[:, i : i + 1].numpy(), cache, 1) for i in range(length, length + steps)]
        found.append(np.concatenate([first, *single], axis=1))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    tolerance = {"f32": 1e-4, "f16": 1e-2, "q8_0": 0.1}[kind] * np.abs(expected).max()
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=tolerance)


def chosen(seconds: dict[int, Iterable[float]], steps: int) -> list[int]:
    """The numbers of threads of each step, where a step with n threads takes the next of `seconds[n]`."""
    times = {count: iter(each) for count, each in seconds.items()}
    threads = fastest_threads(max(times))
    counts = [next(threads)]
    for _ in range(steps):
        counts.append(threads.send(next(times[counts[-1]])))
    return counts


def test_most_steps_have_the_fastest_number_of_threads_and_others_are_tried_ever_more_rarely() -> None:
    for fastest in (1, 2, 4, 6):
        counts = chosen({count: itertools.repeat(1.0 if count == fastest else 1.5) for count in (1, 2, 4, 6)}, 2000)
        assert counts.count(fastest) > 0.9 * len(counts)
    slows_down = itertools.chain(itertools.repeat(1.0, 1000), itertools.repeat(9.0))
    counts = chosen({1: itertools.repeat(2.0), 2: slows_down}, 4000)
    assert counts[100:1000].count(2) > 800 and counts[-1000:].count(1) > 900
    # Steps of 0.1 ms with two threads, of which each fortieth waits 8 ms for another process; 0.2 ms with one thread.
    counts = chosen({1: itertools.repeat(2e-4), 2: itertools.cycle([1e-4] * 39 + [8e-3])}, 20_000)
    assert counts.count(1) > 0.9 * len(counts)
    counts = chosen({1: itertools.repeat(20.0), 2: itertools.repeat(1.0)}, 3000)
    tried = [step for step, count in enumerate(counts) if count == 1]
    trial = TRIAL_STEPS + 1  # those of the fastest number, and one of the other
    waits = [tried[0] + 1 - trial, *(later - earlier - trial for earlier, later in itertools.pairwise(tried))]
    assert waits == [FIRST_WAIT * 2**number for number in range(8)]
