"""tinylm doctor."""

import json
import os
from pathlib import Path

import pytest

from tests.shell import records, run_ok, tinylm
from tinylm.commands.console import Console
from tinylm.commands.options import print_fields
from tinylm.machine import doctor

SECTIONS = ["versions", "optional_packages", "devices", "threads", "free_space", "cache", "computation"]
SECTIONS += ["largest_models"]


def test_json_and_text_have_every_section_the_problems_and_whether_all_works() -> None:
    (record,) = records(run_ok("doctor", "--json"))
    assert list(record) == [*SECTIONS, "problems", "works"]
    assert record["works"] is True
    assert record["versions"]["tinylm"]
    fields = {"instructions", "matmul_tflops", "layer_microseconds"}  # the last test shows their units
    assert fields <= record["devices"].keys()
    lines = run_ok("doctor", "--quiet").stdout.splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles == [*(name.replace("_", " ") for name in SECTIONS), "problems"]


def test_a_problem_is_named_with_its_solution_or_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = os.environ["TINYLM_CACHE"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "file/cache"))  # cannot be created
    result = tinylm("doctor")
    assert result.exit_code == 1
    assert "does not work" in result.stdout and "Error: 1 of the problems" in result.stderr
    result = tinylm("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["works"] is False
    monkeypatch.setenv("TINYLM_CACHE", cache)
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", {"tinylm-none": "a feature"})
    monkeypatch.setattr(doctor, "LOW_DISK", 1 << 60)
    shown = run_ok("doctor").stdout
    assert "not installed; for a feature" in shown
    assert "are free on the disk of this folder. To free some: tinylm cache --clear." in shown
    (record,) = records(run_ok("doctor", "--json"))
    assert record["optional_packages"]["tinylm-none"] is None


def test_numbers_are_printed_with_their_units(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"memory_gb": 8.6, "disk_gb": None, "matmul_tflops": {"fp32": 0.213, "bf16": 0.438}}
    fields |= {"layer_microseconds": 5.1, "texts_mb": 57.3}
    fields |= {"one_day": {"layers": 8, "tokens": 118_300_672, "memory_gb": 2.6}}
    print_fields(Console(), "speeds", fields, first=True)
    assert [line.split(maxsplit=1 if "day" not in line else 2) for line in capsys.readouterr().out.splitlines()] == [
        ["speeds"],
        ["memory", "8.6 GB"],
        ["disk", "-"],
        ["matmul", "fp32 0.213, bf16 0.438 TFLOP/s"],
        ["layer", "5.1 µs"],
        ["texts", "57.3 MB"],
        ["one", "day", "layers 8, tokens 118,300,672, memory 2.6 GB"],
    ]
