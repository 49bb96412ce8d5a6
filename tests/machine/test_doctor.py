"""The diagnosis of a machine: findings and problems."""

import copy
import re
import shutil
import tomllib
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines import MATMUL_RATE
from tests.shell import ROOT
from tinylm.errors import UsageError
from tinylm.kernels import cpu_features
from tinylm.machine import doctor
from tinylm.machine.doctor import LOW_DISK, OPTIONAL_PACKAGES, computation_error, diagnose
from tinylm.machine.measure import COMPARED_DTYPES, matmul_rates_entry
from tinylm.planning.plan import largest_models
from tinylm.reporter import LogReporter


def problems() -> list[tuple[str, bool]]:
    """The problems of this machine, without its load, which other tests may cause."""
    found = diagnose("cpu", LogReporter()).problems
    return [(problem.message, problem.broken) for problem in found if problem.subject != "load"]


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(doctor, "GPU_FILES", ())
    monkeypatch.setattr(doctor, "can_compile", lambda device: True)
    monkeypatch.setattr(doctor, "free_memory", lambda device: 8 << 30)
    monkeypatch.setattr(cpu_features, "computes_bf16", lambda: True)


def test_a_sound_machine_has_no_problems() -> None:
    diagnosis = diagnose("cpu", LogReporter())
    assert problems() == [] and diagnosis.works
    assert diagnosis.sections["versions"]["torch"] == torch.__version__
    assert diagnosis.sections["devices"]["matmul_tflops"]["fp32"] == MATMUL_RATE / 1e12
    assert diagnosis.sections["free_space"]["memory_gb"] == 8.6
    models = largest_models(diagnosis.machine)
    for name in ("parameters", "tokens"):
        assert models["one_day"][name] > models["ten_minutes"][name]
    with pytest.raises(UsageError, match="cuda"):
        diagnose("cuda", LogReporter())


def test_the_optional_packages_are_those_of_the_extras_and_of_some_platforms() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        lines for name, lines in project["optional-dependencies"].items() if name not in ("test", "lint", "bench")
    ]
    some_platforms = [line for line in project["dependencies"] if ";" in line]
    lines = [*some_platforms, *(line for lines in extras for line in lines)]
    assert {re.split("[<>=]", line)[0] for line in lines} == set(OPTIONAL_PACKAGES)


# Computation


def test_a_device_that_computes_wrong_logits_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < computation_error("cpu") < 1e-5

    def copy_wrongly(model: torch.nn.Module) -> torch.nn.Module:
        wrong = copy.deepcopy(model)
        with torch.no_grad():
            next(wrong.parameters()).mul_(1.1)
        return wrong

    monkeypatch.setattr(doctor, "copy", namedtuple("Copy", "deepcopy")(copy_wrongly))
    ((message, broken),) = problems()
    assert broken and "computes wrong logits or gradients" in message
    monkeypatch.setattr(doctor, "computation_error", lambda device: float("nan"))
    assert [broken for _, broken in problems()] == [True]


@pytest.mark.parametrize("error", [RuntimeError("no kernel image\nfor this device"), MemoryError()])
def test_a_device_that_fails_does_not_work(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> float:
        raise error

    monkeypatch.setattr(doctor, "computation_error", fail)
    ((message, broken),) = problems()
    assert broken and "cannot compute a small model" in message and "\n" not in message


# Memory, disk and cache


def test_scarce_memory_and_disk_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda device: 100_000_000)
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10 * LOW_DISK, 10 * LOW_DISK - 5000, 5000))
    found = problems()
    assert not any(broken for _, broken in found)
    assert [
        "100 MB of memory" in message or "Only 0 MB are free on the disk of" in message for message, _ in found
    ] == [True] * 3


def test_a_cache_that_cannot_be_used_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users can write to it; it cannot be created; its disk is full."""

    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        ((message, broken),) = problems()
    assert broken and "No space left on device" in message and "TINYLM_CACHE" in message
    (tmp_path / "file").write_text("")
    (tmp_path / "shared/tokens").mkdir(parents=True)
    (tmp_path / "shared/tokens").chmod(0o777)
    for name, words in (("shared", f"chmod 700 {tmp_path}/shared/tokens"), ("file/cache", "TINYLM_CACHE")):
        monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / name))
        ((message, broken),) = problems()
        assert broken and words in message


# Devices and threads


def test_a_gpu_that_torch_cannot_use_and_a_missing_compiler_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "GPU_FILES", (str(tmp_path),))
    monkeypatch.setattr(doctor, "can_compile", lambda device: False)
    assert [("GPU" in message, "compiler" in message, broken) for message, broken in problems()] == [
        (True, False, False),
        (False, True, False),
    ]


def test_unused_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4)  # the tests compute with one thread
    assert ["unset it to use all 4" in message for message, _ in problems()] == [True]


@pytest.mark.parametrize(("bf16", "formats"), [(True, COMPARED_DTYPES), (False, ("fp32",))])
def test_refresh_records_what_is_measured_now(
    bf16: bool, formats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_features, "computes_bf16", lambda: bf16)
    rates: dict[str, Any] = dict.fromkeys(COMPARED_DTYPES, 7e10)
    monkeypatch.setattr(doctor, "measure_matmul_rates", lambda device, dtypes: {name: rates[name] for name in dtypes})
    monkeypatch.setattr(doctor, "measure_layer_seconds", lambda dtype: {dtype: 8e-6})
    diagnosis = diagnose("cpu", LogReporter(), refresh=True)
    assert diagnosis.sections["devices"]["matmul_tflops"] == dict.fromkeys(formats, 0.07)
    assert diagnosis.sections["devices"]["layer_microseconds"] == pytest.approx(8, rel=0.1)
    assert matmul_rates_entry("cpu", formats).recorded() == dict.fromkeys(formats, 7e10)
