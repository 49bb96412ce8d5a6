"""Weights in one or several files: mapped without a copy, and nothing outside of the folder."""

import json
import os
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from tests.formats.peers import save_peer
from tests.formats.refusals import assert_refused
from tinylm.formats.huggingface import read_folder
from tinylm.formats.safetensors_files import open_weights, write_file
from tinylm.run_directory.tensor_file import open_file

SHARDS = {"model-00001-of-00002.safetensors": ("a",), "model-00002-of-00002.safetensors": ("b", "c")}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for file, names in SHARDS.items():
        save_file({name: torch.full((2,), float(ord(name))) for name in names}, tmp_path / file)
    write_index(tmp_path, {name: file for file, names in SHARDS.items() for name in names})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 24}, "weight_map": weight_map}))


def test_a_model_in_shards_equals_the_same_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    save_peer("mixtral", tmp_path / "one")
    save_peer("mixtral", tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = read_folder(tmp_path / "one"), read_folder(tmp_path / "many")
    assert one.tensors.keys() == many.tensors.keys()
    assert all(torch.equal(one.tensors[name], many.tensors[name]) for name in one.tensors)


def test_weights_are_mapped_and_not_copied(tmp_path: Path) -> None:
    """Two look-ups give the same memory, but for GPT-NeoX's queries, keys and values, which are interleaved."""
    for name in ("gpt2", "llama", "gpt_neox"):
        save_peer(name, tmp_path)
        tensors = read_folder(tmp_path).tensors
        held = [(n, tensors[n], tensors[n]) for n in tensors]  # alive, so that no address is used twice
        copied = {n.split(".")[-2] for n, first, second in held if first.data_ptr() != second.data_ptr()}
        assert copied == ({"q_proj", "k_proj", "v_proj"} if name == "gpt_neox" else set())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of the process's memory")
def test_reading_all_weights_takes_no_private_memory(tmp_path: Path) -> None:
    size = 1 << 26
    save_file({"a": torch.ones(size // 4)}, tmp_path / "model.safetensors")

    def private() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before = private()
    tensor = open_weights(tmp_path)["a"].load()
    assert float(tensor.sum()) == size / 4
    assert private() - before < size / 10


def test_each_tensor_keeps_its_dtype_and_can_be_changed_while_the_file_stays(tmp_path: Path) -> None:
    dtypes = {"a": torch.bfloat16, "b": torch.float16, "c": torch.float32, "d": torch.int8}
    save_file({name: torch.ones(3, dtype=dtype) for name, dtype in dtypes.items()}, tmp_path / "model.safetensors")
    found = open_weights(tmp_path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {**dtypes, "d": None}
    tensor = found["c"].load()
    tensor += 1
    assert load_file(tmp_path / "model.safetensors")["c"].tolist() == [1.0] * 3


def test_a_written_file_is_read_by_safetensors(tmp_path: Path) -> None:
    """Views of one storage, an odd number of bfloat16 values, a scalar and no values at all."""
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "odd": torch.tensor([1.5, 2, 3], dtype=torch.bfloat16),
        "view": whole.T,
        "part": whole[1:],
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
    }
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    write_file(tmp_path / "a.safetensors", layout, tensors.__getitem__)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in found)
    with safetensors.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_index_names_tensors_in_files_of_its_folder_only(shards: Path) -> None:
    first, second = SHARDS
    names = ("../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "sub\\a.safetensors", ".hidden.safetensors")
    names = (*names, "pytorch_model.bin", "a.safetensors\0", "", f"{'a' * 201}.safetensors")
    rows = [({"a": name}, "is not the name of a safetensors file in the folder") for name in names]
    rows += [(weight_map, INDEX) for weight_map in (None, [], {}, {"a": 1}, {"a": ["x"]})]
    rows += [
        ({"a": first, "b": second}, "has the tensor c, which model.safetensors.index.json does not place there"),
        ({"a": first, "b": second, "c": first}, "has the tensor c"),
        ({"a": first, "b": second, "c": second, "d": second}, "names the tensor d"),
        ({"a": first, "b": "model-00003.safetensors"}, "model-00003.safetensors"),
    ]

    def attempt(weight_map: object) -> None:
        write_index(shards, weight_map)
        open_weights(shards)

    assert_refused(rows, attempt, (ValueError, OSError))


def test_links_are_not_followed_and_fifos_do_not_block(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    first = next(iter(SHARDS))
    (shards / first).rename(outside / first)
    (shards / first).symlink_to(outside / first)
    with pytest.raises(ValueError, match="is a link out of the folder"):
        open_weights(shards)
    os.mkfifo(shards / "model.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        open_weights(shards)


def test_the_cache_of_huggingface_hub_links_to_its_blobs(tmp_path: Path) -> None:
    root = tmp_path / "models--owner--name"
    snapshot, blobs = root / "snapshots" / "0123", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(1)}, blobs / "beef")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/beef"))
    assert open_weights(snapshot)["a"].load().tolist() == [1.0]
    save_file({"a": torch.ones(1)}, tmp_path / "beef")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(Path("../../../beef"))
    with pytest.raises(ValueError, match="is a link out of the folder"):
        open_weights(snapshot)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    contents = (b"", b"\xff" * 8, b"\x08" + b"\0" * 7 + b'{"a":{}}', b"PK\x03\x04" * 9, whole[:-1], whole + b"x")
    absurd = json.dumps({"a": {"dtype": "F32", "shape": [0, 1 << 40, 1 << 40], "data_offsets": [0, 0]}}).encode()
    contents = (*contents, len(absurd).to_bytes(8, "little") + absurd)

    def attempt(content: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(content)
        open_weights(tmp_path)

    assert_refused([(content, "model.safetensors is damaged") for content in contents], attempt, ValueError)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "no.safetensors")
