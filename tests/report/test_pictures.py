"""The pictures in docs/report.md are those that docs/pictures.py takes."""

import importlib
import re
import sys

from tests.shell import ROOT

sys.path.append(str(ROOT / "docs"))
pictures = importlib.import_module("pictures")

TAKEN = {f"report-{shot.name}.png" for subject in pictures.SUBJECTS.values() for shot in subject.shots}


def test_each_picture_is_shown_in_the_documentation_of_reports() -> None:
    shown = re.findall(r"pictures/(report-[\w-]+\.png)", (ROOT / "docs/report.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(TAKEN)
    assert {path.name for path in pictures.FOLDER.glob("report-*.png")} == TAKEN
    assert max((pictures.FOLDER / name).stat().st_size for name in TAKEN) <= 150_000
