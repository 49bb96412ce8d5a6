"""Training from Python. Reference: the commands with the same settings."""

import inspect
import json
import logging
import os
import pydoc
import re
import signal
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import tinylm
from tests.shell import environment as child_environment
from tests.shell import run_child, run_ok, same_tensors, snapshot, story
from tinylm.commands.finetune import finetune_adapter, finetune_lora
from tinylm.commands.train import train
from tinylm.config.run import RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.kernels.process import SPIN_COUNT
from tinylm.run_directory.directory import LastSave, RunDirectory
from tinylm.system.ranks import Ranks
from tinylm.training import pipeline
from tinylm.training.events import Evaluated, Event, Logged, Planned, Started, Stepped

TINY: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 4}
FLAGS = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 16, "--batch-size", 4)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "one.txt").write_text(story(2000))
    (folder / "two.txt").write_text("no joy, no joy; no bed\n" * 60)
    return folder


def trained(out: str = "run", **settings: Any) -> Any:
    return tinylm.train("one.txt", **{**TINY, "out": out, "steps": 6, "eval_every": 3, "log_every": 2, **settings})


def python(code: str, **environment: str) -> str:
    """What a program prints that is run in a process of its own."""
    return run_child([sys.executable, "-c", code], env={**child_environment(), **environment}).stdout


def test_numbers_of_numpy_are_settings_like_those_of_python() -> None:
    numbers = {"steps": np.int64(6), "seed": np.int32(0), "lr": np.float32(0.25), "weight_decay": np.float64(0.5)}
    of_numpy = trained("numpy", **numbers).load()
    of_python = trained("python", **{name: value.item() for name, value in numbers.items()}).load()
    assert same_tensors(*(model.path / "model.safetensors" for model in (of_numpy, of_python)))
    with pytest.raises(UsageError, match=r"`steps` is 2.5; it must be a whole number"):
        trained("none", steps=np.float32(2.5))
    generated = of_numpy.generate("no", max_tokens=np.int64(9), temperature=np.float32(0.5), seed=np.int32(3))
    assert generated == of_python.generate("no", max_tokens=9, temperature=0.5, seed=3)
    with pytest.raises(UsageError, match=r"`temperature` is 500.0; it must be from 0 to 100"):
        of_numpy.generate("no", temperature=np.float32(500))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"force": "no"}, "`force` is 'no'; it must be True or False."),
        ({"skip_bad": 1}, "`skip_bad` is 1; it must be True or False."),
        ({"checkpoint_activations": "yes"}, "`checkpoint_activations` is 'yes'; it must be True or False."),
        ({"layers": [2]}, "`layers` is a list; it must be a whole number."),
        ({"lr": {}}, "`lr` is an object; it must be a number."),
        ({"time": b"1s", "steps": None}, "`time` is b'1s'; it must be a number or text."),
        ({"device": 3}, "`device` is 3; it must be text."),
        ({"exclude": 3}, "`exclude` is 3; it must be text or a list."),
        ({"exclude": ["a", 3]}, "An entry of `exclude` is 3; it must be text."),
        (
            {"local_layers": [0, 0.5], "local_window": 8},
            "An entry of `local_layers` is 0.5; it must be a whole number.",
        ),
        ({"init_from": 3}, "`init_from` is 3; it must be text or a path."),
        ({"resume": True}, "`resume` is True; it must be text or a path."),
        ({"out": 3}, "`out` is 3; it must be text or a path."),
        ({"callbacks": "abc"}, "The callbacks must be a function, or several."),
    ],
)
def test_a_setting_of_another_type_is_an_error_that_names_its_type(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        trained(**settings)
    assert not Path("run").exists()


def test_whole_numbers_for_fractions_are_stored_so_that_the_run_can_be_opened_and_resumed() -> None:
    """config.json has a digest, in which 16 and 16.0 differ."""
    trained("base", rope_theta=20000, dropout=0, weight_decay=np.int64(1), preset="modern")
    assert tinylm.train(resume="base", steps=7).step == 7
    adapter = tinylm.finetune_lora("one.txt", "base", "lora", steps=2, rank=4, alpha=16, dropout=0)
    config = adapter.load().adapters[0].config.adapter
    assert config is not None and (type(config.alpha), config.alpha) == (float, 16.0)
    third = trained("third", weight_decay=Fraction(1, 3)).load().config.training
    assert third is not None and third.weight_decay == 1 / 3


def test_none_stands_for_the_default_of_generation_and_evaluation() -> None:
    model = trained().load()
    for engine in ("llama.cpp", "torch"):
        names = ("top_p", "top_k", "min_p", "repeat_penalty", "max_tokens", "num_samples", "stop", "json_schema")
        settings: list[dict[str, Any]] = [{"seed": 1, "engine": engine, name: None} for name in names]
        texts = [model.generate("no", **choices) for choices in settings]
        assert set(texts) == {model.generate("no", seed=1, engine=engine)}
    assert model.evaluate(encoding=None, batch_size=None).loss == model.evaluate().loss


def test_settings_of_every_function_are_converted_and_checked() -> None:
    model = trained(local_window=8, local_layers=np.array([0])).load()
    both = ["one.txt", "two.txt"]
    Path("folder").mkdir()
    for name in both:
        (Path("folder") / name).write_text(Path(name).read_text())
    expected = model.evaluate("two.txt").loss
    assert model.evaluate("folder").loss != expected
    for given in (Path("one*"), ["one*"], np.array(["one*"]), "one*"):
        assert model.evaluate("folder", exclude=given, skip_bad=np.bool_(True)).loss == expected
    texts = {model.generate("no", seed=1, temperature=0, stop=stop) for stop in ({"e"}, iter(["e"]), ["e"], "e")}
    assert len(texts) == 1
    for choice in (np.array(["cosine", "linear"]), ["cosine"]):
        with pytest.raises(UsageError, match=r"`schedule` is .*; it must be one of"):
            trained("other", schedule=choice)
    with pytest.raises(UsageError, match=r"`tokenizer` is 'xxx.*; it must be auto, char, bpe or the path"):
        trained("other", tokenizer="x" * 300)
    wrong: dict[Any, str] = {-1: "from 1 to", 0: "from 1 to", 2.5: "a whole number", "4": "a number"}
    for batch_size, words in wrong.items():
        with pytest.raises(UsageError, match=f"`batch_size` is .*; it must be {words}"):
            tinylm.compare(model, model, "two.txt", batch_size=batch_size)


def test_a_path_is_a_setting_where_its_text_is() -> None:
    trained("of-text", val_data="two.txt")
    trained("of-path", val_data=Path("two.txt"))
    assert same_tensors(Path("of-text/model.safetensors"), Path("of-path/model.safetensors"))


def test_importing_tinylm_imports_no_torch_and_shows_only_the_public_names() -> None:
    functions = "compare errors events export_model finetune_adapter finetune_lora import_model load report train"
    printed = python("import sys, tinylm; print('torch' in sys.modules, *dir(tinylm))")
    assert printed.split() == ["False", "Model", "__version__", *functions.split()]
    with pytest.raises(AttributeError, match="module 'tinylm' has no attribute 'trian'"):
        tinylm.trian  # noqa: B018


@pytest.mark.slow
def test_the_first_use_imports_torch_with_the_spin_of_the_commands_as_training_time(here: Path) -> None:
    program = """
import os, time
begun = time.monotonic()
import tinylm
late = []
first = lambda event: late.append(time.monotonic() - begun - event.seconds) if hasattr(event, "seconds") else None
tinylm.train("one.txt", steps=1, layers=1, heads=2, width=16, callbacks=[first])
imported = tinylm._last_import[1] - tinylm._last_import[0]
print(late[0] / imported, os.environ["GOMP_SPINCOUNT"])
"""
    names = "from tinylm import *; from tinylm import models, Model; print(load.__name__, 'torch' in sys.modules)"
    assert python(f"import sys; {names}") == "load True\n"
    late, spin = python(program).split()
    assert float(late) < 0.3
    assert spin == str(SPIN_COUNT)
    assert python("import tinylm, os; tinylm.load; print(os.environ['GOMP_SPINCOUNT'])", GOMP_SPINCOUNT="5") == "5\n"


NOT_SETTINGS = {"quiet", "json", "config", "debug", "short_help", "dry_run", "report", "log_to"}
NOT_SETTINGS |= {"out", "model", "resume", "corpus", "files", "callbacks", "reporter", "progress", "ctx"}


def test_functions_that_train_take_the_options_of_their_commands() -> None:
    for command, function in (
        (train, tinylm.train),
        (finetune_lora, tinylm.finetune_lora),
        (finetune_adapter, tinylm.finetune_adapter),
    ):
        found: list[dict[str, Any]] = []
        for called in (command, function):
            parameters = inspect.signature(called).parameters.items()
            found.append({name: parameter.default for name, parameter in parameters if name not in NOT_SETTINGS})
        assert found[0] == found[1]
        assert next(iter(inspect.signature(function).parameters)) == "files"
        assert (found[0]["label_smoothing"], found[0]["force"], found[0]["format"]) == (None, False, "auto")
    assert inspect.signature(tinylm.finetune_adapter).parameters["bottleneck"].default == 16
    for choices in ({"schedule": True}, {"parallel": 1}, {"position": ["rope"]}, {"size": 3}, {"unknown": True}):
        with pytest.raises(UsageError, match="it must be one of"):
            tinylm.train("one.txt", **choices)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no-such-file"):
        tinylm.train(["no-such-file"] * 2000)
    # What mypy refuses reaches the functions from programs that it does not check.
    with pytest.raises(UsageError, match=r"`lr` is '0.1'; it must be a number\."):
        tinylm.train("one.txt", lr="0.1")  # type: ignore[arg-type]
    for choices in ({"steps": 2.5}, {"batch_size": 2.0}, {"layers": 1.5}, {"patience": 1.0}):
        (name,) = choices
        with pytest.raises(UsageError, match=rf"`{name}` is {choices[name]}; it must be a whole number\."):
            tinylm.train("one.txt", **choices)  # type: ignore[arg-type]
    meant = re.escape("unknown settings: layer (did you mean layers?), n_embd (did you mean width?), zzz")
    with pytest.raises(TypeError, match=meant):
        tinylm.train("one.txt", layer=1, n_embd=2, zzz=3)


# Training


def test_training_returns_the_result_that_the_command_prints(here: Path) -> None:
    result = trained()
    printed = [json.loads(line) for line in (here / "run/metrics.jsonl").read_text().splitlines()]
    assert result.run == Path("run")
    for columns, key in ((result.history.training, "loss"), (result.history.validation, "val_loss")):
        records = [record for record in printed if key in record]
        assert list(columns)[:2] == ["step", key]
        found = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        assert [{name: value for name, value in row.items() if value is not None} for row in found] == records
    assert repr(result.history) == (
        "History(training: 3 x step, loss, lr, grad_norm, tokens_per_second, seconds; "
        "validation: 3 x step, val_loss, val_bits_per_byte, val_tokens, seconds)"
    )
    assert (result.stopped_by, result.step, result.is_adapter) == ("steps", 6, False)
    losses = dict(zip(result.history.validation["step"], result.history.validation["val_loss"], strict=True))
    assert sorted(losses) == [0, 3, 6]
    assert (result.best_val_loss, result.best_step) == min((losses[step], step) for step in (3, 6))
    assert result.val_loss == losses[6]
    assert result.history.training["step"] == [2, 4, 6]


def test_the_same_seed_gives_the_weights_of_the_command(here: Path) -> None:
    trained("api", dropout=0.1, seed=3, local_window=8, local_layers=[0])
    options = ("--dropout", 0.1, "--seed", 3, "--local-window", 8, "--local-layers", "0")
    run_ok("train", "one.txt", "--out", "shell", *FLAGS, "--steps", 6, "--eval-every", 3, "--log-every", 2, *options)
    assert same_tensors(here / "api/last/model.safetensors", here / "shell/last/model.safetensors")
    same = [json.loads((here / run / "config.json").read_text()) for run in ("api", "shell")]
    assert same[0]["training"] == same[1]["training"] and same[0]["model"] == same[1]["model"]


def test_callbacks_get_every_event_and_nothing_is_printed(
    here: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    steps: list[int] = []
    callbacks = [events.append, lambda event: isinstance(event, Stepped) and steps.append(event.step)]
    with caplog.at_level(logging.INFO, "tinylm"):
        result = tinylm.train([here / "one.txt", "two.txt"], **TINY, steps=4, eval_every=2, callbacks=callbacks)
    assert result.run == Path("checkpoints/one")  # named after the first file
    assert capfd.readouterr() == ("", "")
    assert any("On cpu" in record.message for record in caplog.records if record.levelno == logging.INFO)
    planned, started, *_ = events
    assert isinstance(planned, Planned) and isinstance(started, Started)
    assert planned.plan.steps == 4 and steps == [1, 2, 3, 4]
    assert planned.parameters == sum(parameter.numel() for parameter in started.model.parameters())
    assert [event.step for event in events if isinstance(event, Evaluated)] == [0, 2, 4]
    assert [event.step for event in events if isinstance(event, Logged)] == result.history.training["step"]


def test_a_result_loads_its_best_weights(here: Path) -> None:
    result = trained()
    model = result.load()
    assert model.path == result.run
    saved = safetensors.torch.load_file(here / "run/model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.network.state_dict().items())
    assert sum(parameter.numel() for parameter in model.network.parameters()) == result.parameters
    shown = f"Model('run': decoder, {result.parameters:,} parameters, 1 layer x width 16, context 16;\n"
    assert repr(model) == shown + f"      char tokenizer, 28 ids; cpu in {model.config.runtime.dtype})"
    tinylm.finetune_lora("one.txt", "run", "lora", steps=1, dtype="fp32")
    lines = repr(tinylm.load("run", adapters=["lora=0.5"], quantize="int8")).splitlines()
    assert lines[1:] == ["      char tokenizer, 28 ids; cpu in fp32, int8 weights;", "      adapter 'lora', scale 0.5)"]


def test_a_resumed_run_measures_memory_before_it_loads_its_save(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(steps=3)
    before = snapshot(here)
    happened: list[str] = []
    load_last = RunDirectory.load_last

    def load(directory: RunDirectory, config: RunConfig) -> LastSave:
        happened.append("loaded")
        return load_last(directory, config)

    def measure(device: str, ranks: Ranks) -> int | None:
        happened.append("measured")
        return free.pop()

    free = [1 << 40, 1000]
    monkeypatch.setattr(RunDirectory, "load_last", load)
    monkeypatch.setattr(pipeline, "rank_memory", measure)
    with pytest.raises(TinyLMError, match=r"about .* are free\. Free memory, or resume in several") as error:
        tinylm.train(resume="run", steps=5)
    assert error.value.exit_code == 1 and snapshot(here) == before
    happened.clear()
    assert tinylm.train(resume="run", steps=5).step == 5
    assert happened == ["measured", "loaded"]


def test_an_error_names_the_setting_and_writes_no_file(here: Path) -> None:
    trained()
    before = snapshot(here)
    for message, call in {
        "`resume` fixes `tie=False`, `lr`, `out`": lambda: tinylm.train(resume="run", out="x", lr=1.0, tie=False),
        "`init_from` fixes `width`": lambda: tinylm.train("one.txt", "new", init_from="run", width=32),
        "`steps` and `time` contradict": lambda: tinylm.train("one.txt", "new", steps=1, time="5m"),
        "'soon' is not a length of time": lambda: tinylm.train("one.txt", "new", time="soon"),
        "no text to train on": lambda: tinylm.train(out="new"),
        "`architecture` is 'encoder_decoder'": lambda: tinylm.train("one.txt", "new", architecture="encoder_decoder"),
        "`heads` is 3; it must divide `width` (16)": lambda: tinylm.train("one.txt", "new", heads=3, width=16),
        "already holds a run; `force` replaces it": lambda: tinylm.train("one.txt", "run", **TINY),
    }.items():
        with pytest.raises(UsageError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match=re.escape("unknown settings: learning_rate (did you mean lr?)")):
        tinylm.train("one.txt", "new", learning_rate=0.1)
    model = tinylm.load("run")
    for call, setting, meant in (
        (model.generate, "max_new_tokens", "max_tokens"),
        (model.evaluate, "text_column", "text_key"),
        (lambda **settings: tinylm.compare(model, model, text="no joy", **settings), "formats", "format"),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{setting} (did you mean {meant}?)")):
            call(**{setting: 1})
    assert snapshot(here) == before


def test_help_names_the_arguments_first_and_lists_each_setting_in_a_line_that_can_be_read() -> None:
    for function in (tinylm.train, tinylm.finetune_lora, tinylm.finetune_adapter):
        first, *rest = pydoc.plain(pydoc.render_doc(function)).splitlines()[2:]
        assert first.startswith(f"{function.__name__}(files=()") and first.endswith("progress=True, **settings)")
        assert max(map(len, (first, *rest))) <= 130
        listed = {line.split(" = ")[0].strip() for line in rest if re.match(r" +[a-z][a-z0-9_]+ = ", line)}
        assert listed == set(inspect.signature(function).parameters) - NOT_SETTINGS
        assert not any("--" in line for line in rest)


def test_reports_and_comparisons_are_those_of_the_commands(here: Path) -> None:
    first, second = trained("first", steps=3), trained("second", steps=6)
    assert tinylm.report([first.run, second.run], "python.html", memorisation=False) == Path("python.html")
    run_ok("report", "first", "second", "--out", "shell.html", "--no-memorisation")
    pages = [re.sub(r'"created":"[^"]*"', "", Path(name).read_text()) for name in ("python.html", "shell.html")]
    assert pages[0] == pages[1] and len(pages[0]) > 50_000
    with pytest.raises(tinylm.errors.TinyLMError, match="There is no folder missing; choose another `out`"):
        tinylm.report(first.run, "missing/a.html", memorisation=False)
    printed = json.loads(run_ok("compare", "first", "second", "two.txt", "--json", "--unknown", "skip").stdout)
    compared = tinylm.compare("first", second.load(), "two.txt", unknown="skip")
    assert compared.to_json() == printed
    assert "bits per byte of A" in compared._repr_html_() and f"{compared.bits_per_byte_a:.4f}" in repr(compared)
    assert tinylm.events.Stepped is Stepped and tinylm.errors.UsageError is UsageError


# Ctrl-C


@pytest.fixture
def foreground() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, as in a process of a terminal, whatever the tests run in."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)


def interrupt(event: Event) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_a_run_that_can_be_resumed_or_before_the_first_leaves_no_files(
    here: Path, foreground: None
) -> None:
    """The last weights are kept, as before the first evaluation, since the validation data are few."""
    files = snapshot(here)
    with pytest.raises(KeyboardInterrupt):
        trained(callbacks=[lambda event: isinstance(event, Started) and interrupt(event)])
    assert snapshot(here) == files
    before = signal.getsignal(signal.SIGINT)
    held_out = {"steps": 50, "val_fraction": 0.1}
    result = trained(**held_out, callbacks=[lambda e: isinstance(e, Stepped) and e.step == 4 and interrupt(e)])
    assert (result.stopped_by, result.step, result.signal_number) == ("signal", 4, signal.SIGINT)
    assert (result.kept_step, result.best_step) == (4, 3)
    early = trained("early", **held_out, callbacks=[lambda e: isinstance(e, Stepped) and e.step == 2 and interrupt(e)])
    assert (early.kept_step, early.best_step, early.val_loss) == (2, 2, early.best_val_loss)
    assert same_tensors(here / "early/model.safetensors", here / "early/last/model.safetensors")
    assert signal.getsignal(signal.SIGINT) == before
    assert tinylm.train(resume="run", steps=8).stopped_by == "steps"


# Adapters


@pytest.mark.parametrize(
    ("function", "command", "settings", "options"),
    [
        ("finetune_lora", "finetune-lora", {"rank": 2, "target": "query,value"}, ("-r", 2, "--target", "query,value")),
        ("finetune_adapter", "finetune-adapter", {"bottleneck": 4}, ("--bottleneck", 4)),
    ],
)
def test_an_adapter_has_the_weights_of_the_command_and_loads_on_its_base(
    function: str, command: str, settings: dict[str, Any], options: tuple[object, ...], here: Path
) -> None:
    trained()
    finetune = getattr(tinylm, function)
    result = finetune("two.txt", model="run", out="api", steps=4, batch_size=4, lr=0.05, **settings)
    run_ok(command, "two.txt", "-m", "run", "-o", "shell", "--steps", 4, "--batch-size", 4, "--lr", 0.05, *options)
    weights = "last/adapter.safetensors"
    assert same_tensors(here / "api" / weights, here / "shell" / weights)
    assert result.is_adapter and result.parameters < 2000
    assert len(result.load().adapters) == 1
    assert finetune(resume="api", steps=5).step == 5
    other = tinylm.finetune_adapter if function == "finetune_lora" else tinylm.finetune_lora
    with pytest.raises(UsageError, match="is a run of another kind"):
        other(resume="api", steps=6)
