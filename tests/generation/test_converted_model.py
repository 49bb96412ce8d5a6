"""Models that llama.cpp reads from a file that was converted before, without opening their own files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tinylm
from tests.generation.llama_cpp_double import LlamaCppDouble
from tests.shell import CHILD_LIMIT, environment, run_ok, story
from tests.shell import tinylm as shell
from tinylm import files, loaded_model
from tinylm.generation import converted_model, engine, generation_config, llama_cpp
from tinylm.generation.converted_model import conversion_key

OPTIONS = ("-n", 30, "--seed", 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
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


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch, cache: Path) -> LlamaCppDouble:
    """A substitute for an installed llama-cpp-python."""
    double = LlamaCppDouble()
    for module in (engine, llama_cpp, converted_model):
        monkeypatch.setattr(module, "import_llama_cpp", lambda: double)
    return double


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each call of `load`, which opens a model's own files."""
    calls, load = [], loaded_model.load

    def recorded(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return load(*args, **options)

    monkeypatch.setattr(loaded_model, "load", recorded)
    return calls


def test_the_second_command_opens_only_the_converted_file_and_prints_the_same(run: Path, loads: list[Any]) -> None:
    first = run_ok("sample", "-m", run, *OPTIONS)
    second = run_ok("sample", "-m", run, *OPTIONS)
    assert len(loads) == 1
    assert second.stdout == first.stdout == run_ok("sample", "-m", run, *OPTIONS, "--engine", "torch").stdout
    once = [line for line in first.stderr.splitlines() if not line.startswith("Converting")]
    assert once[:-1] == second.stderr.splitlines()[:-1]  # the last line has the time


def test_the_newest_model_and_a_chat_are_opened_from_the_converted_file(
    run: Path, loads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.move(run, tmp_path / "checkpoints" / "book")
    for _ in range(2):
        assert run_ok("sample", *OPTIONS).stderr.count("Using checkpoints/book, the newest model.") == 1
    assert len(loads) == 1
    (tmp_path / "template").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    results = [shell("chat", "--chat-template", "template", *OPTIONS, stdin="the old man\n") for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0], results[0].stderr
    assert len(loads) == 1 and results[0].stdout == results[1].stdout != "\n"


def test_settings_that_need_torch_open_the_model(run: Path, loads: list[Any]) -> None:
    run_ok("sample", "-m", run, *OPTIONS)
    for number, options in enumerate((("--engine", "torch"), ("--no-cache",), ("--draft", "ngram")), start=2):
        shell("sample", "-m", run, *OPTIONS, *options)
        assert len(loads) == number, options


def test_many_samples_open_the_model_where_torch_completes_them_sooner(
    run: Path, loads: list[Any], double: LlamaCppDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_config, "MIN_TORCH_WORK", 1)
    run_ok("sample", "-m", run, *OPTIONS)
    decoded = len(double.decoded)
    many = run_ok("sample", "-m", run, *OPTIONS, "--num-samples", 8)
    assert len(loads) == 2 and len(double.decoded) == decoded
    assert many.stdout == run_ok("sample", "-m", run, *OPTIONS, "--num-samples", 8, "--engine", "llama.cpp").stdout


def test_a_file_that_changes_is_read_whatever_its_time_and_size(run: Path, loads: list[Any]) -> None:
    """Its change time cannot be set."""
    for number, name in enumerate(("model.safetensors", "config.json", "tokenizer.json"), start=1):
        run_ok("sample", "-m", run, *OPTIONS)
        status, content = (run / name).stat(), (run / name).read_bytes()
        (run / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        os.utime(run / name, ns=(status.st_atime_ns, status.st_mtime_ns))
        result = shell("sample", "-m", run, *OPTIONS)
        assert len(loads) == 2 * number and result.exit_code == 1 and name in result.stderr
        (run / name).write_bytes(content)


def test_changed_files_links_and_a_possible_gpu_are_left_to_torch(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has just changed is not identified by its time."""
    key = conversion_key(run, "cpu", "auto", "none")
    assert key is not None and key != conversion_key(run, "cpu", "bf16", "none")
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
    values = json.loads(record.read_text())
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    damaged = [
        "",
        "[]",
        json.dumps({**values, "gguf": str(tmp_path / "other.gguf")}),
        json.dumps({**values, "config": {}}),
        json.dumps({**values, "tokenizer": "{}"}),
        json.dumps({**values, "threads": "many"}),
        json.dumps({**values, "more": 1}),
    ]
    for number, text in enumerate(damaged, start=2):
        record.write_text(text)
        assert run_ok("sample", "-m", run, *OPTIONS).stdout == expected
        assert len(loads) == number, text
    record.chmod(0o666)
    assert run_ok("sample", "-m", run, *OPTIONS).stdout == expected
    next(cache.glob("*.gguf")).unlink()
    assert run_ok("sample", "-m", run, *OPTIONS).stdout == expected
    assert len(loads) == len(damaged) + 3


def test_weights_that_a_program_changes_leave_no_record(run: Path, cache: Path) -> None:
    model = tinylm.load(run)
    model.network.embedding.weight.data += 1
    model.generate("the", max_tokens=3)
    assert not list(cache.glob("*.json"))


def test_generation_from_a_converted_file_does_not_import_torch() -> None:
    modules = ("commands.sample", "commands.chat", "open_generator", "chat_session")
    imports = "".join(f"import tinylm.{module}\n" for module in modules)
    code = f"import sys\n{imports}assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=CHILD_LIMIT, env=environment())
