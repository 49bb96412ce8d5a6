"""Models of the hub, without a network: they are in huggingface_hub's cache."""

from pathlib import Path
from typing import Any

import pytest

from tests.formats.peers import in_hub, save_peer
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


def test_neither_code_nor_pickles_are_downloaded(tmp_path: Path) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def snapshot(*args: Any, **options: Any) -> str:
        calls.append((args, options))
        return str(tmp_path)

    assert download("hf:owner/name.v1@refs/pr/1", snapshot) == tmp_path
    assert calls == [(("owner/name.v1",), {"revision": "refs/pr/1", "allow_patterns": list(FILES)})]
    assert not any(Path(name).match(pattern) for pattern in FILES for name in ("modeling.py", "pytorch_model.bin"))


def test_a_cached_model_is_used_offline(offline_hub: Path, tmp_path: Path) -> None:
    save_peer("llama", tmp_path / "llama")
    cached = in_hub(offline_hub, tmp_path / "llama", "owner/name")
    folder = download("hf:owner/name")
    assert (folder, read_folder(folder).family) == (cached, "llama")
    with pytest.raises(TinyLMError, match="Cannot download hf:owner/other"):
        download("hf:owner/other")
