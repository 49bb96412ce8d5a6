"""Where the cache is, and whose it must be."""

import os
import stat
from pathlib import Path

import pytest

from tinylm.cache import cache_root, is_private, private_folder
from tinylm.errors import TinyLMError


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/own")
    monkeypatch.delenv("TINYLM_CACHE")
    assert cache_root() == Path("/xdg/tinylm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_root() == Path("/home/me/.cache/tinylm")


def test_a_user_without_a_home_folder_is_told_to_name_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINYLM_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(TinyLMError, match="no home folder for a cache; set TINYLM_CACHE"):
        cache_root()


def test_a_cache_folder_is_created_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "not" / "there"))
    folder = private_folder("tokens")
    assert folder == tmp_path / "not" / "there" / "tokens"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder("tokens") == folder


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_folder_that_others_can_write_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path))
    private_folder("tokens").chmod(mode)
    with pytest.raises(TinyLMError, match=r"Other users can write to .*tokens, so it is not trusted; chmod 700 "):
        private_folder("tokens")


def test_a_cache_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path))
    folder = private_folder("tokens")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not is_private(folder)
    with pytest.raises(TinyLMError, match="Other users can write to"):
        private_folder("tokens")


def test_a_link_in_the_place_of_a_cache_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / "tokens").symlink_to(elsewhere)
    with pytest.raises(TinyLMError, match="Other users can write to"):
        private_folder("tokens")


def test_a_cache_that_cannot_be_created_is_an_error_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(TinyLMError, match=r"Cannot create .*tokens: .*; set TINYLM_CACHE to another folder"):
        private_folder("tokens")
