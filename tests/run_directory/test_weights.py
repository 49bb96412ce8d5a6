"""Tensors in the files of several ranks. Reference: the tensors that were divided, and torch's division into chunks."""

import json
import math
import re
import struct
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.run_directory.weights import Shard, is_finite, read_tensors, write_tensors

TENSORS = {
    "matrix": torch.arange(14.0).view(7, 2),
    "vector": torch.arange(5.0),
    "one row": torch.full((1, 3), 8.0),
    "cube": torch.arange(24.0).view(4, 3, 2).bfloat16(),
    "number": torch.tensor(3.0),
}


def test_the_parts_of_a_tensor_are_its_chunks() -> None:
    for rows in (1, 3, 4, 5, 8):
        tensor = torch.arange(2 * rows).view(rows, 2)
        chunks = [*tensor.chunk(4), *[tensor[:0]] * 4][:4]
        assert all(torch.equal(Shard(index, 4).rows(tensor), chunk) for index, chunk in enumerate(chunks))


def written(folder: Path, size: int) -> list[Path]:
    files = []
    for index in range(size):
        shard = Shard(index, size)
        files.append(folder / shard.file_name("x.safetensors"))
        write_tensors(files[-1], {name: shard.rows(tensor) for name, tensor in TENSORS.items()}, {"format": "pt"})
    return files


@pytest.mark.parametrize("size", [1, 3, 8])
def test_files_of_any_number_of_ranks_are_read_by_any_number(size: int, tmp_path: Path) -> None:
    files = written(tmp_path, size)
    assert len(set(files)) == size and set(files) == set(tmp_path.iterdir())
    for readers in (1, 2, 5):
        parts = [read_tensors(files, Shard(index, readers)) for index in range(readers)]
        assert all(part.keys() == TENSORS.keys() for part in parts)
        for name, tensor in TENSORS.items():
            found = torch.cat([part[name] for part in parts]) if tensor.dim() else parts[-1][name]
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


def test_tensors_that_were_read_do_not_change_with_the_file(tmp_path: Path) -> None:
    (file,) = written(tmp_path, 1)
    found = read_tensors([file])
    with file.open("r+b") as opened:
        opened.seek(-40, 2)
        opened.write(b"\1" * 40)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def change(file: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(file) | {name: tensor for name, tensor in changes.items() if tensor is not None}
    save_file({name: tensor for name, tensor in tensors.items() if changes.get(name, tensor) is not None}, file)


def with_shape(*shape: int) -> bytes:
    """A file with an empty tensor of this shape."""
    header = json.dumps({"matrix": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return struct.pack("<Q", len(header)) + header


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: file.unlink(), r"safetensors is missing\. Copy the whole run"),
    "without a tensor": (lambda file: change(file, {"vector": None}), "does not fit the other 2 files.* vector has"),
    "with another tensor": (lambda file: change(file, {"more": torch.zeros(2)}), "does not fit.* more has"),
    "without rows": (lambda file: change(file, {"matrix": torch.zeros(2, 2)}), "does not fit.* matrix has"),
    "with the rows of all": (lambda file: change(file, {"matrix": TENSORS["matrix"]}), "does not fit.* matrix has"),
    "with other columns": (lambda file: change(file, {"matrix": torch.zeros(3, 9)}), "does not fit.* matrix has"),
    "a number": (lambda file: change(file, {"vector": torch.tensor(1.0)}), "does not fit.* vector has"),
    "a vector": (lambda file: change(file, {"number": torch.ones(1)}), "does not fit.* number has"),
    "another dtype": (lambda file: change(file, {"matrix": torch.zeros(3, 2).half()}), "does not fit.* matrix has"),
    "integers": (lambda file: change(file, {"matrix": torch.zeros(3, 2).long()}), "matrix is I64, and weights are"),
    "a link": (lambda file: (file.rename(file.with_name("y")), file.symlink_to("y")), "it is a symbolic link"),
    "absurd": (lambda file: file.write_bytes(with_shape(0, 2**40, 2**40)), "matrix has the shape"),
    "overflowing": (lambda file: file.write_bytes(with_shape(2**64 - 1, 0)), "matrix has the shape"),
    "empty": (lambda file: file.write_bytes(b""), "is damaged or not a safetensors file"),
}


def test_files_that_are_not_the_parts_of_the_same_tensors_are_an_error(tmp_path: Path) -> None:
    wrong = []
    for name, (damage, message) in DAMAGES.items():
        for index in (0, 1):
            folder = tmp_path / f"{name} {index}"
            folder.mkdir()
            files = written(folder, 3)
            damage(files[index])
            try:
                read_tensors(files)
                wrong.append(f"{name}, file {index}: no error")
            except TinyLMError as error:
                if not re.search(message, str(error)):
                    wrong.append(f"{name}, file {index}: {error}")
    assert not wrong, "\n".join(wrong)


def test_files_in_another_order_or_number_are_an_error(tmp_path: Path) -> None:
    """Without its last files, a save may be one of fewer rows, which does not fit the model."""
    files = written(tmp_path, 3)
    for wrong in (files[::-1], files[1:], [*files, files[2]]):
        with pytest.raises(TinyLMError, match="does not fit the other"):
            read_tensors(wrong)


def test_a_rank_needs_memory_only_for_its_rows(tmp_path: Path) -> None:
    files = written(tmp_path, 2)
    size = sum(file.stat().st_size for file in files)
    read_tensors(files, Shard(1, 2), free_memory=lambda device: size // 2)
    with pytest.raises(TinyLMError, match="GB are free"):
        read_tensors(files, free_memory=lambda device: size // 2)


def test_one_value_that_is_not_finite_is_found_anywhere() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1,), (7,), (3, 129)):
            plain = torch.linspace(-60_000, 60_000, math.prod(shape)).to(dtype)
            assert is_finite(plain)
            for place in range(len(plain)):
                tensor = plain.clone()
                tensor[place] = (math.nan, math.inf, -math.inf)[place % 3]
                assert not is_finite(tensor.view(shape))
                assert not is_finite(tensor.view(shape).T if len(shape) == 2 else tensor)


def test_memory_that_runs_out_while_tensors_are_read_is_an_error_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    write_tensors(file, {"a": torch.ones(2, 3)}, {})
    monkeypatch.setattr(torch, "cat", Mock(side_effect=RuntimeError("not enough memory")))
    with pytest.raises(TinyLMError, match=r"model\.safetensors is damaged or .* \(not enough memory\)"):
        read_tensors([file])
