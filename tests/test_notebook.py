"""docs/notebook.ipynb in a kernel, from the first cell to the last. Reference: training without the interruption."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.shell import same_tensors

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like docs/, beside the beginning of the corpus."""
    root = tmp_path_factory.mktemp("notebook")
    (root / "docs").mkdir()
    (root / "data").mkdir()
    text = (ROOT / "data/corpus.txt").read_text(encoding="utf-8")
    (root / "data/corpus.txt").write_text(text[:30_000], encoding="utf-8")
    return root / "docs"


@pytest.fixture(scope="module")
def outputs(home: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell."""
    notebook = nbformat.read(shutil.copy(ROOT / "docs/notebook.ipynb", home), 4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(home)}}).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: list[dict[str, Any]], stream: str = "stdout") -> str:
    return "".join(output["text"] for output in cell if output.get("name") == stream)


def value(cell: list[dict[str, Any]]) -> dict[str, str]:
    (data,) = (output["data"] for output in cell if output["output_type"] == "execute_result")
    return dict(data)


def test_training_shows_its_plan_and_a_bar_and_is_continued_after_an_interruption(
    outputs: list[list[dict[str, Any]]], home: Path
) -> None:
    _, interrupted, resumed, *_ = outputs
    assert value(interrupted)["text/plain"] == "('signal', 60)"
    assert "text:  " in printed(interrupted) and "resume='checkpoints/notebook' continues it." in printed(interrupted)
    widgets = [output for output in interrupted if "application/vnd.jupyter.widget-view+json" in output.get("data", {})]
    assert widgets
    assert "all steps are done" in printed(resumed)
    shown = value(resumed)
    assert "<svg" in shown["text/html"] and shown["text/plain"].startswith("TrainingResult('checkpoints/notebook'")
    # In a process of its own, since the kernel has the machine profile of no test.
    whole = "import tinylm; tinylm.train('../data/corpus.txt', 'whole', size='nano', steps=120, eval_every=30, seed=1)"
    subprocess.run([sys.executable, "-c", whole], cwd=home, check=True, timeout=120)
    assert same_tensors(home / "checkpoints/notebook/last/model.safetensors", home / "whole/last/model.safetensors")


def test_the_other_cells_show_what_their_texts_promise(outputs: list[list[dict[str, Any]]], home: Path) -> None:
    _, _, _, plot, model, text, stream, evaluation, comparison, errors, report = outputs
    (image,) = (output["data"]["image/png"] for output in plot if "image/png" in output.get("data", {}))
    assert len(image) > 1000
    assert value(model)["text/plain"].startswith("Model('checkpoints/notebook': decoder")
    assert len(printed(text)) > 50 and len(printed(stream)) > 20
    assert "PPMd" in value(evaluation)["text/html"]
    assert "B - A, bits per byte" in value(comparison)["text/html"]
    assert "did you mean lr?" in printed(errors) and "`heads` is 3" in printed(errors)
    assert value(report)["text/plain"] == "PosixPath('report.html')" and (home / "report.html").stat().st_size > 50_000
    assert not any(printed(cell, "stderr") for cell in outputs)
