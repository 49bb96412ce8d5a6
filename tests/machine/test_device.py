"""Choice of device and number format, and free memory, on pretended machines."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tinylm.errors import UsageError
from tinylm.kernels import cpu
from tinylm.machine import device as d


def training_dtype(wanted: str, device: str, bf16: float = 3.0) -> d.Choice:
    """The choice on a machine whose matrix products are `bf16` times as fast in bf16 as in fp32."""
    return d.choose_training_dtype(wanted, device, {"fp32": 1e11, "bf16": bf16 * 1e11}.__getitem__)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes torch report only the given devices."""

    def pretend(*devices: str, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in devices)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in devices)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return pretend


def test_auto_is_the_fastest_device_and_a_requested_one_is_used_or_a_usage_error(machine: Callable[..., None]) -> None:
    for devices, chosen in ((("cuda", "mps"), "cuda"), (("cuda",), "cuda"), (("mps",), "mps")):
        machine(*devices)
        assert d.choose_device("auto") == d.Choice(chosen, "the fastest device found")
    machine()
    assert d.choose_device("auto") == d.Choice("cpu", "no GPU was found")
    machine("cuda", "mps")
    for name in ("cuda", "mps", "cpu"):
        assert d.choose_device(name) == d.Choice(name, "requested")
    for there, wanted, words in (
        ((), "cuda", '`device="cuda"` is not available to torch .* use one of: cpu'),
        (("cuda",), "mps", '`device="mps"` is not available to torch .* use one of: cuda, cpu'),
        ((), "tpu", "`device` is 'tpu'; it must be one of: auto, cuda, mps, cpu"),
    ):
        machine(*there)
        with pytest.raises(UsageError, match=words):
            d.choose_device(wanted)


def test_training_is_in_bf16_where_that_is_faster(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for capability, dtype in (((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp32"), ((6, 1), "fp32")):
        machine("cuda", capability=capability)
        assert training_dtype("auto", "cuda").value == d.choose_generation_dtype("auto", "cuda").value == dtype
    assert training_dtype("auto", "mps").value == d.choose_generation_dtype("auto", "mps").value == "fp32"
    for has_bf16, times, dtype in ((True, 3.0, "bf16"), (True, 1.3, "bf16"), (True, 1.1, "fp32"), (False, 3.0, "fp32")):
        monkeypatch.setattr(cpu, "computes_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert training_dtype("auto", "cpu", times).value == dtype, (has_bf16, times)
        assert d.choose_generation_dtype("auto", "cpu").value == "fp32"


def test_a_requested_dtype_is_used_and_an_unknown_or_impossible_one_is_a_usage_error() -> None:
    for choose in (training_dtype, d.choose_generation_dtype):
        for name in ("fp32", "bf16", "fp16"):
            assert choose(name, "cuda") == d.Choice(name, "requested")
        with pytest.raises(UsageError, match="`dtype` is 'int8'; it must be one of: auto, fp32, bf16, fp16"):
            choose("int8", "cpu")
    with pytest.raises(UsageError, match='`dtype="fp16"` needs a GPU; on a CPU use bf16 or fp32'):
        training_dtype("fp16", "cpu")


def test_products_are_computed_in_the_dtype_and_weights_stay_in_fp32() -> None:
    layer = torch.nn.Linear(2, 2)
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)):
        with d.autocast("cpu", name):
            assert layer(torch.ones(1, 2)).dtype == dtype
    assert layer.weight.dtype == torch.float32


def test_compiling_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    rows = (("cpu", "c++", True), ("cpu", "g++", True), ("cpu", "", False), ("cuda", "", True), ("mps", "c++", False))
    for device, there, can in (*rows, ("cpu", "mycc", True)):
        folder = tmp_path / f"{device}-{there}"
        folder.mkdir()
        if there:
            (folder / there).symlink_to(sys.executable)
        monkeypatch.setenv("PATH", str(folder))
        if there == "mycc":
            assert not d.can_compile(device)
            monkeypatch.setenv("CXX", there)
        assert d.can_compile(device) == can


def test_the_description_and_free_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (123, 456))
    assert d.free_memory("cuda") == 123
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Big One")
    assert d.describe_device("cuda") == "cuda (Big One)"
    before = torch.get_num_threads()
    for threads, described in ((2, "2 threads"), (1, "1 thread")):
        torch.set_num_threads(threads)
        assert d.describe_device("cpu") == f"cpu ({described})"
    torch.set_num_threads(before)
    assert d.describe_device("mps") == "mps"


MEMINFO = "proc/meminfo"
LIMIT, USED, STAT = (f"sys/fs/cgroup/memory.{name}" for name in ("max", "current", "stat"))


def test_free_memory_is_the_smallest_limit_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (files, physical, free) in enumerate(
        (
            ({MEMINFO: "MemTotal: 7 kB\nMemAvailable:    5 kB\n", LIMIT: "max\n", USED: "10\n", STAT: ""}, 8000, 5120),
            ({MEMINFO: "MemAvailable: 5 kB", LIMIT: "4000\n", USED: "1000\n", STAT: "anon 1\n"}, 8000, 3000),
            ({LIMIT: "4000\n", USED: "3900\n", STAT: "file 9\ninactive_file 1200\nactive_file 7"}, 8000, 1300),
            ({LIMIT: "1000", USED: "1500", STAT: ""}, 8000, 0),
            ({MEMINFO: "MemTotal: 7 kB"}, 8000, 8000),
            ({MEMINFO: "MemAvailable: 9 kB"}, 8000, 8000),
            ({}, None, None),
        )
    ):
        for name, text in files.items():
            path = tmp_path / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def sysconf(name: str, physical: int | None = physical) -> int:
            if physical is None:
                raise ValueError(name)
            return {"SC_PAGE_SIZE": 1000, "SC_PHYS_PAGES": physical // 1000}[name]

        monkeypatch.setattr(os, "sysconf", sysconf)
        assert d.free_memory("cpu", tmp_path / str(number)) == free, (files, physical)
