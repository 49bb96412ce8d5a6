"""The benchmarks of foreign models, with small sizes."""

import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_the_formats_benchmark_prints_small_differences(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("formats").main(["--families", "gpt2", "qwen2"])
    header, _, *rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    names = ["family", "models", "import", "logits", "cached logits", "export", "GGUF", "PEFT", "LoRA"]
    assert [name.strip() for name in header] == names
    assert [[cell.strip() for cell in row[:2]] for row in rows] == [["gpt2", "3"], ["qwen2", "2"]]
    differences = [dict(zip(names, (cell.strip() for cell in row), strict=True)) for row in rows]
    for row in differences:
        for name in ("import", "logits", "cached logits", "export", "PEFT", "LoRA"):
            assert float(row[name]) < 1e-4, (row["family"], name)
    assert [row["GGUF"] for row in differences] == ["0e+00* (1 of 3)", "0e+00 (1 of 2)"]


def test_a_cell_has_the_largest_difference_and_the_number_of_models_compared() -> None:
    formats = importlib.import_module("formats")
    assert formats.cell([None, None]) == "-"
    assert formats.cell([formats.Difference(1e-6), formats.Difference(2e-5)]) == "2e-05"
    mixed = [formats.Difference(3e-6), None, formats.Difference(1e-7, tensors_only=True)]
    assert formats.cell(mixed) == "3e-06, 1e-07* (2 of 3)"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_opening_benchmark_prints_a_row_for_each_library_and_step(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("opening").main(["--layers", "1", "--width", "64"])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]
    assert [row[:2] for row in rows] == [
        ["tinylm", "opened"],
        ["tinylm", "first logits"],
        ["transformers", "opened"],
        ["transformers", "first logits"],
    ]
    assert all(re.fullmatch(r"\d+\.\d\d", row[2]) for row in rows)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("method", "name"), [(("--lr", "0.01"), "peft, fp32"), (("--full", "--lr", "0.001"), "transformers, fp32")]
)
def test_tinylm_and_its_peer_fine_tune_with_the_same_losses(
    method: tuple[str, ...], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Equal first losses require equal weights and batches; equal later losses require equal initial adapters."""
    options = ["--tiny", "--steps", "6", "--context", "32", "--peers", "fp32", *method]
    importlib.import_module("finetuning_peer").main(options)
    lines = capfd.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    header, _, tinylm, peer = rows
    assert [tinylm[0], peer[0]] == ["tinylm", name]
    for title in ("first loss", "mean of last quarter"):
        column = header.index(title)
        assert float(tinylm[column]) == pytest.approx(float(peer[column]), abs=2e-3)
    assert float(tinylm[header.index("mean of last quarter")]) < float(tinylm[header.index("first loss")]) - 0.005
