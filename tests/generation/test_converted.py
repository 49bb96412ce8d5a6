"""llama.cpp as the engine gives the greedy text of torch; the file that it reads from the cache, and the record with
which the model's own files are not opened again.
"""

import collections
import contextlib
import copy
import errno
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinylm
from tests.formats.test_gguf_writer import CHARACTERS, own_model
from tests.reference import softmax
from tests.shell import CHILD_LIMIT, assert_error, environment, run_ok, story
from tests.shell import tinylm as shell
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.gguf_model import write_gguf
from tinylm.generation import conversion_cache
from tinylm.generation.conversion_cache import conversion_key, open_converted, record_checksums, take_cached
from tinylm.generation.engine import Engine, window
from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
from tinylm.generation.llama_cpp import PRIME, RANDOM_STREAM, LlamaCpp, free_cores, import_llama_cpp
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.text_generator import Continuation
from tinylm.generation.torch_engine import TorchEngine, keep_min_p, keep_top_k, keep_top_p
from tinylm.models import load as loading
from tinylm.models import model_engine
from tinylm.models.model import Model
from tinylm.models.model_engine import ModelEngine
from tinylm.reporter import SilentReporter
from tinylm.system import files
from tinylm.system.files import private_folder
from tinylm.text.tokenizer import Tokenizer

CONTEXT = 48  # of the models
PROMPT = {"prompt": "the old man", "max_tokens": 40, "temperature": 0.0}


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
    monkeypatch.setattr(conversion_cache, "GPU_DEVICE_FILES", ())
    return tmp_path / "cache" / "gguf"


@contextlib.contextmanager
def without_xllamacpp() -> Iterator[None]:
    """As where the package is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "xllamacpp", None)
        import_llama_cpp.cache_clear()
        yield
    import_llama_cpp.cache_clear()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[Any]:
    """The arguments of each call of `_load`, which opens a model's own files."""
    calls, load = [], loading._load
    monkeypatch.setattr(loading, "_load", lambda *args, **options: (calls.append(args), load(*args, **options))[1])
    return calls


def test_llama_cpp_is_used_unless_torch_is_asked_for_with_the_same_greedy_text(run: Path, cache: Path) -> None:
    model = tinylm.load(run)
    for choices in ({"engine": "torch"}, {"cache": False}):
        expected = model.generate(**PROMPT, **choices)
        assert isinstance(model.engine.choose(SpeedConfig(**choices)), TorchEngine)
    assert not cache.exists()
    assert model.generate(**PROMPT) == expected
    assert isinstance(model.engine.choose(SpeedConfig()), LlamaCpp) and len(list(cache.glob("*.gguf"))) == 1


def test_a_file_is_written_once_for_each_model_and_again_if_others_can_write_it(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the number format of the model. Those unused for longest are deleted."""
    expected = tinylm.load(run).generate(**PROMPT)
    written = {file: file.stat().st_ino for file in cache.glob("*.gguf")}
    tinylm.load(run).generate(**PROMPT)
    assert {file: file.stat().st_ino for file in cache.glob("*.gguf")} == written and len(written) == 1
    (file,) = written
    file.write_bytes(b"something else")
    file.chmod(0o666)
    assert tinylm.load(run).generate(**PROMPT) == expected
    other = tinylm.load(run)
    other.network.embedding.weight.data += 1
    other.generate(**PROMPT)
    assert len(list(cache.glob("*.gguf"))) == 2
    monkeypatch.setattr(model_engine, "MAX_CACHED_BYTES", 1)
    tinylm.load(run, dtype="bf16").generate(**PROMPT)
    assert [file.stem.rpartition("-")[2] for file in cache.glob("*.gguf")] == ["bf16"]


@pytest.fixture(scope="module")
def lora(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    (folder / "text").write_text(story(4000, seed=1))
    return tinylm.finetune_lora(
        folder / "text", model=trained, out=folder / "lora", steps=40, lr=0.02, target=["all"]
    ).run


def test_loras_are_merged_at_their_scales(run: Path, lora: Path, cache: Path) -> None:
    texts = set()
    for adapter, selected in ((lora, None), (lora, 0), (f"{lora}=0.5", 0)):
        model = tinylm.load(run, adapters=[adapter])
        model.select_adapter(selected)
        texts.add(model.generate(**PROMPT))
        assert model.generate(**PROMPT, engine="torch") in texts
    assert len(list(cache.glob("*.gguf"))) == len(texts) == 3


def test_what_llama_cpp_cannot_run_is_named_and_sampled_by_torch(
    run: Path, lora: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(story(4000))
    options = {"layers": 1, "heads": 2, "width": 16, "context": 32, "steps": 1, "position": "relative"}
    relative = tinylm.train(tmp_path / "text", tmp_path / "relative", **options).run
    bottleneck = tinylm.finetune_adapter(tmp_path / "text", model=run, out=tmp_path / "bottleneck", steps=1).run
    models = {
        "relative": tinylm.load(relative),
        "bottleneck adapter, which cannot be merged": tinylm.load(run, adapters=[bottleneck]),
        "has several adapters": tinylm.load(run, adapters=[lora, lora]),
    }

    def check(reason: str, model: Model) -> None:
        assert model.generate(**PROMPT) == model.generate(**PROMPT, engine="torch")
        with pytest.raises(UsageError, match=rf'`engine="llama.cpp"` is not possible: .*{reason}'):
            model.generate(**PROMPT, engine="llama.cpp")

    for reason, model in models.items():
        check(reason, model)
    with without_xllamacpp():
        check("xllamacpp is not installed", tinylm.load(run))
    prepared = tinylm.load(run)
    prepared.engine.settle(SpeedConfig(engine="torch"))  # its weights may be rounded, and an adapter merged
    with pytest.raises(UsageError, match="prepared for torch; load it again"):
        prepared.generate(**PROMPT, engine="llama.cpp")
    with pytest.raises(UsageError, match="prompts choose their adapters"):
        tinylm.load(run).engine.settle(SpeedConfig(engine="llama.cpp"), switches_adapters=True)
    assert not list(cache.glob("*.gguf"))


def test_int8_weights_that_llama_cpp_cannot_run_are_refused_with_the_reason(
    run: Path, lora: Path, cache: Path, tmp_path: Path
) -> None:
    """At once if the model is the reason, else when text is generated."""
    (tmp_path / "text").write_text(story(4000))
    (tmp_path / "pairs.tsv").write_text("a\tb\nb\tc\n" * 50)
    small = {"layers": 1, "heads": 2, "width": 16, "context": 32, "steps": 1}
    encoder = tinylm.train(tmp_path / "text", tmp_path / "encoder", architecture="encoder", **small).run
    pairs = {**small, "architecture": "encoder-decoder"}
    translator = tinylm.train(tmp_path / "pairs.tsv", tmp_path / "translator", **pairs).run
    relative = tinylm.train(tmp_path / "text", tmp_path / "relative", position="relative", **small).run
    shortest = tinylm.train(tmp_path / "text", tmp_path / "shortest", **small | {"context": 3}).run
    bottleneck = tinylm.finetune_adapter(tmp_path / "text", model=run, out=tmp_path / "bottleneck", steps=1).run

    def int8(path: Path = run, *adapters: Path) -> Any:
        return tinylm.load(path, adapters=adapters, quantize="int8")

    def on_another_device() -> None:
        model = tinylm.load(run)
        ModelEngine(run, model.network.to("meta"), model.config, model.tokenizer, (), "fp32", "int8", SilentReporter())

    rows: list[tuple[Callable[[], object], str]] = [
        (lambda: int8(encoder), "llama.cpp is for decoders"),
        (lambda: int8(translator), "llama.cpp is for decoders"),
        (on_another_device, "llama.cpp is for a CPU, and the model is on meta"),
        (lambda: int8(shortest), "llama.cpp is for contexts of at least 4 tokens"),
        (lambda: int8(run, bottleneck), "the model has a bottleneck adapter, which cannot be merged"),
        (lambda: int8(run, lora, lora), "a module of the model has several adapters"),
        (lambda: int8(relative).generate(), "No model family of Hugging Face has this model's `position` 'relative'"),
        (lambda: int8().generate(engine="torch"), "`engine` or `json_schema` chooses torch"),
        (lambda: int8().generate(json_schema={"type": "null"}), "`engine` or `json_schema` chooses torch"),
        (lambda: int8().generate(cache=False), "it needs the cache"),
        (lambda: int8().engine.settle(SpeedConfig(), switches_adapters=True), "prompts choose their adapters"),
    ]
    message = "int8 weights are for llama.cpp, which is not possible: "
    for act, reason in rows:
        with pytest.raises(UsageError) as error:
            act()
        assert str(error.value).startswith(f"{message}{reason}"), error.value
        assert str(error.value).endswith("; leave `quantize` out.")
    assert not list(cache.glob("*.gguf"))
    with without_xllamacpp(), pytest.raises(UsageError, match=f"{message}the package xllamacpp is not installed"):
        int8()


def test_a_full_disk_leads_to_torch_unless_llama_cpp_is_demanded(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any, **options: Any) -> str:
        raise TinyLMError("Cannot write x.gguf: No space left on device.")

    monkeypatch.setattr(model_engine, "write_gguf", full)
    model = tinylm.load(run)
    assert model.generate(**PROMPT) == model.generate(**PROMPT, engine="torch")
    assert "llama.cpp is not used: Cannot write x.gguf" in caplog.text
    for demanded in (model, tinylm.load(run, quantize="int8")):
        with pytest.raises(TinyLMError, match="No space left"):
            demanded.generate(**PROMPT, engine="llama.cpp" if demanded is model else "auto")


# The record of a converted file

OPTIONS = ("-n", 30, "-t", 0, "--seed", 3)


def test_a_read_only_cache_is_used_and_an_unknown_engine_is_an_error(
    run: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    expected = run_ok("sample", "-m", run, *OPTIONS).stdout
    monkeypatch.setattr(os, "utime", read_only)
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
    monkeypatch.setattr(conversion_cache, "GPU_DEVICE_FILES", (str(tmp_path),))
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
    opened = functools.partial(open_converted, record.stem, SpeedConfig(), SilentReporter())
    assert opened() is not None
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    other = {"gguf": str(tmp_path / "other.gguf")}
    changes = (other, {"config": {}}, {"tokenizer": "{}"}, {"embedding_rows": "many"}, {"more": 1})
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


def test_the_first_and_the_last_block_and_a_sample_of_the_others_are_compared(cache: Path) -> None:
    """All blocks of a small file."""
    file = private_folder("gguf") / "x.gguf"
    content = bytes(range(250)) * 20
    for damaged, most, intact in ((0, 2, False), (1, 2, False), (0.5, 5, False), (0.5, 2, None), (None, 2, True)):
        file.write_bytes(content)
        record_checksums(file, 1000)
        if damaged is not None:
            at = round(damaged * (len(content) - 1))
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        found = {take_cached(file, 1000, most) for _ in range(100)}
        assert found == ({True, False} if intact is None else {intact}), (damaged, most)


@pytest.mark.parametrize("damaged", [0, 0.5, 1, "checksums"])
def test_a_flipped_bit_in_a_converted_file_is_reported_and_the_file_written_again(
    run: Path, cache: Path, damaged: float | str
) -> None:
    expected = run_ok("sample", "-m", run, *OPTIONS).stdout
    (file,) = cache.glob("*.gguf")
    content = file.read_bytes()
    assert len(content) > 5000
    if isinstance(damaged, str):
        file.with_suffix(".sums").unlink()
    else:
        at = round(damaged * (len(content) - 1))
        file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    again = run_ok("sample", "-m", run, *OPTIONS)
    assert again.stdout == expected
    assert "damaged" in again.stderr
    assert file.read_bytes() == content
    assert "damaged" not in run_ok("sample", "-m", run, *OPTIONS).stderr


def test_generation_from_a_converted_file_does_not_import_torch() -> None:
    modules = "tinylm.commands.sample, tinylm.commands.chat, tinylm.models.load, tinylm.generation.text_generator"
    code = f"import sys, {modules}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=CHILD_LIMIT, env=environment())


# The engine


def both_engines(folder: Path, case: str = "modern", library: Tokenizer = CHARACTERS) -> tuple[LlamaCpp, TorchEngine]:
    """The same model in llama.cpp and in torch."""
    model, exported = own_model(case, library, context=CONTEXT)
    write_gguf(folder / "model.gguf", exported, "f32", end_id=library.end_of_text_id)
    return LlamaCpp(folder / "model.gguf", CONTEXT, library, model.vocab_size, True), TorchEngine(model.eval(), library)


def tokens(engine: Engine, prompt: Sequence[int], rows: int = 1, **settings: Any) -> Any:
    """The ids of each row before an end token."""
    encoded = EncodedPrompt("", list(prompt), list(prompt))
    found = collections.defaultdict[int, list[int]](list)
    for token in engine.generate([encoded] * rows, GenerationConfig(num_samples=rows, **settings), 0):
        if token.id is not None:
            found[token.row].append(token.id)
    end = CHARACTERS.end_of_text_id
    return [ids[: ids.index(end)] if end in (ids := found[row]) else ids for row in range(rows)]


@pytest.mark.parametrize("case", ["modern", "gpt2"])
def test_greedy_tokens_are_those_of_torch_also_past_the_context_where_a_bos_token_stays(
    case: str, tmp_path: Path
) -> None:
    tokenizer = copy.copy(CHARACTERS)
    ours, theirs = both_engines(tmp_path, case, tokenizer)
    for prompt in ([3], [1, 2, 3, 4, 5, 6, 7], list(range(20)) * 3):
        for tokenizer.start_id in (None, prompt[0]):
            settings = {"temperature": 0.0, "max_tokens": 3 * CONTEXT}
            (expected,) = tokens(theirs, prompt, **settings)
            assert tokens(ours, prompt, **settings) == [expected]
            assert tokens(ours, prompt, rows=3, **settings) == [expected] * 3


@pytest.mark.parametrize("rows", [1, 3])
def test_the_repeat_penalty_of_both_engines_counts_the_tokens_in_the_context(rows: int, tmp_path: Path) -> None:
    """Of a prompt beyond the context, too, in which tokens are penalised that a new window no longer has."""
    ours, theirs = both_engines(tmp_path)
    for prompt in ([3], [1, 2, 3, 4, 5, 6, 7], list(range(20)) * 3):
        settings = {"temperature": 0.0, "repeat_penalty": 1.5, "max_tokens": 3 * CONTEXT}
        expected = tokens(theirs, prompt, rows, **settings)
        assert tokens(ours, prompt, rows, **settings) == expected
        text = [*prompt, *expected[0]]
        if len(text) < CONTEXT + 3:
            continue
        for length in range(len(prompt), len(text)):  # by the formula
            window_ids = window(text[:length], CONTEXT, None)
            logits = theirs.model.last_logits(torch.tensor([window_ids]), None).double()[0]
            seen = torch.tensor(sorted(set(window_ids)))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
            assert text[length] == int(logits[: CHARACTERS.vocab_size].argmax())


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
def test_a_forked_process_is_told_to_load_the_model_again(run: Path) -> None:
    """It would wait forever for the threads of its parent, also at the end of the model."""
    program = """
import multiprocessing, sys, torch, tinylm

def child(queue):
    global model
    torch.set_num_threads(1)
    try:
        model.generate("no")
    except tinylm.errors.UsageError as error:
        queue.put(str(error))
    model = tinylm.load(sys.argv[1])
    queue.put(model.generate("no", seed=1, max_tokens=9))

model = tinylm.load(sys.argv[1])
text = model.generate("no", seed=1, max_tokens=9)
context = multiprocessing.get_context("fork")
queue = context.Queue()
process = context.Process(target=child, args=(queue,))
process.start()
print(queue.get(), queue.get() == text, model.generate("no", seed=1, max_tokens=9) == text)
process.join()
print(process.exitcode)
"""
    result = subprocess.run(
        [sys.executable, "-c", program, run],
        check=True,
        timeout=CHILD_LIMIT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert result.stdout.startswith("This process was forked after the model had begun to generate")
    assert result.stdout.endswith(" True True\n0\n")


def test_tokens_that_end_within_a_character_are_those_of_torch(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "text").write_text("日本語と中文字符、👍🏽 한국어 naïve。" * 200, encoding="utf-8")
    sizes = {"layers": 1, "heads": 2, "width": 32, "context": 64, "vocab_size": 270, "tokenizer": "bpe"}
    model = tinylm.load(tinylm.train(tmp_path / "text", tmp_path / "run", steps=120, lr=0.02, **sizes).run)
    prompt = EncodedPrompt("", ids := model.encode("naïve。"), ids)
    engines = [model.engine.choose(SpeedConfig(engine=name)) for name in ("llama.cpp", "torch")]
    ours, theirs = ([*e.generate([prompt], GenerationConfig(max_tokens=50, temperature=0), 0)] for e in engines)
    assert ours == theirs
    assert sum("\ufffd" in model.decode([token.id]) for token in ours) > 10


def test_a_sample_of_several_is_also_generated_alone_by_its_seed_and_seeds_repeat_texts(tmp_path: Path) -> None:
    ours, _ = both_engines(tmp_path)
    for seed in (0, 1, PRIME - 1, PRIME, RANDOM_STREAM - 4, RANDOM_STREAM - 1, 2**40):
        settings = {"temperature": 1.0, "max_tokens": 30}
        together = tokens(ours, [1, 2, 3], rows=4, seed=seed, **settings)
        assert together == tokens(ours, [1, 2, 3], rows=4, seed=seed, **settings)
        assert len(set(map(tuple, together))) == 4
        for row, expected in enumerate(together):
            alone = ours.sample_seed(GenerationConfig(seed=seed, num_samples=4), 0, row)
            assert tokens(ours, [1, 2, 3], seed=alone, **settings) == [expected]
    long = {"temperature": 1.0, "max_tokens": 100, "seed": 5}
    assert tokens(ours, [1, 2, 3], rows=3, **long) == tokens(ours, [1, 2, 3], rows=3, **long)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.5, "top_p": 0.6},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 1.0, "repeat_penalty": 1.8},
    ],
    ids=lambda settings: list(settings)[-1],
)
def test_settings_of_the_sampler_have_the_distribution_of_their_definitions(
    settings: dict[str, float], tmp_path: Path
) -> None:
    """By formula: the temperature comes before the filters. 1,024 samples of the next token."""
    ours, theirs = both_engines(tmp_path)
    prompt = [1, 2, 3, 4]
    logits = theirs.model.last_logits(torch.tensor([prompt]), None).double()  # (1, V)
    if "repeat_penalty" in settings:
        seen, penalty = logits[0, prompt], settings["repeat_penalty"]
        logits[0, prompt] = torch.where(seen > 0, seen / penalty, seen * penalty)
    logits /= settings["temperature"]
    for name, keep in (("top_k", keep_top_k), ("top_p", keep_top_p), ("min_p", keep_min_p)):
        logits = keep(logits, settings[name]) if name in settings else logits  # type: ignore[operator]
    expected = softmax(logits[0].numpy())
    drawn = tokens(ours, prompt, rows=64, max_tokens=1, **settings)
    for seed in range(64, 1024, 64):
        drawn += tokens(ours, prompt, rows=64, max_tokens=1, seed=seed, **settings)
    ids = [token[0] if token else CHARACTERS.end_of_text_id for token in drawn]
    found = np.bincount(ids, minlength=len(expected)) / len(ids)
    assert not found[expected == 0].any()
    assert float(np.abs(found - expected).max()) < 5 * np.sqrt(0.25 / len(ids))


def test_log_probabilities_are_those_of_the_logits_in_both_engines(tmp_path: Path) -> None:
    engines = both_engines(tmp_path)
    model, prompt = engines[1].model, [1, 2, 3]
    for engine_ in engines:
        ids = list(prompt)
        config = GenerationConfig(temperature=0.0, max_tokens=9, logprobs=3)
        for token in engine_.generate([EncodedPrompt("", prompt, prompt)], config, 0):
            expected = model.last_logits(torch.tensor([ids]), None)[0].double().log_softmax(-1)
            best = expected.topk(3)
            assert [candidate.id for candidate in token.candidates] == best.indices.tolist()
            assert [candidate.logprob for candidate in token.candidates] == pytest.approx(
                best.values.tolist(), abs=1e-4
            )
            assert token.id == token.candidates[0].id and token.logprob == token.candidates[0].logprob
            ids.append(token.id)


def test_an_abandoned_text_stops_the_engine_for_the_next_one(tmp_path: Path) -> None:
    ours, _ = both_engines(tmp_path)
    prompt = EncodedPrompt("", [1], [1])
    chunks = iter(Continuation(ours, CHARACTERS, [prompt], GenerationConfig(max_tokens=10**6), 0))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert len(tokens(ours, [1], temperature=0.0, max_tokens=5)[0]) == 5


def test_llama_cpp_opens_no_port_writes_nothing_to_stderr_and_leaves_the_signal_handlers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ours, _ = both_engines(tmp_path)
    tokens(ours, [1], max_tokens=5)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    ours.close()
    tokens(ours, [1], max_tokens=5)
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM]
    sockets = {match[1] for link in Path("/proc/self/fd").iterdir() if (match := _socket(link))}
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
        assert not {row[9] for row in rows if row[3] == "0A"} & sockets  # 0A: listening
    folder = Path(ours._socket).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    ours.close()
    assert not folder.exists()
    assert capfd.readouterr().err == ""


def _socket(link: Path) -> re.Match[str] | None:
    try:
        return re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
    except OSError:
        return None


def test_without_room_for_a_socket_torch_generates_and_a_text_that_grows_needs_no_other_socket(
    run: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = both_engines(tmp_path)
    run_ok("sample", "-m", run, *OPTIONS)
    (file,) = cache.glob("*.gguf")
    (long := tmp_path / ("x" * 120)).mkdir()

    def full(*arguments: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name, value, reason in (("mkdtemp", full, "No space left on device"), ("tempdir", str(long), "path too long")):
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, name, value)
            sampled = run_ok("sample", "-m", run, *OPTIONS)
            assert f"llama.cpp is not used: llama.cpp cannot make its socket in a temporary folder: {reason}" in (
                re.sub("AF_UNIX ", "", sampled.stderr)
            )
            assert file.exists() and not any(long.iterdir())
            settings = {"rows": 3, "temperature": 0.0, "max_tokens": 5}
            assert tokens(ours, [1], **settings) == tokens(theirs, [1], **settings)
        ours.close()
        assert tokens(ours, [1], temperature=0.0, max_tokens=5)


def test_a_file_that_cannot_be_opened_is_deleted_and_other_threads_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and nothing else")
    with pytest.raises(TinyLMError, match=r"cannot open .*model\.gguf"):
        LlamaCpp(file, CONTEXT, CHARACTERS, CHARACTERS.vocab_size, True)
    assert not file.exists()
    errors: list[Exception] = []

    def open_in_thread() -> None:
        try:
            both_engines(tmp_path)
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=open_in_thread)
    thread.start()
    thread.join(60)
    assert "main thread" in str(errors[0])


def test_threads_are_those_that_other_processes_leave_idle(tmp_path: Path) -> None:
    assert free_cores(4, 8, tmp_path / "missing") == 4
    for running, expected in ((1, 4), (5, 4), (6, 3), (9, 1), (50, 1), ("?", 4)):
        (tmp_path / "loadavg").write_text(f"0.5 0.4 0.3 {running}/200 1234")
        assert free_cores(4, 8, tmp_path / "loadavg") == expected
