"""Models of the hub, without a network: they are in huggingface_hub's cache."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.formats.peers import save_peer
from tests.formats.refusals import assert_refused
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.hub import FILES, download, is_reference
from tinylm.formats.huggingface import read_folder
from tinylm.models.open import foreign_name


def test_a_reference_names_owner_and_name_and_the_model_has_the_name() -> None:
    wrong = ("", "name", "owner/name/more", "../name", "owner/..", "owner/na me", "o/n@", "o/n@../x y")
    assert all(is_reference(f"hf:{reference}") for reference in wrong)
    assert_refused([(reference, "OWNER/NAME") for reference in wrong], lambda name: download(f"hf:{name}"), UsageError)
    for reference in ("hf:owner/name.v1", "hf:owner/name.v1@main", "hf:owner/name.v1@refs/pr/1"):
        assert foreign_name(Path(reference)) == "name.v1"


def test_neither_code_nor_pickles_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def snapshot(*args: Any, **options: Any) -> str:
        calls.append((args, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert download("hf:owner/name.v1@refs/pr/1") == tmp_path
    assert calls == [(("owner/name.v1",), {"revision": "refs/pr/1", "allow_patterns": list(FILES)})]
    assert not any(Path(name).match(pattern) for pattern in FILES for name in ("modeling.py", "pytorch_model.bin"))


def test_a_cached_model_is_used_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "models--owner--name"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("0123")
    (root / "blobs").mkdir()
    (root / "snapshots" / "0123").mkdir(parents=True)
    save_peer("llama", root / "blobs")
    for file in (root / "blobs").iterdir():
        (root / "snapshots" / "0123" / file.name).symlink_to(Path("../../blobs") / file.name)
    folder = download("hf:owner/name")
    assert (folder, read_folder(folder).family) == (root / "snapshots" / "0123", "llama")
    with pytest.raises(TinyLMError, match="Cannot download hf:owner/other"):
        download("hf:owner/other")
