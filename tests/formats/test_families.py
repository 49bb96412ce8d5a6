"""Each model family compared with transformers: equal logits, and equal tensors after export and import."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.peers import CASES, CONTEXT, ids, load, save_peer
from tinylm.formats.families import resolve
from tinylm.formats.huggingface import read_folder, write_folder

TOLERANCE = 1e-4  # of logits whose standard deviation is about 1 to 10


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("peer")
    return save_peer(request.param, folder), folder


@torch.no_grad()
def test_logits_equal_those_of_transformers_with_and_without_a_cache(saved: tuple[Any, Path]) -> None:
    """The cached tokens go past the sliding windows, which have at most 9 tokens."""
    peer, folder = saved
    tokens = ids(CONTEXT)
    decoder = load(read_folder(folder))
    expected = peer(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(decoder.logits(decoder(tokens).hidden), expected, atol=TOLERANCE, rtol=0)
    cache = decoder.make_cache(len(tokens), CONTEXT)
    parts = [tokens[:, :13], *tokens[:, 13:24].split(1, dim=1)]
    logits = torch.cat([decoder.logits(decoder(part, cache).hidden) for part in parts], dim=1)
    torch.testing.assert_close(logits, expected[:, :24], atol=TOLERANCE, rtol=0)


def test_an_export_has_the_same_config_and_the_same_tensors_to_the_bit(saved: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = saved
    model = read_folder(folder)
    assert write_folder(tmp_path, model) == model.family
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = read_folder(tmp_path)
    assert resolve(again.config) == resolve(model.config)
    assert (again.special, again.chat_template) == (model.special, model.chat_template)
    assert all(torch.equal(again.tensors[name], model.tensors[name]) for name in model.tensors)


@torch.no_grad()
def test_the_scaled_embedding_of_gemma_is_rounded_in_its_dtype(tmp_path: Path) -> None:
    """To the bit in bfloat16, where sqrt(width) is rounded before it is multiplied."""
    peer = save_peer("gemma", tmp_path).to(torch.bfloat16)
    peer.save_pretrained(tmp_path)
    decoder = load(read_folder(tmp_path))
    expected = peer.get_input_embeddings()(ids(8))
    assert expected.dtype == torch.bfloat16 and torch.equal(decoder.embed(ids(8)), expected)
