"""Reading a damaged or forged run returns what was saved or raises TinyLMError."""

import contextlib
import dataclasses
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.run_directory.saved_runs import (
    CONFIG,
    SHAPE,
    TOKENIZER,
    best_save,
    last_save,
    save,
    saved_run,
    state_of,
    weights_of,
)
from tinylm.config.run import FORMAT, AdapterConfig
from tinylm.errors import AdapterNotModelError, NoRunError, TinyLMError, UsageError
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_weights, summarise
from tinylm.text.tokenizer import train_char


def check_reads(path: Path) -> None:
    """Every function that reads a run returns what was saved or raises TinyLMError, and no other exception."""
    for load in (best_save, last_save):
        with contextlib.suppress(TinyLMError):
            assert load(path) == 1
    with contextlib.suppress(TinyLMError):
        assert best_save(path / "last") == 1
    for named in (path, path / "last"):
        with contextlib.suppress(TinyLMError):
            summarise(named)
    with contextlib.suppress(TinyLMError):
        RunDirectory(path).truncate_metrics(1, 1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "run"
    saved_run(path, 1).append_metrics({"step": 1, "val_loss": 2.0})
    return path


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_last_weights_are_those_of_the_folder_last(ranks: int, tmp_path: Path) -> None:
    """Its files are those of one process, or of several with a shard each."""
    run = saved_run(tmp_path / "run", 0)
    save(run, 1, ranks)
    run.save_for_inference(weights_of(5), CONFIG, 5, state_of(5)["val_loss"])
    assert (best_save(tmp_path / "run"), best_save(tmp_path / "run/last")) == (5, 1)
    best, last = (summarise(path) for path in (tmp_path / "run", tmp_path / "run/last"))
    assert (last["best_step"], last["val_loss"]) == (1, state_of(1)["val_loss"])
    assert all(best[name] == last[name] for name in ("kind", "parameters", "step", "seconds"))


def test_a_link_named_last_is_not_followed_and_a_run_of_that_name_is_a_run(tmp_path: Path) -> None:
    saved_run(tmp_path / "other/last", 3)
    assert best_save(tmp_path / "other/last") == 3
    saved_run(tmp_path / "run", 1)
    (tmp_path / "run/last").rename(tmp_path / "moved")
    (tmp_path / "run/last").symlink_to(tmp_path / "moved")
    with pytest.raises(TinyLMError, match="links inside a run are not followed"):
        load_model(tmp_path / "run/last")


FILES = (
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "metrics.jsonl",
    "last/model.safetensors",
    "last/optimizer.safetensors",
    "last/state.json",
    "last/manifest.json",
)


@contextlib.contextmanager
def replaced(file: Path, content: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


@settings(max_examples=120)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_detected_or_harmless(run: Path, name: str, place: float, bit: int) -> None:
    content = bytearray((run / name).read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    with replaced(run / name, bytes(content)):
        check_reads(run)


def read(run: Path, name: str) -> int:
    """Load the save to which a file belongs."""
    return last_save(run) if name.startswith("last/") else best_save(run)


@settings(max_examples=50)
@given(name=st.sampled_from(FILES), part=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_detected(run: Path, name: str, part: float) -> None:
    content = (run / name).read_bytes().rstrip(b"\n")  # without it the file would be complete
    with replaced(run / name, content[: int(part * len(content))]):
        check_reads(run)
        if name != "metrics.jsonl":
            with pytest.raises(TinyLMError):
                read(run, name)
    assert best_save(run) == last_save(run) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_other_content_is_detected_and_the_error_names_a_missing_one(run: Path, name: str) -> None:
    for content in (b"", b"null", b"[]", b"7", b"{}", b'"text"', b"\xff\xfe", b"\x80" * 20):
        with replaced(run / name, content):
            check_reads(run)
    if name != "metrics.jsonl":
        with replaced(run / name, b""):
            (run / name).unlink()
            with pytest.raises(TinyLMError, match=re.escape(Path(name).name)):
                read(run, name)


def test_weights_without_a_tensor_or_of_another_save_are_detected(run: Path, tmp_path: Path) -> None:
    """Each is a valid safetensors file."""
    tensors = weights_of(1)
    with safetensors.safe_open(run / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    shorter = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}
    others = [(shorter, metadata), (weights_of(2), metadata), (tensors, {**metadata, "step": "2"}), (tensors, None)]
    for index, (content, data) in enumerate([*others, ({**tensors, "norm.weight": torch.ones(5)}, metadata)]):
        safetensors.torch.save_file(content, tmp_path / f"{index}", data)
        for name in ("model.safetensors", "last/model.safetensors"):
            with replaced(run / name, (tmp_path / f"{index}").read_bytes()), pytest.raises(TinyLMError):
                read(run, name)


def test_weights_of_another_shape_are_detected(run: Path) -> None:
    for changes in ({"layers": 2}, {"rope_theta": 500.0}, {"dropout": 0.5}, {"tie": False}):
        other = dataclasses.replace(CONFIG, model=dataclasses.replace(SHAPE, **changes))
        with replaced(run / "config.json", json.dumps(other.to_json()).encode()):
            for load in (best_save, last_save):
                with pytest.raises(TinyLMError):
                    load(run)


def test_another_tokenizer_is_detected(run: Path) -> None:
    for other in (train_char("acb"), train_char("abcd")):
        with (
            replaced(run / "tokenizer.json", other.to_str().encode()),
            pytest.raises(TinyLMError, match="is not the tokenizer that these weights were trained with"),
        ):
            load_model(run)


class Trap:
    """Unpickling it creates the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def pickled(mark: Path, path: Path) -> None:
    pickle.dump(Trap(mark), path.open("wb"))


def pickled_by_torch(mark: Path, path: Path) -> None:
    torch.save({"model": Trap(mark)}, path)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_pickle_is_never_opened_under_any_name(run: Path, tmp_path: Path) -> None:
    for write in (pickled, pickled_by_torch):
        write(tmp_path / "mark", tmp_path / "trap")
        for name in FILES:
            with replaced(run / name, (tmp_path / "trap").read_bytes()):
                check_reads(run)
                if name.endswith(".safetensors"):
                    with pytest.raises(TinyLMError, match=r"not a safetensors file|has changed since it was saved"):
                        read(run, name)
    assert not (tmp_path / "mark").exists()


def test_a_pickle_instead_of_the_weights_is_named_and_not_opened(tmp_path: Path) -> None:
    saved_run(tmp_path / "run", 0)
    (tmp_path / "run" / "model.safetensors").unlink()
    pickled_by_torch(tmp_path / "mark", tmp_path / "run" / "model.pt")
    with pytest.raises(TinyLMError, match=r"has no model\.safetensors; model\.pt is not opened, since a pickle"):
        load_model(tmp_path / "run")
    with pytest.raises(UsageError, match="Pickled checkpoints are never opened"):
        load_model(tmp_path / "run" / "model.pt")
    assert not (tmp_path / "mark").exists()


# Paths that are not a run, and other format versions


def test_a_path_without_a_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match=r"There is no run at .*absent"):
        read_config(tmp_path / "absent")
    with pytest.raises(NoRunError, match=r"is not a run directory: it has no config\.json"):
        read_config(tmp_path)


def test_the_error_for_another_format_says_to_upgrade_or_to_train_again(run: Path) -> None:
    newer = {**CONFIG.to_json(), "format": FORMAT + 1, "something": "new"}
    for values, message in (
        (newer, f"newer tinylm (format {FORMAT + 1}, this one reads {FORMAT}); upgrade tinylm"),
        ({"format": 1}, f"older tinylm (format 1, this one reads {FORMAT}); train the model again"),
    ):
        with (
            replaced(run / "config.json", json.dumps(values).encode()),
            pytest.raises(TinyLMError, match=re.escape(message)),
        ):
            read_config(run)


def test_an_adapter_is_not_loaded_as_a_model(tmp_path: Path) -> None:
    adapter = AdapterConfig(base="b", base_digest="d", rank=1, alpha=1.0, dropout=0.0, targets=("q_proj",))
    config = dataclasses.replace(CONFIG, adapter=adapter)
    run = RunDirectory.create(tmp_path / "run", config, TOKENIZER)
    run.save_for_inference({"lora": torch.ones(2)}, config, 1, 0.5)
    run.save_last({"lora": torch.ones(2)}, {}, state_of(1), config)
    with pytest.raises(AdapterNotModelError, match="is an adapter, not a model; give its base as `model`"):
        load_model(tmp_path / "run")
    assert summarise(tmp_path / "run")["kind"] == "adapter"
    assert torch.equal(read_weights(tmp_path / "run", config).tensors["lora"], torch.ones(2))
    for other in (dataclasses.replace(adapter, alpha=2.0), dataclasses.replace(adapter, base_digest="e")):
        with pytest.raises(TinyLMError, match="does not match its digest"):
            read_weights(tmp_path / "run", dataclasses.replace(config, adapter=other))
