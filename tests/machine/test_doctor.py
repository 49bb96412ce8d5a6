"""The diagnosis of a machine: findings and problems."""

import math
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.kernels.test_cpu import two_cores
from tests.machines import LAYER_SECONDS, MATMUL_RATE, pretend_bf16
from tests.shell import ROOT
from tinylm.errors import UsageError
from tinylm.machine import doctor
from tinylm.machine.doctor import OPTIONAL_PACKAGES, computation_error, diagnose
from tinylm.machine.measure import COMPARED_DTYPES, layer_seconds_entry, matmul_rates_entry
from tinylm.planning.plan import largest_models
from tinylm.reporter import LogReporter
from tinylm.system.files import SUBFOLDERS
from tinylm.system.machine_profile import usable_cores


def problems(**options: Any) -> list[tuple[str, bool]]:
    """The problems of this machine, without its load, which other tests may cause, and without its GPUs."""
    found = diagnose("cpu", LogReporter(), **options).problems
    return [(problem.message, problem.broken) for problem in found if problem.subject not in ("load", "gpu")]


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CXX", sys.executable)  # a compiler that exists


def test_a_sound_machine_has_no_problems() -> None:
    diagnosis = diagnose("cpu", LogReporter())
    assert problems() == [] and diagnosis.works
    version = diagnosis.sections["versions"]["torch"]  # without "+cu130" in the wheel for CUDA
    assert version in (torch.__version__, torch.__version__.partition("+")[0])
    assert diagnosis.sections["devices"]["matmul_tflops"]["fp32"] == MATMUL_RATE / 1e12
    assert diagnosis.sections["free_space"]["memory_gb"] > 1
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


def test_a_device_that_computes_wrong_logits_does_not_work() -> None:
    """As one that rounds to bf16."""
    assert 0 < computation_error("cpu") < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        ((message, broken),) = problems()
    assert broken and "computes wrong logits or gradients" in message


@pytest.mark.parametrize("result", [math.nan, RuntimeError("no kernel image\nfor this device"), MemoryError()])
def test_a_device_that_fails_does_not_work(result: float | Exception) -> None:
    ((message, broken),) = problems(error_of=Mock(side_effect=[result]))
    assert broken and ("cannot compute a small model" in message) == (result is not math.nan) and "\n" not in message


# Memory, disk and cache


def test_scarce_memory_and_disk_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOW_MEMORY", "LOW_DISK"):
        monkeypatch.setattr(doctor, name, 1 << 60)
    memory, disk, cache = problems()
    assert re.match(r"Only [\d,]+ MB of memory are free; end other programs", memory[0])
    assert re.match(r"Only [\d,]+ MB are free on the disk of this folder", disk[0])
    assert "on the disk of the cache" in cache[0]
    assert not any(broken for _, broken in (memory, disk, cache))


def test_a_cache_that_cannot_be_used_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in it cannot be written; other users can write to it; it cannot be created."""
    blocked = Path(os.environ["TINYLM_CACHE"], next(iter(SUBFOLDERS)), ".doctor")
    blocked.mkdir(parents=True)
    ((message, broken),) = problems()
    assert broken and f"{blocked}: Is a directory" in message and "TINYLM_CACHE" in message
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
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [problem for problem in diagnose("cpu", LogReporter()).problems if problem.subject != "load"]
    assert [(problem.subject, problem.broken) for problem in found] == [("gpu", False), ("compiler", False)]


@two_cores
def test_unused_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the tests compute
    assert [f"unset it to use all {usable_cores()}" in message for message, _ in problems()] == [True]


@pytest.mark.parametrize(("bf16", "formats"), [(True, COMPARED_DTYPES), (False, ("fp32",))])
def test_refresh_records_what_is_measured_now(
    bf16: bool, formats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_bf16(monkeypatch, bf16)
    devices = diagnose("cpu", LogReporter(), refresh=True).sections["devices"]
    recorded = matmul_rates_entry("cpu", formats).recorded()
    assert recorded is not None and set(recorded) == set(formats) and MATMUL_RATE not in recorded.values()
    assert devices["matmul_tflops"] == {name: round(rate / 1e12, 3) for name, rate in recorded.items()}
    layers = [layer_seconds_entry("cpu", dtype).recorded() for dtype in formats]
    assert not any(layer is None or LAYER_SECONDS in layer.values() for layer in layers)
