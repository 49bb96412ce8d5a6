"""llama.cpp as the engine gives the tokens of torch; the file that it reads from the cache, and the record with which
the model's own files are not opened again. A double computes its part; llama.cpp itself is run by name:

pytest tests/generation/test_engine.py -m "llamacpp or not llamacpp"
"""

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import tinylm
from tests.formats.test_gguf_writer import CHARACTERS, own_model
from tests.generation.llama_cpp_double import LlamaCppDouble
from tests.shell import CHILD_LIMIT, assert_error, environment, run_ok, story
from tests.shell import tinylm as shell
from tinylm import files, loaded_model
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.gguf_writer import write_gguf
from tinylm.generation import converted_model, engine, llama_cpp
from tinylm.generation.converted_model import conversion_key, open_converted
from tinylm.generation.generation_config import GenerationConfig, SamplingConfig, SpeedConfig, torch_is_faster
from tinylm.generation.generator import generate
from tinylm.generation.llama_cpp import LlamaCppDecoder, import_llama_cpp
from tinylm.generation.sampler import Sampler
from tinylm.generation.speculative import generate_speculatively
from tinylm.model.decoder import Decoder
from tinylm.reporter import SilentReporter

CONTEXT = 48  # of the models
CASES = ("untied", "experts", "llama", "qwen2")
PROMPTS = ([3], [1, 2, 3, 4, 5, 6, 7], list(range(20)) * 3)  # the last is longer than the context
PROMPT = {"prompt": "the old man", "max_tokens": 40, "seed": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "text").write_text(story(4000))
    return tinylm.train(folder / "text", folder / "run", layers=2, heads=2, width=16, context=32, steps=5).run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(converted_model, "GPU_DEVICE_FILES", ())
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, cache: Path) -> LlamaCppDouble:
    """A substitute for an installed llama-cpp-python."""
    double = LlamaCppDouble()
    for module in (engine, llama_cpp, converted_model):
        monkeypatch.setattr(module, "import_llama_cpp", lambda: double)
    return double


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, double: LlamaCppDouble) -> list[Any]:
    """The arguments of each call of `load`, which opens a model's own files."""
    calls, load = [], loaded_model.load
    monkeypatch.setattr(loaded_model, "load", lambda *args, **options: (calls.append(args), load(*args, **options))[1])
    return calls


def test_llama_cpp_is_used_where_it_is_installed_unless_torch_is_asked_for(run: Path, double: LlamaCppDouble) -> None:
    model = tinylm.load(run)
    for choices in ({"engine": "torch"}, {"cache": False}):
        expected = model.generate(**PROMPT, **choices)
        assert not double.opened
    assert model.generate(**PROMPT) == expected
    assert len(double.opened) == 1


def test_torch_is_taken_for_many_samples_whose_time_makes_up_for_its_import() -> None:
    """With 256 tokens per sample and the parameters of 12x768 with 50,257 ids."""
    large, eight, seven = 116_500_000, GenerationConfig(num_samples=8), GenerationConfig(num_samples=7)
    assert torch_is_faster([eight, eight], large)
    assert not torch_is_faster([eight, seven], large)
    assert not torch_is_faster([], large)
    long = GenerationConfig(num_samples=10, max_tokens=2000)
    assert torch_is_faster([long], 10_000_000) and not torch_is_faster([long], 9_999_999)


def test_a_file_is_written_once_for_each_model_and_again_if_others_can_write_it(
    run: Path, double: LlamaCppDouble, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the number format of the model. Those unused for longest are deleted."""
    expected = tinylm.load(run).generate(**PROMPT)
    written = {file: file.stat().st_ino for file in cache.iterdir()}
    tinylm.load(run).generate(**PROMPT)
    assert {file: file.stat().st_ino for file in cache.iterdir()} == written and len(written) == 1
    (file,) = written
    file.write_bytes(b"something else")
    file.chmod(0o666)
    assert tinylm.load(run).generate(**PROMPT) == expected
    other = tinylm.load(run)
    other.network.embedding.weight.data += 1
    other.generate(**PROMPT)
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(engine, "MAX_CACHED_BYTES", 1)
    tinylm.load(run, dtype="bf16").generate(**PROMPT)
    assert [file.stem.rpartition("-")[2] for file in cache.iterdir()] == ["bf16"]


@pytest.fixture(scope="module")
def lora(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text").write_text(story(4000, seed=1))
    return tinylm.finetune_lora(
        folder / "text", model=trained, out=folder / "lora", steps=40, lr=0.02, target=["all"]
    ).run


def test_loras_are_merged_at_their_scales(run: Path, lora: Path, double: LlamaCppDouble) -> None:
    texts = set()
    for adapter, selected in ((lora, None), (lora, 0), (f"{lora}=0.5", 0)):
        model = tinylm.load(run, adapters=[adapter])
        model.select_adapter(selected)
        texts.add(model.generate(**PROMPT))
        assert model.generate(**PROMPT, engine="torch") in texts
    assert len(double.opened) == len(texts) == 3


def test_what_llama_cpp_cannot_run_is_named_and_sampled_by_torch(
    run: Path, lora: Path, double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(story(4000))
    options = {"layers": 1, "heads": 2, "width": 16, "context": 32, "steps": 1, "position": "relative"}
    relative = tinylm.train(tmp_path / "text", tmp_path / "relative", **options).run
    bottleneck = tinylm.finetune_adapter(tmp_path / "text", model=run, out=tmp_path / "bottleneck", steps=1).run
    models = {
        "relative": tinylm.load(relative),
        "bottleneck adapter, which cannot be merged": tinylm.load(run, adapters=[bottleneck]),
        "has several adapters": tinylm.load(run, adapters=[lora, lora]),
        "llama-cpp-python is not installed": tinylm.load(run),
    }
    for reason, model in models.items():
        if "installed" in reason:
            monkeypatch.setattr(engine, "import_llama_cpp", lambda: None)
        assert model.generate(**PROMPT) == model.generate(**PROMPT, engine="torch")
        with pytest.raises(UsageError, match=rf'`engine="llama.cpp"` is not possible: .*{reason}'):
            model.generate(**PROMPT, engine="llama.cpp")
    prepared = tinylm.load(run)
    prepared.prepare_generation(SpeedConfig(engine="torch"))  # its fused layers have other names and shapes
    with pytest.raises(UsageError, match="prepared for torch; load it again"):
        prepared.generate(**PROMPT, engine="llama.cpp")
    with pytest.raises(UsageError, match="prompts choose their adapters"):
        tinylm.load(run).prepare_generation(SpeedConfig(engine="llama.cpp"), switches_adapters=True)
    assert not double.opened


def test_a_full_disk_leads_to_torch_unless_llama_cpp_is_demanded(
    run: Path, double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **options: Any) -> str:
        raise TinyLMError("Cannot write x.gguf: No space left on device.")

    monkeypatch.setattr(engine, "write_gguf", full)
    model = tinylm.load(run)
    assert model.generate(**PROMPT) == model.generate(**PROMPT, engine="torch")
    assert "llama.cpp is not used: Cannot write x.gguf" in caplog.text
    with pytest.raises(TinyLMError, match="No space left"):
        model.generate(**PROMPT, engine="llama.cpp")


# The record of a converted file

OPTIONS = ("-n", 30, "--seed", 3)


def test_a_read_only_cache_is_used_and_an_unknown_engine_is_an_error(
    run: Path, double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    expected = run_ok("sample", "-m", run, *OPTIONS).stdout
    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(Path, "touch", read_only)
    assert run_ok("sample", "-m", run, *OPTIONS, "--engine", "llama.cpp").stdout == expected
    assert_error(shell("sample", "-m", run, "--engine", "tensorflow"), 2, "--engine")


def test_the_second_command_and_a_chat_open_only_the_converted_file_and_print_the_same(
    run: Path, loads: list[Any], tmp_path: Path
) -> None:
    first = run_ok("sample", "-m", run, *OPTIONS)
    second = run_ok("sample", "-m", run, *OPTIONS)
    assert len(loads) == 1
    assert second.stdout == first.stdout == run_ok("sample", "-m", run, *OPTIONS, "--engine", "torch").stdout
    once = [line for line in first.stderr.splitlines() if not line.startswith("Converting")]
    assert once[:-1] == second.stderr.splitlines()[:-1]  # the last line has the time
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    chat = ("chat", "-m", run, "--chat-template", tmp_path / "template", *OPTIONS)
    results = [shell(*chat, *engine, stdin="the old man\n").stdout for engine in ((), ("--engine", "torch"))]
    assert len(loads) == 3 and results[0] == results[1] != "\n"


def test_a_model_is_identified_by_its_files_whatever_their_times_and_sizes(
    run: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their change times cannot be set. Files that have just changed, links and a possible GPU are left to torch."""
    key = conversion_key(run, "cpu", "auto", "none")
    assert key is not None and key != conversion_key(run, "cpu", "bf16", "none")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        status, content = (run / name).stat(), (run / name).read_bytes()
        (run / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        os.utime(run / name, ns=(status.st_atime_ns, status.st_mtime_ns))
        changed = conversion_key(run, "cpu", "auto", "none")
        assert changed not in (key, None), name
        key = changed
    assert conversion_key(run, "cuda", "auto", "none") is None
    with monkeypatch.context() as patch:
        patch.setattr(files, "SETTLED_SECONDS", 3600.0)
        assert conversion_key(run, "cpu", "auto", "none") is None
    monkeypatch.setattr(converted_model, "GPU_DEVICE_FILES", (str(tmp_path),))
    assert conversion_key(run, "auto", "auto", "none") is None
    assert conversion_key(run, "cpu", "auto", "none") == key
    (run / "model.safetensors").rename(tmp_path / "elsewhere")
    (run / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert conversion_key(run, "cpu", "auto", "none") is None


def test_a_damaged_record_and_a_missing_file_are_replaced(
    run: Path, loads: list[Any], cache: Path, tmp_path: Path
) -> None:
    expected = run_ok("sample", "-m", run, *OPTIONS).stdout
    (record,) = cache.glob("*.json")
    text = record.read_text()
    opened = functools.partial(open_converted, record.stem, SpeedConfig(), [], SilentReporter())
    assert opened() is not None
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    other = {"gguf": str(tmp_path / "other.gguf")}
    changes = (other, {"config": {}}, {"tokenizer": "{}"}, {"threads": "many"}, {"more": 1})
    for damaged in ("", "[]", *(json.dumps({**json.loads(text), **change}) for change in changes)):
        record.write_text(damaged)
        assert opened() is None, damaged[-100:]
    assert run_ok("sample", "-m", run, *OPTIONS).stdout == expected and len(loads) == 2
    record.chmod(0o666)
    assert opened() is None
    record.chmod(0o600)
    assert opened() is not None
    next(cache.glob("*.gguf")).unlink()
    assert run_ok("sample", "-m", run, *OPTIONS).stdout == expected and len(loads) == 3


def test_generation_from_a_converted_file_does_not_import_torch() -> None:
    imports = "import sys, tinylm.commands.sample, tinylm.commands.chat, tinylm.open_generator, tinylm.chat_session"
    code = f"{imports}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=CHILD_LIMIT, env=environment())


# The decoder


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
