"""What tinylm computes does not depend on the settings of torch that a program has, and does not change them."""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tinylm
from tests.shell import run_child, same_tensors, story
from tinylm.errors import UsageError
from tinylm.machine.torch_settings import usual_settings
from tinylm.training.events import Event, Logged

TINY: dict[str, Any] = {
    "layers": 1,
    "heads": 2,
    "width": 16,
    "context": 16,
    "batch_size": 4,
    "seed": 1,
    "device": "cpu",
}
LONG = {**TINY, "steps": 6, "log_every": 2, "dropout": 0.3}


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text(story(2000))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS: dict[str, Callable[[], Any]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "meta device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_trained_loaded_and_computed_is_the_same_under_any_settings_of_the_program(
    name: str, dtype: str
) -> None:
    def results() -> tuple[Any, ...]:
        tinylm.train("text", "run", force=True, dtype=dtype, **LONG)
        tinylm.train(resume="run", steps=8)
        tinylm.finetune_lora("text", "run", "lora", steps=2, force=True)
        model = tinylm.load("run")
        streamed = list(model.generate("no", seed=1, engine="torch", max_tokens=20, stream=True))
        loss, logits = model.evaluate().loss, model.logits([[1, 2, 3]]).tolist()
        return (
            loss,
            logits,
            streamed,
            tinylm.load(adapters="lora").evaluate().loss,
            tinylm.compare("run", "lora", "text").difference,
        )

    expected = results()
    Path("run").rename("expected")
    with SETTINGS[name]():
        found = results()
    assert found == expected
    assert same_tensors(Path("run/model.safetensors"), Path("expected/model.safetensors"))


def test_the_settings_threads_and_random_numbers_of_the_program_stay() -> None:
    def state() -> tuple[Any, ...]:
        autocast = torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        return *autocast, torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()

    threads = torch.get_num_threads()
    with default_dtype(torch.float64), torch.autocast("cpu"), torch.inference_mode(), torch.device("meta"):
        before, torch_state = state(), torch.get_rng_state()
        with usual_settings():
            assert state() == (False, False, True, torch.float32, torch.device("cpu"), threads)
            torch.set_num_threads(threads + 1)
        assert state() == before
        with pytest.raises(UsageError):
            tinylm.train("nothing")
        result = tinylm.train("text", "run", **LONG)
        for chunk in result.load().generate("no", max_tokens=3, stream=True, engine="torch"):
            assert isinstance(chunk, str) and state() == before
        assert state() == before and torch.equal(torch.get_rng_state(), torch_state)


def test_what_another_thread_computes_does_not_change_a_training_or_the_random_numbers_of_the_program() -> None:
    expected = tinylm.train("text", "expected", **LONG)
    model, is_over = expected.load(), threading.Event()

    def compute() -> None:
        while not is_over.is_set():
            model.logits([[1, 2, 3]])

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        tinylm.train("text", "run", **LONG)
        drawn = {torch.rand(1).item() for _ in range(1000)}
    finally:
        is_over.set()
        thread.join()
    assert same_tensors(Path("run/model.safetensors"), Path("expected/model.safetensors"))
    assert len(drawn) > 990


def test_callbacks_that_draw_random_numbers_or_train_do_not_change_the_run() -> None:
    tinylm.train("text", "expected", **LONG)

    def draw(event: Event) -> None:
        torch.manual_seed(7)
        torch.rand(3)

    def train(event: Event) -> None:
        if isinstance(event, Logged):
            tinylm.train("text", "other", force=True, **{**LONG, "seed": event.step})

    for callback in (draw, train):
        tinylm.train("text", "run", force=True, callbacks=callback, **LONG)
        assert same_tensors(Path("run/model.safetensors"), Path("expected/model.safetensors"))


def test_a_second_thread_that_trains_at_the_same_time_is_an_error() -> None:
    errors: list[str] = []

    def train() -> None:
        try:
            tinylm.train("text", "second", **LONG)
        except UsageError as error:
            errors.append(str(error))

    def start(event: Event) -> None:
        if isinstance(event, Logged) and not errors:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    assert tinylm.train("text", "first", callbacks=[start], **LONG).step == 6
    assert len(errors) == 1 and errors[0].startswith("Another thread of this program trains a model")
    train()  # when the first one has ended
    assert len(errors) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked on Linux")
def test_a_process_that_another_thread_forks_meanwhile_can_train() -> None:
    """Its threads other than that one do not exist. A process of its own, since forks of this one are unsafe."""
    program = """
import os, threading, tinylm
from tinylm.training import api

def ends_with_its_own_error():
    try:
        with api._no_other_training():
            if os.fork() == 0:
                raise KeyError
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    except KeyError:
        os._exit(8)

with api._no_other_training():
    def fork():
        if os.fork() == 0:
            with api._no_other_training():
                os._exit(7)
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    codes = []
    if os.fork() == 0:
        os._exit(8 if ends_with_its_own_error() else 9)
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
print(codes)
"""
    assert run_child([sys.executable, "-W", "ignore", "-c", program]).stdout == "[8, 7]\n"
