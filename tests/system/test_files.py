"""Access to files that an attacker may have prepared, atomic replacement, and the cache folder."""

import hashlib
import json
import os
import re
import stat
import threading
from pathlib import Path

import pytest

from tinylm.errors import TinyLMError
from tinylm.system import files
from tinylm.system.files import cache_root, is_private, private_folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text('{"a": 1}')
    return path


def make_odd(kind: str, path: Path, target: Path) -> None:
    """Create something other than a regular file at `path`; links point to `target`."""
    if kind == "link":
        path.symlink_to(target)
    elif kind == "broken link":
        path.symlink_to(target / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


ODD = ("link", "broken link", "fifo", "folder", "device")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_opened(kind: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_odd(kind, tmp_path / "odd", file)
    for opener in (files.open_regular, files.open_append, files.read_text, files.hash_file):
        with pytest.raises(OSError):
            opener(tmp_path / "odd")
    monkeypatch.setattr(files, "check_regular", lambda path: None)  # exchanged after the check
    with pytest.raises(OSError):
        files.open_regular(tmp_path / "odd")
    assert file.read_text() == '{"a": 1}'


def test_a_regular_file_is_read_within_the_limit_hashed_and_appended_to(file: Path) -> None:
    assert files.read_text(file, 8) == '{"a": 1}'
    with pytest.raises(ValueError, match="it is larger than 0 MB"):
        files.read_text(file, 7)
    assert files.read_json(file) == {"a": 1}
    assert files.hash_file(file) == hashlib.sha256(b'{"a": 1}').hexdigest()
    with files.open_append(file) as opened:
        opened.write(b"more")
    assert file.read_text() == '{"a": 1}more'
    with files.open_append(file.with_name("new")) as opened:
        opened.write(b"first")
    assert file.with_name("new").read_text() == "first"


def test_invalid_json_and_half_of_a_surrogate_pair_are_value_errors() -> None:
    for text, reason in (
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("NaN", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("9" * 5000, "integer string conversion"),
        ("", "Expecting value"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n", "it is a Git LFS pointer"),
    ):
        with pytest.raises(ValueError, match=reason):
            files.parse_json(text)
    for half in ("\\ud800", "\\uDFFF", "\\ud800\\ud800", "\\udc00\\ud800", "x\\uDBff x"):
        for text in (f'{{"a": ["{half}"]}}', f'{{"{half}": 1}}'):
            with pytest.raises(ValueError, match="half of a surrogate pair"):
                files.parse_unicode_json(text)
    for whole in ("\\ud83d\\ude00", "\\\\ud800", "\\ud83d\\ude00\\uD83D\\uDE00", "é"):
        assert files.parse_unicode_json(f'["{whole}"]') == json.loads(f'["{whole}"]')


def test_a_link_to_itself_is_resolved_to_its_own_path_and_one_to_a_folder_is_not_accepted(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert files.resolve_links(tmp_path / "loop") == tmp_path.resolve() / "loop"
    assert files.resolve_links(tmp_path / "link") == tmp_path.resolve() / "folder"
    files.check_folder(tmp_path / "folder")
    for name in ("link", "nowhere"):
        with pytest.raises(OSError):
            files.check_folder(tmp_path / name)


def test_a_replaced_file_has_no_more_permissions_than_its_folder_and_the_umask_give(tmp_path: Path) -> None:
    for folder, umask, mode in (
        (0o777, 0o022, 0o644),
        (0o777, 0o077, 0o600),
        (0o777, 0o002, 0o664),
        (0o700, 0o002, 0o600),
    ):
        tmp_path.chmod(folder)
        before = os.umask(umask)
        try:
            with files.replacing(tmp_path / "file") as unfinished:
                unfinished.unlink()
                unfinished.touch(mode=0o600)  # as safetensors does
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_file_appears_when_it_is_complete_and_replaces_a_link_but_not_its_target(tmp_path: Path, file: Path) -> None:
    with files.replacing(tmp_path / "new") as unfinished:
        assert unfinished.parent == tmp_path
        unfinished.write_text("new")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new").read_text() == "new"
    (tmp_path / "link").symlink_to(file)
    with files.replacing(tmp_path / "link") as unfinished:
        unfinished.write_text("new")
    assert not (tmp_path / "link").is_symlink()
    with pytest.raises(KeyboardInterrupt), files.replacing(file) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == '{"a": 1}'
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "link", "new"}


def test_the_name_of_an_unfinished_file_is_random_and_recognised(tmp_path: Path) -> None:
    names = set()
    for _ in range(5):
        with files.replacing(tmp_path / "config.json") as unfinished:
            names.add(unfinished.name)
    assert len(names) == 5
    assert all(files.is_unfinished(name, ("config.json",)) for name in names)
    assert not any(files.is_unfinished(name, ("model.safetensors",)) for name in names)


def test_deleting_a_link_keeps_its_target(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "inside").write_text("kept")
    for kind in ODD:
        make_odd(kind, tmp_path / "odd", folder)
        files.remove_tree(tmp_path / "odd")
        assert not os.path.lexists(tmp_path / "odd")
        assert (folder / "inside").read_text() == "kept"
    (folder / "link").symlink_to(file)
    files.remove_tree(folder)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    files.remove_tree(folder)


def test_a_fifo_with_a_writer_is_an_os_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    writer = threading.Thread(target=lambda: os.close(os.open(tmp_path / "fifo", os.O_RDWR)), daemon=True)
    writer.start()
    with pytest.raises(OSError, match="not a regular file"):
        files.open_regular(tmp_path / "fifo")
    writer.join(timeout=20)


def test_environment_variables_choose_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/own")
    monkeypatch.delenv("TINYLM_CACHE")
    assert cache_root() == Path("/xdg/tinylm")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # invalid by the specification
    assert cache_root() == Path("/home/me/.cache/tinylm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("/home/me/.cache/tinylm")
    monkeypatch.setenv("HOME", "~")  # so that Python cannot determine the folder
    with pytest.raises(TinyLMError, match="no home folder for the cache; set TINYLM_CACHE"):
        cache_root()


def test_a_cache_folder_is_accessible_to_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "not" / "there"))
    folder = private_folder("tokens")
    assert folder == private_folder("tokens") == tmp_path / "not" / "there" / "tokens"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    others = rf"Other users can write to the cache folder {re.escape(str(folder))}, so it is not trusted; "
    for mode in (0o770, 0o702):
        folder.chmod(mode)
        with pytest.raises(TinyLMError, match=f"{others}chmod 700 {re.escape(str(folder))}"):
            private_folder("tokens")
    folder.chmod(0o700)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not is_private(folder)
    with pytest.raises(TinyLMError, match=f"{others}set TINYLM_CACHE to a folder of your own"):
        private_folder("tokens")


def test_a_link_or_a_file_as_a_cache_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "tokens").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("")
    for cache, words in (
        (tmp_path, "tokens is a symbolic link, so it is not trusted; set TINYLM_CACHE to "),
        (tmp_path / "file", r"Cannot create .*tokens: .*; set TINYLM_CACHE to another folder"),
    ):
        monkeypatch.setenv("TINYLM_CACHE", str(cache))
        with pytest.raises(TinyLMError, match=words):
            private_folder("tokens")
