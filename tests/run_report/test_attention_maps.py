"""Attention weights, against the formula of tests/reference_parts.py in float64."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinylm
from tests import reference
from tests.reference_parts import Visible, attend_full, bidirectional, causal, windowed
from tests.shell import TINY, run_ok
from tests.variants import randomised, small
from tinylm.jobs.run_tokens import reopen_part
from tinylm.run_report.predictions import _attention, recorded_attention
from tinylm.transformer.attention import CrossAttention, RelativeDotProduct, SelfAttention
from tinylm.transformer.build import build_model

TOKENS = 9
CASES: list[tuple[dict[str, Any], Visible]] = [
    ({"qk_norm": False}, causal),
    ({"position": "none", "qk_norm": False, "kv_heads": 1}, causal),
    ({"position": "none", "qk_norm": False, "local_window": 3, "local_layers": (0, 1)}, windowed(3)),
    ({"position": "relative", "relative_clip": 2, "qk_norm": False}, causal),
    ({"position": "none", "qk_norm": False, "attention_scale": False}, causal),
    ({"architecture": "encoder", "position": "none", "qk_norm": False}, bidirectional(TOKENS)),
]


def expected_weights(layer: Any, x: np.ndarray, memory: np.ndarray, visible: Visible, theta: float | None) -> Any:
    """(H, T, S) from the weight matrices of an attention layer and its inputs, (T, D) and (S, D)."""

    def heads(projection: Any, inputs: np.ndarray) -> np.ndarray:
        weight = projection.weight.detach().numpy()
        return (inputs @ weight.T).reshape(len(inputs), -1, layer.head_dim).transpose(1, 0, 2)

    queries, keys = heads(layer.q_proj, x), heads(layer.k_proj, memory)
    core = layer.core
    table = core.relative_keys.detach().numpy() if isinstance(core, RelativeDotProduct) else None
    weights = []
    for head, query in enumerate(queries):
        key = keys[head * len(keys) // len(queries)]
        if theta is not None:
            query, key = (np.array([reference.rotary(row, i, theta) for i, row in enumerate(x)]) for x in (query, key))
        relative = {"relative_keys": table, "clip": core.clip} if table is not None else {}
        weights.append(attend_full(query, key, np.eye(len(key)), visible, multiplier=core.scale, **relative))
    return np.array(weights)


@pytest.mark.parametrize(("choices", "visible"), CASES)
def test_weights_equal_the_explicit_formula_in_float64(choices: dict[str, Any], visible: Visible) -> None:
    config = small(**choices)
    model = randomised(build_model(config)).double()
    inputs: dict[str, np.ndarray] = {}
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention):
            module.register_forward_pre_hook(
                lambda _, given, name=name: inputs.update({name: given[0][0].detach().numpy()})
            )
    with recorded_attention(model) as weights, torch.no_grad():
        model(torch.randint(config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1)))
    assert set(weights) == set(inputs) == {"layers.0.attention", "layers.1.attention"}
    theta = config.rope_theta if config.position == "rope" else None
    for name, x in inputs.items():
        expected = expected_weights(model.get_submodule(name), x, x, visible, theta)
        # The tables of RoPE are stored in fp32, and the weights are returned in it.
        torch.testing.assert_close(weights[name].double(), torch.from_numpy(expected), rtol=0, atol=1e-6)


def test_cross_attention_reads_the_source_and_the_hooks_are_removed() -> None:
    config = small("original", architecture="encoder-decoder", encoder_layers=1, kv_heads=4, bias=False)
    model = randomised(build_model(config)).double()
    seen: list[Any] = []
    layer = model.layers[1].cross_attention
    assert isinstance(layer, CrossAttention)
    layer.register_forward_pre_hook(lambda _, given: seen.append([part[0].detach().numpy() for part in given[:2]]))
    ids, source = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6, 7, 8]])
    with recorded_attention(model) as weights, torch.no_grad():
        model(ids, source)
    assert set(weights) == {
        "encoder.layers.0.attention",
        *(f"layers.{i}.{kind}" for i in (0, 1) for kind in ("attention", "cross_attention")),
    }
    expected = expected_weights(layer, *seen[0], bidirectional(5), None)
    torch.testing.assert_close(
        weights["layers.1.cross_attention"].double(), torch.from_numpy(expected), rtol=0, atol=1e-6
    )
    before = dict(weights)
    model(ids, source)
    assert len(seen) == 2
    assert weights == before, "a hook was left"


def test_the_attention_maps_of_an_encoder_decoder_stay_within_their_limit(tmp_path: Path) -> None:
    """The decoder has two maps per layer and head, the encoder one."""
    pairs, run = tmp_path / "pairs.tsv", tmp_path / "run"
    pairs.write_text("abcabc\tcbacba\nabcab\tbacba\n" * 4)
    depths = ("--layers", 3, "--encoder-layers", 1)
    options = ("--architecture", "encoder-decoder", "--tokenizer", "char", "--steps", 1, *TINY, *depths)
    run_ok("train", pairs, "--val-data", pairs, "--out", run, *options)
    model, limit = tinylm.load(run), 600
    assert model.data is not None
    maps = _attention(model, reopen_part(run, model.data, model.tokenizer, "val"), limit)
    sizes = [len(base64.b64decode(layer["weights"])) for each in maps for layer in each["layers"]]
    assert len(sizes) == 1 + 2 * 3
    assert limit / 2 < sum(sizes) <= limit
