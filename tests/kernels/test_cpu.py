import platform
import sys
from pathlib import Path

import pytest
import torch

from tinylm.kernels import cpu


def pretend(patch: pytest.MonkeyPatch, capabilities: dict[str, object] | None) -> None:
    """Make torch report these capabilities; `None`: remove the function that reports them."""
    patch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    if capabilities is None:
        patch.delattr(torch.cpu, "get_capabilities")


def test_an_intel_cpu_is_recognised_by_torch_or_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, vendor, intel in (
        ({"cpu_name": "Intel Xeon"}, {}, True),
        ({"cpu_name": "AMD EPYC"}, {"vendor_id": "GenuineIntel"}, False),
        (None, {"vendor_id": "GenuineIntel"}, True),
        (None, {"vendor_id": "AuthenticAMD"}, False),
        ({}, {}, False),
    ):
        with monkeypatch.context() as patch:
            pretend(patch, capabilities)
            patch.setattr(cpu, "identify_processor", lambda vendor=vendor: vendor)
            assert cpu.is_intel() == intel, (capabilities, vendor)


def test_bf16_is_read_from_the_capabilities_if_torch_has_no_private_names_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without capabilities, bf16 is not used."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    for avx, amx in ((True, False), (False, True), (False, False)):
        pretend(monkeypatch, {"avx512_bf16": avx, "amx_tile": amx})
        assert (cpu.computes_bf16(), cpu.has_amx()) == (avx or amx, amx)
    pretend(monkeypatch, None)
    assert not cpu.computes_bf16() and not cpu.has_amx()
    assert cpu.capabilities() == {}
    assert cpu.identify_torch()["capabilities"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_the_features_equal_those_in_proc_cpuinfo() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = {*next((line.split() for line in lines if line.startswith("flags")), [])}
    assert cpu.has_amx() == ("amx_tile" in flags)
    assert cpu.computes_bf16() == bool({"avx512_bf16", "amx_tile"} & flags)
    assert cpu.computes_fp16() == bool({"avx512_fp16", "amx_fp16"} & flags)
    assert cpu.has_avx512() == ({"avx512vl", "avx512bw", "avx512dq"} <= flags)


def test_the_identity_changes_with_threads_and_the_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu.identify_torch()
    assert before == cpu.identify_torch()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(torch, "__version__", "9.9")
    after = cpu.identify_torch()
    assert {name for name in after if after[name] != before[name]} == {"threads", "torch"}
