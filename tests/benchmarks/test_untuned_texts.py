"""The benchmark's texts, from small packages that are made here."""

import gzip
import importlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

texts = importlib.import_module("untuned_texts")


def archive(**files: bytes) -> io.BytesIO:
    """A tar archive in memory."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as written:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            written.addfile(member, io.BytesIO(data))
    file.seek(0)
    return file


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as written:
        for name, text in files.items():
            written.writestr(name, text)
    return path


def test_c_code_is_that_of_all_c_files_by_path(tmp_path: Path) -> None:
    package = tmp_path / "zstandard-0.tar.gz"
    package.write_bytes(archive(**{"z/b.c": b"int b;\n", "z/a/a.c": b"int a;\n", "z/a.h": b"int h;\n"}).getvalue())
    assert texts.c_code(package) == "int a;\nint b;\n"


def test_manual_pages_are_decompressed_and_other_files_left_out() -> None:
    files = {
        "./usr/share/man/fr/man1/ls.1.gz": gzip.compress(b"ls\n"),
        "./usr/share/doc/log.gz": gzip.compress(b"no\n"),
    }
    with tarfile.open(fileobj=archive(**files)) as opened:
        assert texts.members(opened, "*/man/fr/*.gz") == ["ls\n"]


def test_a_manual_page_has_no_macros_comments_and_fonts() -> None:
    macros = ".\\\" made by po4a\n.TH LS 1\n'br\n"
    page = macros + "ls \\- «\\ \\fBabc\\fP\\ » \\f(CWx\\f[R]\\s-1y\\s0 \\(aqn\\[aq] a\\e0\\&b\\,c\n.PP\n"
    assert texts.plain_text(page) == "ls - « abc » xy 'n' a\\0bc\n"


def test_tables_are_all_lines_in_another_order(tmp_path: Path) -> None:
    lines = [f"{number},x" for number in range(50)]
    package = wheel(
        tmp_path / "v.whl", **{"v/a.csv": "\n".join(lines[:30]), "v/b.csv": "\n".join(lines[30:]), "v/c.json": "{}"}
    )
    found = texts.csv_lines(package)
    assert found == texts.csv_lines(package)
    assert found.splitlines() != lines and sorted(found.splitlines()) == sorted(lines)


def test_conversations_are_the_english_ones_with_an_empty_line_after_each(tmp_path: Path) -> None:
    english = "categories:\n- a\nconversations:\n- - Hi.\n  - Hello.\n- - One?\n  - Yes\n  - 'Two: 2'\n"
    files = {"c/data/english/a.yml": english, "c/data/german/a.yml": "conversations:\n- - Hallo.\n"}
    package = wheel(tmp_path / "c.whl", **files)
    assert texts.conversations(package) == "Hi.\nHello.\n\nOne?\nYes\nTwo: 2\n\n"


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="must hold one file zstandard"):
        texts.main([str(tmp_path)])
