"""The location of the cache folder, and the permissions that it must have."""

import os
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


def test_without_a_home_folder_the_error_says_to_set_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINYLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(TinyLMError, match="no home folder for the cache; set TINYLM_CACHE"):
        cache_root()


def test_a_cache_folder_is_accessible_to_its_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "not" / "there"))
    folder = private_folder("tokens")
    assert folder == tmp_path / "not" / "there" / "tokens"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder("tokens") == folder


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_folder_that_others_can_write_is_an_error(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path))
    private_folder("tokens").chmod(mode)
    with pytest.raises(TinyLMError, match=r"Other users can write to .*tokens, so it is not trusted; chmod 700 "):
        private_folder("tokens")


def test_a_cache_folder_of_another_user_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path))
    folder = private_folder("tokens")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not is_private(folder)
    with pytest.raises(TinyLMError, match="Other users can write to"):
        private_folder("tokens")


def test_a_link_in_the_place_of_a_cache_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "tokens").symlink_to(elsewhere)
    with pytest.raises(TinyLMError, match="tokens is a symbolic link, so it is not trusted; set TINYLM_CACHE to "):
        private_folder("tokens")


def test_the_error_for_a_cache_that_cannot_be_created_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(TinyLMError, match=r"Cannot create .*tokens: .*; set TINYLM_CACHE to another folder"):
        private_folder("tokens")
