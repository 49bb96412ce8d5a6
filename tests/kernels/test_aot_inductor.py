import zipfile
from pathlib import Path

import pytest
import torch

from tests.kernels.absent import NamespaceWithout
from tinylm.errors import TinyLMError
from tinylm.kernels import aot_inductor
from tinylm.kernels.aot_inductor import compile_package, load_package


def program() -> torch.export.ExportedProgram:
    return torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))


def test_a_damaged_file_is_removed_with_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "code.pt2"
    file.write_bytes(b"not code")
    with pytest.raises(TinyLMError, match=r'code\.pt2 could not be loaded .* and was removed; `compile="on"` compiles'):
        load_package(file, {})
    assert not file.exists()


def test_a_flipped_bit_is_found_before_the_code_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading damaged machine code could end the process by a signal."""

    def load(*_: object) -> None:
        raise AssertionError("damaged code was loaded")

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", load)
    file, code = tmp_path / "code.pt2", b"machine code" * 1000
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model/code.so", code)
    intact = file.read_bytes()
    for bit in range(0, 8 * len(code), 997):
        flipped = bytearray(intact)
        flipped[intact.index(code) + bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(TinyLMError, match=r"model/code\.so is damaged"):
            load_package(file, {})


def test_a_failing_compiler_is_an_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, package_path: str, **__: object) -> None:
        Path(package_path).write_bytes(b"partial")
        raise RuntimeError("no compiler was found\nand more lines")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fail)
    with pytest.raises(TinyLMError, match=r'Compiling failed \(no compiler was found\); `compile="off"`'):
        compile_package(program, tmp_path / "code" / "code.pt2")
    assert list((tmp_path / "code").iterdir()) == []


def test_a_program_that_cannot_be_exported_is_an_error(tmp_path: Path) -> None:
    def fail() -> torch.export.ExportedProgram:
        raise ValueError("no graph")

    with pytest.raises(TinyLMError, match=r"Compiling failed \(no graph\)"):
        compile_package(fail, tmp_path / "code.pt2")


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TinyLMError, match=r"Cannot keep compiled code in .*code: Not a dir.* Set TINYLM_CACHE"):
        compile_package(program, tmp_path / "file" / "code" / "code.pt2")


def test_the_loader_is_unavailable_without_its_private_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert aot_inductor.is_available()
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_aoti", NamespaceWithout(torch._C._aoti, "AOTIModelPackageLoader"))
        assert not aot_inductor.is_available()
    with monkeypatch.context() as patch:
        patch.delattr(torch._C, "_aoti")
        assert not aot_inductor.is_available()
