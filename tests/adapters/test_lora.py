import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import reference_parts
from tests.formats.refusals import assert_refused
from tests.variants import randomised, small
from tinylm.adapters.adapter import adapter_layers, adapter_tensors, load_adapter_tensors
from tinylm.adapters.lora import TARGETS, LoRAEmbedding, LoRALinear, add_lora, max_rank, merge_lora, target_modules
from tinylm.config.run import AdapterConfig
from tinylm.errors import UsageError
from tinylm.models.load_adapter import set_adapter_scale
from tinylm.models.merge import check_merged
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 12]])


def settings(
    rank: int = 3, alpha: float = 5.0, dropout: float = 0.0, targets: tuple[str, ...] = EVERYWHERE, **more: bool
) -> AdapterConfig:
    return AdapterConfig(base="b", base_digest="d", rank=rank, alpha=alpha, dropout=dropout, targets=targets, **more)


def exact(**choices: Any) -> Decoder:
    return randomised(build_model(small(**choices))).double()


def adapted(seed: int = 0) -> Decoder:
    """An adapted model in which B is random instead of zero, so that the adapter has an effect."""
    model = exact()
    layers = add_lora(model, settings(), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in layers.values():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def logits(model: Decoder) -> Tensor:
    with torch.no_grad():
        return model.logits(model(IDS).hidden)


def wrapped(inputs: int = 6, outputs: int = 4, bias: bool = True, dropout: float = 0.0) -> LoRALinear:
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(inputs, outputs, bias).double(), 2, 3.0 / 2, dropout)
    with torch.no_grad():
        layer.lora_B.normal_()
    return layer


# One layer.


def test_the_output_equals_the_formula_at_any_scale() -> None:
    """y_o = sum_i W_oi x_i + b_o + scale alpha / r sum_k B_ok sum_i A_ki x_i."""
    for has_bias in (True, False):
        layer = wrapped(bias=has_bias)
        x = torch.randn(3, 6, dtype=torch.float64)
        w, a, b = (p.detach().numpy().copy() for p in (layer.base.weight, layer.lora_A, layer.lora_B))
        bias = layer.base.bias.detach().numpy() if has_bias else 0.0
        np.testing.assert_allclose((layer.weight + layer.delta_weight()).detach(), w + 1.5 * (b @ a), rtol=1e-12)
        for scale in (1.0, 0.5, -2.0):
            layer.adapter_scale = scale
            expected = reference_parts.lora(x.numpy(), w, a, b, alpha=3.0 * scale, rank=2) + bias
            np.testing.assert_allclose(layer(x).detach(), expected, rtol=1e-12)
        layer.adapter_scale = 0.0
        assert torch.equal(layer(x), layer.base(x))


def test_rows_and_weight_of_an_embedding_equal_the_formula_at_any_scale() -> None:
    layer, ids = LoRAEmbedding(nn.Embedding(9, 4).double(), 2, 1.5), torch.tensor([[1, 8, 1]])
    with torch.no_grad():
        layer.lora_embedding_A.normal_()
    for scale in (1.0, 0.5, -2.0, 0.0):
        layer.adapter_scale = scale
        expected = layer.base.weight + 1.5 * scale * (layer.lora_embedding_B @ layer.lora_embedding_A).T
        torch.testing.assert_close(layer.weight, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer(ids), expected[ids], rtol=0, atol=1e-12)


def test_a_is_rank_by_inputs_and_b_is_outputs_by_rank_of_zeros() -> None:
    layer = LoRALinear(nn.Linear(6, 4), 2, 1.0, 0.0)
    assert (layer.lora_A.shape, layer.lora_B.shape) == ((2, 6), (4, 2))
    assert (layer.lora_A.count_nonzero(), layer.lora_B.count_nonzero()) == (12, 0)


def test_dropout_applies_only_to_the_adapters_input_and_only_in_training() -> None:
    layer = wrapped(dropout=0.5)
    x = torch.ones(2000, 6, dtype=torch.float64)
    layer.eval()
    expected = layer(x)
    torch.testing.assert_close(expected, layer(x))
    layer.train()
    dropped = layer(x)
    assert not torch.allclose(dropped, expected)
    torch.testing.assert_close(dropped.mean(0), expected.mean(0), rtol=0, atol=0.3)
    with torch.no_grad():
        layer.lora_B.zero_()
    torch.testing.assert_close(layer(x), layer.base(x), rtol=0, atol=0)


def test_the_seed_determines_a_and_leaves_the_global_generator_alone() -> None:
    one, again, other = (build_model(small()) for _ in range(3))
    for model, seed in ((one, 5), (again, 5), (other, 6)):
        before = torch.get_rng_state()
        add_lora(model, settings(), seed)
        assert torch.equal(torch.get_rng_state(), before)
    first, same, different = (adapter_tensors(adapter_layers(model)) for model in (one, again, other))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], different[name]) for name in first if "lora_A" in name)


# Targets.


def test_target_names_stand_for_projections() -> None:
    model = build_model(small())
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    expected: dict[tuple[str, ...], tuple[str, ...]] = {
        ("attention",): attention,
        ("query,value",): ("q_proj", "v_proj"),
        ("value", " key , query "): ("v_proj", "k_proj", "q_proj"),
        ("attention", "query"): attention,
        ("mlp", "output"): ("gate_proj", "up_proj", "down_proj", "o_proj"),
    }
    assert {targets: target_modules(list(targets), model) for targets in expected} == expected
    message = f"`target` is .*; it must be one of: {', '.join(TARGETS)}."
    rows = [(targets, message) for targets in (["brain"], ["query,"], [""], ["Query"])]
    assert_refused(rows, lambda targets: target_modules(targets, model), UsageError)


def test_a_target_adapts_its_projections_in_every_layer_and_no_others() -> None:
    """A feed-forward layer without a gate has no gate_proj, and one that is not a mixture no router."""
    for preset in ("modern", "gpt2"):
        for target, names in TARGETS.items():
            model = build_model(small(preset, kv_heads=4))
            modules = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
            expected = {name for name in modules if name.rpartition(".")[2] in names}
            if target == "router":
                assert not expected
                continue
            assert set(add_lora(model, settings(targets=names))) == set(adapter_layers(model)) == expected
            assert sum("layers." in name for name in expected) % 2 == 0  # two layers
    with pytest.raises(UsageError, match="`target` gate_proj matches no module"):
        add_lora(build_model(small("gpt2", kv_heads=4)), settings(targets=("gate_proj",)))


def test_experts_and_router_are_targets_only_in_a_mixture_of_experts() -> None:
    mixture, dense = build_model(small(experts=3)), build_model(small())
    for targets in (["experts"], ["query", "router"]):
        assert target_modules(targets, mixture)
        with pytest.raises(UsageError, match="needs a mixture of experts; this model is dense"):
            target_modules(targets, dense)
    assert target_modules(["mlp", "all"], dense)
    layers = add_lora(mixture, settings(targets=target_modules(["experts", "router"], mixture)))
    assert len(layers) == 2 * (3 * 3 + 1)


def test_the_maximum_rank_is_that_of_the_largest_matrix() -> None:
    cases: tuple[tuple[tuple[str, ...], int], ...] = ((("router",), 3), (("q_proj", "router"), 16), (("k_proj",), 8))
    for targets, rank in cases:
        model = build_model(small(experts=3, kv_heads=2))
        assert max_rank(model, targets) == rank
        add_lora(model, settings(rank=rank, targets=targets))
        with pytest.raises(UsageError, match=f"a rank of at most {rank}"):
            add_lora(build_model(small(experts=3, kv_heads=2)), settings(rank=rank + 1, targets=targets))


def test_a_rank_stabilised_adapter_is_scaled_by_the_root_of_the_rank() -> None:
    layers = add_lora(exact(), settings(rank=4, alpha=6.0, rank_stabilised=True))
    assert {layer.scale for layer in layers.values()} == {3.0}
    layers = add_lora(exact(), settings(rank=4, alpha=6.0))
    assert {layer.scale for layer in layers.values()} == {1.5}


def test_matrices_of_one_name_can_share_one_b() -> None:
    """Each layer has its own A. The saved tensors contain a copy of B per layer, so that PEFT can read them."""
    model = exact(experts=3)
    layers = add_lora(model, settings(share_b=True))
    owners: dict[int, set[str]] = {}
    for name, layer in layers.items():
        owners.setdefault(id(layer.lora_B), set()).add(name.rpartition(".")[2])
    assert sorted(map(tuple, owners.values())) == sorted((name,) for name in EVERYWHERE)
    assert sum(p.requires_grad for p in model.parameters()) == len(layers) + len(EVERYWHERE)
    assert len({tensor.data_ptr() for tensor in adapter_tensors(layers).values()}) == 2 * len(layers)


def test_adapters_on_one_base_add_up_in_proportion_to_their_scales() -> None:
    both, base = exact(), exact()
    layers = [add_lora(both, settings()), add_lora(both, settings())]
    for scales in ((1.0, 0.0), (0.0, 0.0), (1.0, -0.5)):
        expected = copy.deepcopy(base)
        for seed, (added, scale) in enumerate(zip(layers, scales, strict=True)):
            adapter = adapter_layers(adapted(seed))
            load_adapter_tensors(added, adapter_tensors(adapter), Path("adapter"))
            set_adapter_scale(added, scale)
            with torch.no_grad():
                for name, layer in adapter.items():
                    expected.get_submodule(name).weight += scale * layer.delta_weight()
        torch.testing.assert_close(logits(both), logits(expected), rtol=0, atol=1e-10)


# Tensors in PEFT's format.


def test_tensors_have_peft_names_and_load_back_and_those_of_another_adapter_are_refused() -> None:
    model, other = adapted(), adapted(1)
    tensors = adapter_tensors(adapter_layers(model))
    assert "layers.1.attention.q_proj.lora_A.weight" in tensors
    assert len(tensors) == 2 * 2 * len(EVERYWHERE)
    before = logits(other)
    assert not torch.equal(logits(model), before)
    first, *others = tensors
    wrong: list[dict[str, Tensor]] = [
        {},
        {name: tensors[name] for name in others},
        {**tensors, "more": torch.zeros(1)},
        {**tensors, first: torch.zeros(9, 9)},
        {**tensors, first: torch.full_like(tensors[first], math.nan)},
    ]
    assert_refused(
        [(forged, r"adapter (does not fit its config\.json: |.*not finite)") for forged in wrong],
        lambda forged: load_adapter_tensors(adapter_layers(other), forged, Path("adapter")),
    )
    assert torch.equal(logits(other), before)
    load_adapter_tensors(adapter_layers(other), tensors, Path("adapter"))
    assert torch.equal(logits(model), logits(other))


def test_a_merge_to_16_bits_is_the_rounded_merge() -> None:
    merged, rounded = adapted(), adapted()
    merge_lora(merged)
    merge_lora(rounded, dtype=torch.bfloat16)
    for name, module in rounded.named_modules():
        if name.endswith("q_proj"):
            assert torch.equal(module.weight, merged.get_submodule(name).weight.bfloat16())


# The check of a merge.


def test_a_merge_is_checked() -> None:
    base, model, merged, broken, huge, untrained = exact(), *(adapted() for _ in range(4)), exact()
    merge_lora(merged)
    merge_lora(broken)
    add_lora(untrained, settings())
    with torch.no_grad():
        next(broken.parameters()).fill_(math.nan)
        for layer in adapter_layers(huge).values():
            for parameter in layer.parameters():
                parameter.fill_(torch.finfo(torch.float64).max)
    difference, change = check_merged(base, model, merged)
    assert difference < 1e-10 and change > 0.01
    rows = [
        ((base, model, base), "The logits of the merged and the adapted model differ by"),
        ((base, model, broken), "differ by nan"),
        ((base, huge, huge), "logits of the model with its adapter are not finite"),
        ((base, untrained, base), "The adapter has no effect"),
    ]
    assert_refused(rows, lambda models: check_merged(*models))


def test_settings_out_of_range_are_refused() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"rank": 0}, "`rank` is 0"),
        ({"alpha": 0.0}, "`alpha` is 0.0"),
        ({"alpha": math.inf}, "`alpha` is inf"),
        ({"dropout": 1.0}, "`dropout` is 1.0"),
        ({"targets": ()}, "`target` names no module"),
    ]
    assert_refused(rows, lambda values: settings(**values), UsageError)
