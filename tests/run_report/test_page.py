"""The HTML around the data: nothing in the data can leave its JSON block, and only known scripts run."""

import base64
import hashlib
import importlib
import json
import re
import sys

import pytest

from tests.shell import ROOT
from tinylm.run_report.page import render_page
from tinylm.system.html import encode_json

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "\u2028 \u2029",
    "\ud800",
    "a\0b",
    "&lt;",
    "é漢",
)


def data_of(page: str) -> object:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_a_string_is_read_back_and_cannot_end_its_element() -> None:
    for text in HOSTILE:
        encoded = encode_json({text: [text]})
        assert json.loads(encoded) == {text: [text]}
        assert encoded.isascii() and not set("<>&") & set(encoded)
        assert data_of(render_page({"runs": [text]})) == {"runs": [text]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"x": float("nan")})


def test_the_policy_admits_exactly_the_scripts_and_styles_of_the_page_and_no_request() -> None:
    page = render_page({"runs": []})
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]
        assert hashes
        assert re.search(rf"{tag}-src ([^;]*)", policy)[1].split() == hashes


def test_the_page_has_the_licence_of_uplot_and_refers_to_no_other_file() -> None:
    page = render_page({"runs": []})
    assert "Permission is hereby granted, free of charge" in page
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert not re.search(r"<(link|img|iframe|script)[^>]*\b(src|href)=", page)
    assert len(page) < 200_000


def test_each_picture_is_shown_in_the_documentation_of_reports() -> None:
    sys.path.append(str(ROOT / "docs"))
    pictures = importlib.import_module("pictures")
    taken = {f"report-{shot.name}.png" for subject in pictures.SUBJECTS.values() for shot in subject.shots}
    shown = re.findall(r"pictures/(report-[\w-]+\.png)", (ROOT / "docs/report.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(taken)
    assert {path.name for path in pictures.FOLDER.glob("report-*.png")} == taken
    assert max((pictures.FOLDER / name).stat().st_size for name in taken) <= 150_000
