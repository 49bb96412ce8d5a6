"""tinylm cache."""

from pathlib import Path

import pytest

from tests.shell import assert_error, records, run_ok, tinylm
from tinylm.system.files import SUBFOLDERS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with 1,000 bytes in each part, in two files."""
    root = tmp_path / "cache"
    for name in SUBFOLDERS:
        (root / name / "inner").mkdir(parents=True, mode=0o700)
        (root / name / "one").write_bytes(b"x" * 400)
        (root / name / "inner/two").write_bytes(b"x" * 600)
    monkeypatch.setenv("TINYLM_CACHE", str(root))
    return root


def sizes() -> dict[str, tuple[int, int]]:
    return {part["name"]: (part["files"], part["bytes"]) for part in records(run_ok("cache", "--json"))}


def test_each_part_is_listed_with_its_size_and_cleared_by_name_or_all_but_the_measurements(cache: Path) -> None:
    assert sizes() == dict.fromkeys(SUBFOLDERS, (2, 1000))
    header, *rows = run_ok("cache").stdout.splitlines()
    assert header.split() == ["name", "content", "files", "size"]
    assert [row.split()[0] for row in rows] == list(SUBFOLDERS)
    assert all(row.endswith("1.0kB") for row in rows)
    cleared = records(run_ok("cache", "gguf", "tokens", "--clear", "--json"))
    found = [(part["name"], part["bytes"], part["cleared"]) for part in cleared]
    assert found == [("gguf", 1000, True), ("tokens", 1000, True)]
    assert sizes() == {**dict.fromkeys(SUBFOLDERS, (2, 1000)), "tokens": (0, 0), "gguf": (0, 0)}
    run_ok("cache", "--clear")
    assert [path.name for path in cache.iterdir()] == ["machine"]
    assert sizes() == {**dict.fromkeys(SUBFOLDERS, (0, 0)), "machine": (2, 1000)}
    run_ok("cache", "machine", "--clear")
    assert not list(cache.iterdir())


def test_links_and_missing_caches_are_left_alone(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "book.txt").write_text("x" * 5000)
    (cache / "gguf").rename(cache / "away")
    (cache / "gguf").symlink_to(outside)
    (cache / "tokens/link").symlink_to(outside)
    assert sizes()["tokens"][1] < 2000
    assert_error(tinylm("cache", "gguf", "--clear"), 1, "gguf")
    run_ok("cache", "tokens", "--clear")
    assert (outside / "book.txt").exists()
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "none"))
    assert set(sizes().values()) == {(0, 0)}
    run_ok("cache", "--clear")
    assert not (tmp_path / "none").exists()
