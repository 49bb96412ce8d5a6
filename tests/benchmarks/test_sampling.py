"""The benchmarks of generation, with a tiny model: what they run, what they choose and what they print."""

import importlib
import io
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGUFReader

from tests.generation.llama_cpp_double import LlamaCppDouble
from tinylm.generation import llama_cpp

pytestmark = pytest.mark.slow  # imports transformers

sampling = importlib.import_module("sampling")
programs = importlib.import_module("sampling_programs")
thread_policy = importlib.import_module("thread_policy")
drafting = importlib.import_module("drafting")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"tiny": sampling.Shape(layers=1, width=32, heads=2, vocab_size=30, tokens=6, batch_tokens=2)}
    monkeypatch.setattr(sampling, "MODELS", models)
    monkeypatch.setattr(sampling, "STREAMS", 3)
    monkeypatch.setattr(sampling, "CONTEXT", 32)
    monkeypatch.setattr(sampling, "SETTLED_SECONDS", 0)
    monkeypatch.setattr(sampling, "memory_bandwidth", lambda: 1e9)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The files of the tiny model."""
    monkeypatch.setattr(sampling, "run_tinylm", lambda words: "")
    return sampling.prepare(sampling.make_subject("tiny"), "f32", tmp_path)


def rows_of(printed: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("|")]


class Fake:
    """A program whose requests take the seconds of its choices, times the number of tokens."""

    def __init__(self, choices: dict[str, float], missing: str = "") -> None:
        self.choices, self.missing = list(choices), missing
        self._seconds = choices

    def seconds(self, request: Any) -> float:
        return self._seconds[request.choice] * request.rows * request.tokens


def fakes(programs: dict[str, Fake]) -> Callable[..., Any]:
    @contextmanager
    def running(name: str, job: Any) -> Iterator[Fake]:
        yield programs[name]

    return running


def test_the_sampling_benchmark_prints_one_table_with_the_fastest_choice_of_each_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(sampling, "run_tinylm", commands.append)
    found = {
        "tinylm": Fake({"": 0.02}),
        "llama.cpp": Fake({"1 threads": 0.04, "2 threads": 0.01}),
        "CTranslate2": Fake({}, "CTranslate2 is not installed"),
    }
    monkeypatch.setattr(sampling, "running", fakes(found))
    sampling.main(["--kinds", "f32", "q8_0", "--rounds", "2", "--programs", *found])
    printed = capsys.readouterr()
    header, _, *rows = rows_of(printed.out)
    assert [row[:3] for row in rows] == [
        ["tiny", kind, name] for kind in ("f32", "q8_0") for name in ("tinylm", "llama.cpp")
    ]
    ours, theirs = (dict(zip(header[2:], row[2:], strict=True)) for row in rows[:2])
    assert (ours["tokens/s"], theirs["tokens/s"]) == ("50", "100")
    assert (ours["times llama.cpp"], theirs["chosen"]) == ("0.50 (0.50 to 0.50)", "2 threads")
    assert (ours["3 streams, tokens/s"], ours["first token, ms"]) == ("50", "20.0")
    assert "tiny, f32: CTranslate2 is not installed." in printed.err
    assert ["--quantize" in words for words in commands] == [False, True]


def test_the_bandwidth_counts_the_weights_that_a_step_reads() -> None:
    """Of an untied model all but the input embedding, of which one row is read."""
    subject = sampling.make_subject("tiny")
    numbers = sum(tensor.numel() for tensor in subject.exported.tensors.values())
    read = numbers if subject.exported.config.tie else numbers - 30 * 32
    assert subject.bytes_per_token("f16") == 2 * read


def test_a_gguf_file_is_measured_with_its_own_number_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs open a copy of it, and a step reads as many bytes as its tensors have."""
    file = tmp_path / "tiny.gguf"
    sampling.write_gguf(file, sampling.make_subject("tiny").exported, "q8_0")
    subject = sampling.make_subject(str(file))
    assert subject.kinds(sampling.KINDS) == ["f32", "f16", "q8_0", "file"]
    assert sampling.make_subject("tiny").kinds(sampling.KINDS) == ["f32", "f16", "q8_0"]
    tensors = GGUFReader(file).tensors
    lookup = 0 if subject.exported.config.tie else next(t.n_bytes for t in tensors if t.name == "token_embd.weight")
    assert subject.bytes_per_token("file") == sum(int(tensor.n_bytes) for tensor in tensors) - lookup
    commands: list[list[str]] = []
    monkeypatch.setattr(sampling, "run_tinylm", commands.append)
    (tmp_path / "job").mkdir()
    job = sampling.prepare(subject, "file", tmp_path / "job")
    assert job.model.read_bytes() == file.read_bytes()
    assert commands[0][2] == str(job.model) == str(job.gguf)
    for name in ("ctranslate2", "transformers"):
        with pytest.raises(programs.MissingError):
            getattr(programs, name)(job)


def test_llama_cpp_and_transformers_generate_the_same_likeliest_tokens(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    double = LlamaCppDouble()
    monkeypatch.setattr(llama_cpp, "import_llama_cpp", lambda: double)
    prompt = programs.prompt_ids(job, 5)
    texts = [generate(2, prompt, 4) for generate in programs.llama_cpp(job).values()]
    peer = transformers.AutoModelForCausalLM.from_pretrained(job.model)
    expected = peer.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 5), do_sample=False, max_new_tokens=4, pad_token_id=0
    )[0, 5:].tolist()
    assert len(texts) == 2 * len(programs.thread_choices(job))
    assert all([list(row) for row in zip(*text, strict=True)] == [expected, expected] for text in texts)


def test_ctranslate2_generates_from_the_converted_model(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stub, in which a generator records what it is asked for."""
    calls: list[dict[str, Any]] = []
    stub: Any = types.ModuleType("ctranslate2")
    stub.get_supported_compute_types = lambda device: {"float32", "int8"}
    stub.Generator = lambda path, **options: SimpleNamespace(
        generate_batch=lambda start, **limits: calls.append({"start": start, **options, **limits})
    )
    monkeypatch.setitem(sys.modules, "ctranslate2", stub)
    monkeypatch.setitem(sys.modules, "torch", sys.modules["torch"])  # which the program hides
    converted = Path(job.folder) / "ctranslate2"
    converted.mkdir()
    (converted / "vocabulary.json").write_text(json.dumps([f"<{index}>" for index in range(30)]))
    choices = programs.ctranslate2(job)
    choices["1 threads"](3, [7, 8], 4)
    assert calls[0]["start"] == [["<7>", "<8>"]] * 3
    assert (calls[0]["min_length"], calls[0]["max_length"], calls[0]["intra_threads"]) == (4, 4, 1)
    with pytest.raises(programs.MissingError, match="bfloat16"):
        programs.ctranslate2(programs.Job(**{**vars(job), "kind": "f16"}))


def test_a_program_answers_with_its_choices_and_then_with_seconds(job: Any) -> None:
    """The protocol of the processes, for tinylm by torch and for its fixed numbers of threads."""
    for name, choice in (("tinylm --engine torch", ""), ("tinylm, torch", "threads: 1")):
        answers: list[Any] = []
        request = programs.as_json(programs.Request(choice, 2, 3, 4))
        programs.serve(name, job, io.StringIO(request + "\n"), answers.append)
        assert choice in answers[0]["choices"]
        assert answers[1]["seconds"] > 0


def test_a_program_that_ends_is_an_error_and_not_a_wait(job: Any) -> None:
    broken = programs.Job(**{**vars(job), "folder": "/nowhere"})
    with pytest.raises(RuntimeError, match="ended with 1"), sampling.running("tinylm --engine torch", broken):
        pass


def test_the_thread_policy_benchmark_compares_the_default_with_the_faster_fixed_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sampling, "run_tinylm", lambda words: "")
    torch_policy = Fake({"default": 0.02, "threads: 1": 0.04, "threads: 2": 0.01})
    found = {"tinylm, torch": torch_policy, "tinylm, llama.cpp": Fake({}, "llama-cpp-python is not installed")}
    monkeypatch.setattr(thread_policy, "running", fakes(found))
    thread_policy.main(["--rounds", "2", "--neighbours", "0", "1"])
    printed = capsys.readouterr()
    header, _, *rows = rows_of(printed.out)
    assert header[-4:] == ["default", "threads: 1", "threads: 2", "of the best"]
    assert [row[3:] for row in rows] == [[count, "50", "25", "100", "0.50 (0.50 to 0.50)"] for count in ("0", "1")]
    assert "llama-cpp-python is not installed" in printed.err


def test_neighbours_compute_until_the_measurement_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    popen = thread_policy.subprocess.Popen

    def start(command: list[str]) -> Any:
        started.append(popen(command))
        return started[-1]

    monkeypatch.setattr(thread_policy.subprocess, "Popen", start)
    with thread_policy.busy_neighbours(2):
        assert [process.poll() for process in started] == [None, None]
    assert [process.poll() for process in started] == [-9, -9]


def test_a_draft_that_is_right_saves_passes_and_changes_no_token() -> None:
    model = drafting.prepared(drafting.make_subject("tiny"), int8=False)
    passes: list[int] = []

    class Counting:
        context = model.context
        make_cache = model.make_cache

        def last_logits(self, ids: Any, cache: Any, count: int) -> Any:
            passes.append(count)
            return model.last_logits(ids, cache, count)

    text = [*drafting.PROMPT, *drafting.decode(Counting(), 30, 20, None)]
    assert len(passes) == 20
    for accuracy, expected in ((1.0, 4), (0.0, 20)):
        passes.clear()
        draft = drafting.OracleDraft(text, accuracy, 30)
        assert drafting.decode(Counting(), 30, 20, draft) == text[1:]
        assert len(passes) <= expected
    assert len(passes) == 20


def test_the_drafting_benchmark_prints_a_row_for_each_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    drafting.main(["--tokens", "20", "--rounds", "1", "--accuracies", "0", "1"])
    assert [row[1] for row in rows_of(capsys.readouterr().out)[2:]] == ["none", "0%", "100%"]
