"""The choice between torch and llama.cpp, and the file that llama.cpp reads from the cache."""

import copy
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import tinylm
from tests.formats.test_gguf_writer import own_model
from tests.generation.llama_cpp_double import LlamaCppDouble
from tests.shell import assert_error, run_ok, story
from tests.shell import tinylm as shell
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.gguf_writer import write_gguf
from tinylm.generation import engine, generation_config, llama_cpp
from tinylm.generation.generation_config import GenerationConfig, SpeedConfig, torch_is_faster
from tinylm.loaded_model import Model

PROMPT = {"prompt": "the old man", "max_tokens": 40, "seed": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "text").write_text(story(4000))
    return tinylm.train(folder / "text", folder / "run", layers=2, heads=2, width=16, context=32, steps=5).run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch, cache: Path) -> LlamaCppDouble:
    """A substitute for an installed llama-cpp-python."""
    double = LlamaCppDouble()
    for module in (engine, llama_cpp):
        monkeypatch.setattr(module, "import_llama_cpp", lambda: double)
    return double


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(engine, "import_llama_cpp", lambda: None)


def test_llama_cpp_is_used_where_it_is_installed_and_gives_the_text_of_torch(run: Path, double: LlamaCppDouble) -> None:
    model = tinylm.load(run)
    assert model.generate(**PROMPT) == model.generate(**PROMPT, engine="torch")
    assert len(double.opened) == 1 and double.threads


@pytest.mark.parametrize("choices", [{"engine": "torch"}, {"cache": False}])
def test_llama_cpp_is_not_used_where_torch_is_asked_for(
    choices: dict[str, Any], run: Path, double: LlamaCppDouble
) -> None:
    tinylm.load(run).generate(**PROMPT, **choices)
    assert not double.opened


def test_torch_is_taken_for_many_samples_whose_time_makes_up_for_its_import() -> None:
    """With 256 tokens per sample and the parameters of 12x768 with 50,257 ids, and of 6x384."""
    large, small = 116_500_000, 9_800_000
    eight, seven, many = (GenerationConfig(num_samples=samples) for samples in (8, 7, 32))
    assert torch_is_faster([eight, many], large)
    assert not torch_is_faster([eight, seven], large)
    assert not torch_is_faster([], large)
    assert not torch_is_faster([many], small)
    assert torch_is_faster([many] * 3, small)
    assert torch_is_faster([GenerationConfig(num_samples=10, max_tokens=2000)], 10_000_000)
    assert not torch_is_faster([GenerationConfig(num_samples=10, max_tokens=2000)], 9_999_999)


@pytest.fixture
def instant_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch worth its import for every text."""
    monkeypatch.setattr(generation_config, "MIN_TORCH_WORK", 1)


def test_many_samples_with_fp32_weights_are_generated_by_torch(
    run: Path, double: LlamaCppDouble, instant_import: None
) -> None:
    model = tinylm.load(run)
    chosen = model.generate(**PROMPT, num_samples=8)
    assert not double.opened
    assert chosen == model.generate(**PROMPT, num_samples=8, engine="llama.cpp")
    assert len(double.opened) == 1
    model.generate(**PROMPT, num_samples=7)
    assert len(double.opened) == 2  # once for each engine setting


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"quantize": "int8"}])
def test_many_samples_with_smaller_weights_are_generated_by_llama_cpp(
    options: dict[str, Any], run: Path, double: LlamaCppDouble, instant_import: None
) -> None:
    tinylm.load(run, **options).generate(**PROMPT, num_samples=8)
    assert double.opened


def test_many_samples_of_a_gguf_file_are_generated_by_llama_cpp(
    double: LlamaCppDouble, instant_import: None, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", own_model("untied")[1], "q8_0")
    tinylm.load(tmp_path / "model.gguf").generate("the", num_samples=8, max_tokens=3, seed=1)
    assert double.opened


def test_a_model_prepared_in_place_for_torch_is_not_exported_to_llama_cpp(run: Path, double: LlamaCppDouble) -> None:
    """Its fused layers have other names and shapes."""
    model = tinylm.load(run)
    expected = tinylm.load(run).generate(**PROMPT, engine="torch")
    model.prepare_generation(SpeedConfig(engine="torch"))
    assert model.generate(**PROMPT) == expected
    with pytest.raises(UsageError, match="prepared for torch; load it again"):
        model.generate(**PROMPT, engine="llama.cpp")
    assert not double.opened


@pytest.mark.parametrize(
    "dtype, quantize, kind", [("fp32", "none", "f32"), ("bf16", "none", "bf16"), ("fp32", "int8", "q8_0")]
)
def test_the_file_has_the_number_format_of_the_model(
    dtype: str, quantize: str, kind: str, run: Path, double: LlamaCppDouble, cache: Path
) -> None:
    tinylm.load(run, dtype=dtype, quantize=quantize).generate(**PROMPT)
    assert [file.stem.rpartition("-")[2] for file in cache.iterdir()] == [kind]


def test_quantized_weights_of_a_gguf_file_stay_as_they_are(double: LlamaCppDouble, cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", own_model("untied")[1], "q8_0")
    model = tinylm.load(tmp_path / "model.gguf")
    prompt = {"prompt": "the", "max_tokens": 60, "seed": 1}
    assert model.generate(**prompt) == model.generate(**prompt, engine="torch")
    (file,) = cache.iterdir()
    assert file.stem.endswith("-own") and file.stat().st_size < 1.1 * (tmp_path / "model.gguf").stat().st_size
    tinylm.load(tmp_path / "model.gguf", quantize="int8").generate(**prompt)
    assert {file.stem.rpartition("-")[2] for file in cache.iterdir()} == {"own", "q8_0"}


def test_a_file_is_written_once_for_each_model(run: Path, double: LlamaCppDouble, cache: Path) -> None:
    tinylm.load(run).generate(**PROMPT)
    written = {file: file.stat().st_ino for file in cache.iterdir()}
    tinylm.load(run).generate(**PROMPT)
    assert {file: file.stat().st_ino for file in cache.iterdir()} == written and len(written) == 1
    other = tinylm.load(run)
    other.network.embedding.weight.data += 1
    other.generate(**PROMPT)
    assert len(list(cache.iterdir())) == 2


def test_the_files_that_were_not_used_for_longest_are_deleted(
    run: Path, double: LlamaCppDouble, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tinylm.load(run)
    for kind in ("f32", "q8_0"):
        changed = copy.copy(model)
        changed.quantize = "int8" if kind == "q8_0" else "none"
        Model.__post_init__(changed)
        changed.generate(**PROMPT)
        monkeypatch.setattr(engine, "MAX_CACHED_BYTES", 1)
    assert [file.stem.rpartition("-")[2] for file in cache.iterdir()] == ["q8_0"]


def test_a_file_that_others_can_write_is_replaced(run: Path, double: LlamaCppDouble, cache: Path) -> None:
    tinylm.load(run).generate(**PROMPT)
    (file,) = cache.iterdir()
    file.write_bytes(b"something else")
    file.chmod(0o666)
    text = tinylm.load(run).generate(**PROMPT)
    assert text == tinylm.load(run).generate(**PROMPT, engine="torch")


def test_without_llama_cpp_torch_is_used_and_a_demand_for_it_is_an_error(run: Path, absent: None) -> None:
    model = tinylm.load(run)
    assert model.generate(**PROMPT) == model.generate(**PROMPT, engine="torch")
    with pytest.raises(UsageError, match=r'`engine="llama.cpp"` is not possible: llama-cpp-python is not installed'):
        model.generate(**PROMPT, engine="llama.cpp")


def test_a_model_that_gguf_cannot_represent_is_sampled_by_torch(tmp_path: Path, double: LlamaCppDouble) -> None:
    (tmp_path / "text").write_text(story(4000))
    options = {"layers": 1, "heads": 2, "width": 16, "context": 32, "steps": 2, "position": "relative"}
    run = tinylm.train(tmp_path / "text", tmp_path / "run", **options).run
    model = tinylm.load(run)
    assert model.generate(**PROMPT) == model.generate(**PROMPT, engine="torch")
    with pytest.raises(UsageError, match=r'`engine="llama.cpp"` is not possible: .*relative'):
        model.generate(**PROMPT, engine="llama.cpp")


@pytest.fixture(scope="module")
def lora(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text").write_text(story(4000, seed=1))
    return tinylm.finetune_lora(folder / "text", model=run, out=folder / "lora", steps=40, lr=0.02, target=["all"]).run


def test_loras_are_merged_at_their_scales(run: Path, lora: Path, double: LlamaCppDouble) -> None:
    texts = set()
    for adapter, selected in ((lora, None), (lora, 0), (f"{lora}=0.5", 0)):
        model = tinylm.load(run, adapters=[adapter])
        model.select_adapter(selected)
        texts.add(model.generate(**PROMPT))
        assert model.generate(**PROMPT, engine="torch") in texts
    assert len(double.opened) == len(texts) == 3


def test_prompts_that_choose_their_adapters_are_sampled_by_torch(
    run: Path, lora: Path, double: LlamaCppDouble, tmp_path: Path
) -> None:
    lines = [{"prompt": "the", "seed": 1}, {"prompt": "the", "seed": 1, "adapter": str(lora)}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("sample", "-m", run, "-f", tmp_path / "prompts.jsonl", "-n", 40, "--separator", "|")
    plain, adapted = run_ok(*options).stdout.split("|")
    assert plain != adapted and not double.opened
    assert_error(shell(*options, "--engine", "llama.cpp"), 2, "prompts choose their adapters")


def test_a_bottleneck_several_adapters_and_an_encoder_are_refused_by_name(
    tmp_path: Path, run: Path, lora: Path, double: LlamaCppDouble
) -> None:
    (tmp_path / "text").write_text(story(4000))
    bottleneck = tinylm.finetune_adapter(tmp_path / "text", model=run, out=tmp_path / "bottleneck", steps=2).run
    with pytest.raises(UsageError, match="bottleneck adapter, which cannot be merged"):
        tinylm.load(run, adapters=[bottleneck]).generate(**PROMPT, engine="llama.cpp")
    with pytest.raises(UsageError, match="has several adapters"):
        tinylm.load(run, adapters=[lora, lora]).generate(**PROMPT, engine="llama.cpp")
    options = {"architecture": "encoder", "layers": 1, "heads": 2, "width": 16, "context": 32, "steps": 2}
    encoder = tinylm.train(tmp_path / "text", tmp_path / "encoder", **options).run
    with pytest.raises(UsageError, match=r"An encoder fills all masks at once.*leave out `engine`"):
        tinylm.load(encoder).generate("the <mask>", engine="llama.cpp")


def test_a_converted_file_in_a_read_only_cache_is_used(
    run: Path, double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tinylm.load(run).generate(**PROMPT, engine="llama.cpp")

    def read_only(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(Path, "touch", read_only)
    assert tinylm.load(run).generate(**PROMPT, engine="llama.cpp") == expected
    assert len(double.opened) == 2


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


def test_the_command_says_what_is_wrong_with_the_engine(run: Path, absent: None) -> None:
    result = shell("sample", "-m", run, "-n", 5, "--engine", "llama.cpp")
    assert_error(result, 2, "--engine llama.cpp is not possible: llama-cpp-python is not installed")
    assert_error(shell("sample", "-m", run, "-n", 5, "--engine", "tensorflow"), 2, "--engine")


def test_the_command_samples_the_same_by_both_engines(run: Path, double: LlamaCppDouble) -> None:
    options = ("sample", "-m", run, "-n", 60, "--seed", 3)
    assert run_ok(*options).stdout == run_ok(*options, "--engine", "torch").stdout
    assert len(double.opened) == 1
