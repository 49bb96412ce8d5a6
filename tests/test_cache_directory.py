"""The location of the cache folder, and the permissions that it must have."""

import os
import re
import stat
from pathlib import Path

import pytest

from tinylm.cache_directory import cache_root, is_private, private_folder
from tinylm.errors import TinyLMError


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

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
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
