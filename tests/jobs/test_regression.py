"""Another job, regression, is a folder and a row: all of tinylm trains, resumes, evaluates and plans it unchanged."""

import json
import random
import subprocess
import sys
from pathlib import Path

from tests.shell import CHILD_LIMIT, environment

SMALL = ("--layers", "1", "--heads", "2", "--width", "32", "--batch-size", "8", "--device", "cpu", "--dtype", "fp32")


def python(here: Path, module: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A process of a module of the job."""
    command = [sys.executable, "-m", f"tests.jobs.regression.{module}", *arguments]
    found = subprocess.run(command, cwd=here, env=environment(), capture_output=True, text=True, timeout=CHILD_LIMIT)
    assert found.returncode == code, found.stderr
    return found


def test_a_job_of_another_kind_is_trained_resumed_evaluated_and_planned(tmp_path: Path) -> None:
    """The number of a text is that of its letters a."""
    draw = random.Random(0)
    texts = ["".join(draw.choice("abc") for _ in range(20)) for _ in range(300)]
    lines = [json.dumps({"text": text, "number": text.count("a") / 10}) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    plan = python(tmp_path, "row", "train", "texts.jsonl", "--dry-run", *SMALL).stdout
    assert "30 records); a number each" in plan.replace("\n", " ")
    python(tmp_path, "row", "train", "texts.jsonl", "--out", "run", "--steps", "100", "--seed", "1", *SMALL)
    resumed = python(tmp_path, "row", "train", "--resume", "run", "--steps", "200").stderr
    assert "Resuming" in resumed and "squared error" in resumed
    held_out = json.loads(python(tmp_path, "row", "eval", "-m", "run", "--json").stdout)
    assert held_out["texts"] == 30 and held_out["scores"]["R2"] > 0.5
    printed = python(tmp_path, "row", "eval", "texts.jsonl", "-m", "run").stdout
    assert "squared error" in printed and "R2" in printed
    whole = json.loads(python(tmp_path, "row", "eval", "texts.jsonl", "-m", "run", "--json").stdout)
    assert abs(float(python(tmp_path, "exact").stdout) - whole["loss"]) < 1e-5
    python(tmp_path, "row", "report", "run", "--out", "report.html")
    refused = python(tmp_path, "row", "train", "texts.jsonl", "--class-weights", "balanced", code=2)
    assert "--class-weights is for texts with labels, not for texts with numbers" in refused.stderr.replace("\n", " ")
