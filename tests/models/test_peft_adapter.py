"""Adapters that PEFT made, on models of every family and with every switch: the logits that PEFT computes."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tinylm
from tests.formats.peers import edit_json, make_peer, save_peer
from tests.formats.peft_adapters import TOKENS, make_adapter
from tinylm.adapters.adapter import Replacement
from tinylm.errors import TinyLMError, UsageError
from tinylm.models.merge import merge_adapter
from tinylm.models.open import open_model
from tinylm.reporter import LogReporter

load = functools.partial(tinylm.load, dtype="fp32")  # as PEFT computes

TIED = "llama tied, theta, epsilon"
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
# By name: the model, and the fields of its LoraConfig.
SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"all linear layers of {case}": (case, {"target_modules": "all-linear"})
        for case in (
            *("gpt2 untied, exact GELU, narrow", "llama with biases, head_dim, GELU", "qwen2", "qwen3"),
            *("mixtral", "qwen3_moe without normalised routing, windows", "gpt_neox", "gemma", "gemma3_text"),
        )
    },
    "rank-stabilised": ("llama", {"target_modules": QKVO, "use_rslora": True}),
    "regular expression": ("llama", {"target_modules": r".*\.[02]\.self_attn\.(q|v)_proj", "lora_alpha": 7}),
    "rank and alpha patterns": (
        "llama",
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 5, r"layers\.1\.mlp\..*": 2},
            "alpha_pattern": {r"^model.layers.0.mlp.up_proj": 11, r".*\.(k|v)_proj": 1.5},
        },
    ),
    "patterns, rank-stabilised, fused": (
        "gpt2",
        {
            "target_modules": ["c_attn", "c_proj"],
            "use_rslora": True,
            "rank_pattern": {r"h\.[01]\.attn\.c_attn": 7},
            "alpha_pattern": {"mlp.c_proj": 2},
        },
    ),
    "one layer": ("gpt_neox", {"target_modules": ["query_key_value"], "layers_to_transform": 1}),
    "excluded modules": (
        "llama",
        {"target_modules": "all-linear", "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"]},
    ),
    "fan_in_fan_out": ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True}),
    "biases of adapted layers": ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "bias": "lora_only"}),
    "all biases": ("gpt_neox", {"target_modules": ["query_key_value"], "bias": "all"}),
    "all biases of a Llama": ("llama with biases, head_dim, GELU", {"target_modules": ["q_proj"], "bias": "all"}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding and output": ("gpt_neox", {"target_modules": ["embed_in", "lm_head"]}),
    "saved output of GPT-NeoX": ("gpt_neox", {"target_modules": ["dense"], "modules_to_save": ["lm_head", "embed_in"]}),
    "scaled embedding": (
        "gemma with legacy activation, untied",
        {"target_modules": ["embed_tokens", "lm_head", "up_proj"]},
    ),
    "tied: embedding": (TIED, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied: embedding and output": (TIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied: both tied": (TIED, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "tied: scaled embedding": ("gemma3_text", {"target_modules": ["embed_tokens", "down_proj"]}),
    "saved output": ("qwen3", {"target_modules": QKVO, "modules_to_save": ["lm_head"]}),
    "saved embedding": (TIED, {"target_modules": QKVO, "modules_to_save": ["embed_tokens"]}),
    "saved, tied": (TIED, {"target_modules": QKVO, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "saved norms": (
        "qwen3 with biases, windows by layer, yarn",
        {"target_modules": ["up_proj"], "modules_to_save": ["norm", "q_norm", "input_layernorm"]},
    ),
    "saved unit-offset norms": ("gemma3_text", {"target_modules": ["q_proj"], "modules_to_save": ["layernorm"]}),
    "saved layer norms": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["ln_1", "ln_f"]}),
    "saved feed-forward": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}),
    "saved fused matrix": ("gpt_neox", {"target_modules": ["dense"], "modules_to_save": ["query_key_value"]}),
    "experts": ("mixtral", {"target_modules": ["w1", "w2", "w3", "gate", "q_proj"]}),
    "some projections of the experts": ("qwen3_moe", {"target_modules": ["down_proj"]}),
    "stacked parameters": (
        "mixtral",
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj"],
            "alpha_pattern": {".*experts.gate_up_proj": 9},
        },
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves a model once and returns its folder."""
    folders: dict[str, Path] = {}

    def save(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("base")
            save_peer(case, folders[case])
        return folders[case]

    return save


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_gives_the_logits_of_peft(switch: str, saved: Any, tmp_path: Path) -> None:
    case, fields = SWITCHES[switch]
    expected = make_adapter(make_peer(case), tmp_path / "adapter", **fields)
    base, model = load(saved(case)), load(saved(case), adapters=[tmp_path / "adapter"])
    torch.testing.assert_close(model.logits(TOKENS), expected, atol=1e-4, rtol=1e-4)
    assert (base.logits(TOKENS) - expected).abs().max() > 0.01


# Use of an adapter.


LLAMA = {"target_modules": QKVO}


def test_the_base_must_be_named_is_not_opened_by_the_recorded_path_and_is_not_verified(
    saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = saved("llama")
    make_adapter(make_peer("llama"), tmp_path / "adapter", **LLAMA)
    edit_json(tmp_path / "adapter/adapter_config.json", base_model_name_or_path=str(base))
    with pytest.raises(UsageError, match=r"is a PEFT adapter and was trained on .*; name the base model with `model`"):
        tinylm.load(adapters=[tmp_path / "adapter"])
    with pytest.raises(UsageError, match="is an adapter, not a model"):
        tinylm.load(tmp_path / "adapter")
    with caplog.at_level("INFO", "tinylm"):
        tinylm.load(base, adapters=[tmp_path / "adapter"])
    assert f"records no digest of its base model ({base}): only names and shapes" in caplog.text


def test_adapters_of_both_kinds_add_up_at_their_scales(saved: Any, tmp_path: Path) -> None:
    """The updates of the matrices are summed, and the norms are those of the second adapter."""
    base = saved("llama")
    fields = {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}
    make_adapter(make_peer("llama"), tmp_path / "one", **LLAMA)
    make_adapter(make_peer("llama"), tmp_path / "two", **fields)
    (tmp_path / "text").write_text("once upon a time " * 300)
    own = tinylm.finetune_lora(tmp_path / "text", model=base, out=tmp_path / "own", steps=3, eval_every=3, lr=0.01)
    model = load(base, adapters=[f"{tmp_path / 'one'}=0.5", f"{tmp_path / 'two'}=1", f"{own.run}=2"])
    network = tinylm.load(base).network
    with torch.no_grad():
        for name, scale in (("one", 0.5), ("two", 1.0), ("own", 2.0)):
            adapter = tinylm.load(base, adapters=[f"{tmp_path / name}={scale}"])
            for module, layer in adapter.adapters[0].layers.items():
                if isinstance(layer, Replacement):
                    norm = network.get_submodule(module.removesuffix(" (replaced)"))
                    norm.weight.copy_(layer.replacement.weight)
                else:
                    network.get_submodule(module).weight += layer.delta_weight()
    expected = network.logits(network(TOKENS).hidden)
    torch.testing.assert_close(model.logits(TOKENS), expected, atol=1e-4, rtol=1e-4)
    model.select_adapter(None)
    torch.testing.assert_close(model.logits(TOKENS), load(base).logits(TOKENS), atol=0, rtol=0)


@pytest.mark.parametrize("switch", ["tied: embedding", "all biases of a Llama", "experts"])
def test_generation_takes_the_adapter(switch: str, saved: Any, tmp_path: Path) -> None:
    case, fields = SWITCHES[switch]
    make_adapter(make_peer(case), tmp_path / "adapter", **fields)
    model = load(saved(case), adapters=[tmp_path / "adapter"])
    ids = [0, *model.encode("Once upon")]
    for _ in range(8):
        logits = model.logits([ids])[0, -1, : model.tokenizer.vocab_size]
        ids.append(int(logits.argmax()))
    expected = model.decode(i for i in ids[len(model.encode("Once upon")) + 1 :])
    found = model.generate("Once upon", max_tokens=8, temperature=0, stop=())
    assert expected.startswith(str(found)) or found == expected


@pytest.mark.parametrize(
    "switch", ["fan_in_fan_out", "experts", "tied: embedding", "saved, tied", "saved output", "saved norms"]
)
def test_merging_writes_a_run_with_the_logits_of_the_adapted_model(switch: str, saved: Any, tmp_path: Path) -> None:
    case, fields = SWITCHES[switch]
    expected = make_adapter(make_peer(case), tmp_path / "adapter", **fields)
    merged = merge_adapter(tmp_path / "adapter", tmp_path / "run", saved(case), LogReporter())
    model = load(merged.run)
    torch.testing.assert_close(model.logits(TOKENS), expected, atol=2e-4, rtol=1e-4)
    assert model.config.family is not None
    base = load(saved(case)).logits(TOKENS)
    assert (model.logits(TOKENS) - base).abs().max() > 0.01


def in_16_bits(llama: Path, folder: Path) -> Path:
    make_peer("llama").bfloat16().save_pretrained(folder)
    shutil.copy(llama / "tokenizer.json", folder)
    return folder


def test_a_merge_reports_the_logits_of_the_file_and_what_rounding_takes_of_the_effect(
    saved: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = in_16_bits(saved("llama"), tmp_path / "base")
    ids = torch.randint(300, (4, 64), generator=torch.Generator().manual_seed(0))  # as `probe_logits` draws them

    def merge(alpha: float, dtype: str) -> tuple[float, float]:
        """The shares of the adapter's effect that differ in the written file: reported, and measured."""
        adapter, out = tmp_path / f"adapter {alpha}", tmp_path / f"merged {alpha} {dtype}"
        if not adapter.exists():
            make_adapter(make_peer("llama"), adapter, **LLAMA, lora_alpha=alpha)
        caplog.clear()
        found = merge_adapter(adapter, out, base, LogReporter(), dtype=dtype)
        plain, adapted, merged = (
            tinylm.load(path, adapters=adapters, dtype="fp32").logits(ids)
            for path, adapters in ((base, []), (base, [adapter]), (out, []))
        )
        measured = (merged - adapted).abs().max() / (adapted - plain).abs().max()
        return found.difference / found.change, measured.item()

    for alpha, dtype, low, high in ((5, "auto", 1e-4, 0.1), (0.02, "auto", 0.1, 1), (0.02, "fp32", 0, 1e-3)):
        reported, measured = merge(alpha, dtype)
        assert low < reported < high and reported == pytest.approx(measured, rel=0.02, abs=1e-3)
        assert ("Rounding the weights to bf16 loses a part of the adapter's effect" in caplog.text) == (reported > 0.1)
    with pytest.raises(
        TinyLMError, match=r"Rounding the weights to bf16 loses nearly all of the adapter's effect: .* Nothing was wri"
    ):
        merge(1e-5, "auto")
    assert not (tmp_path / "merged 1e-05 auto").exists()


def test_a_merge_is_undone_in_the_dtype_of_the_base_unless_parameters_were_replaced(saved: Any, tmp_path: Path) -> None:
    reporter, adapter, other = LogReporter(), tmp_path / "adapter", tmp_path / "other"
    in_16 = in_16_bits(saved("llama"), tmp_path / "base")
    stored = {**LLAMA, "target_modules": ["q_proj", "embed_tokens"]}  # with the embedding of the base
    for fields, base, tolerance in (
        (LLAMA, saved("llama"), 1e-5),
        (LLAMA, in_16, 0.02),
        (stored, saved("llama"), 1e-5),
    ):
        make_adapter(make_peer("llama"), adapter, **fields)
        merge_adapter(adapter, tmp_path / "merged", base, reporter, force=True)
        merge_adapter(adapter, tmp_path / "undone", tmp_path / "merged", reporter, undo=True, force=True)
        expected, undone = (open_model(path).weights.tensors for path in (base, tmp_path / "undone"))
        for name, tensor in undone.items():
            assert tensor.dtype == expected[name].dtype
            torch.testing.assert_close(tensor, expected[name], atol=tolerance, rtol=0.01)
    make_adapter(make_peer("llama"), other, **LLAMA, modules_to_save=["norm"])
    merge_adapter(other, tmp_path / "merged2", saved("llama"), reporter)
    with pytest.raises(UsageError, match="was not made by merging"):
        merge_adapter(other, tmp_path / "no", tmp_path / "merged2", reporter, undo=True)
    with pytest.raises(UsageError, match="name the base model with `model`"):
        merge_adapter(adapter, tmp_path / "no", None, reporter)


def test_adapters_that_cannot_be_combined_with_a_tied_embedding_are_refused(saved: Any, tmp_path: Path) -> None:
    """One changes the embedding alone, and the other the embedding with the output layer."""
    base = saved(TIED)
    make_adapter(make_peer(TIED), tmp_path / "peft", target_modules=["embed_tokens"])
    (tmp_path / "text").write_text("once upon a time " * 300)
    own = tinylm.finetune_lora(
        tmp_path / "text", model=base, out=tmp_path / "own", steps=1, eval_every=1, target=["embedding"]
    )
    for order in ([tmp_path / "peft", own.run], [own.run, tmp_path / "peft"]):
        with pytest.raises(UsageError, match="which this model ties, and so does another `adapter`"):
            tinylm.load(base, adapters=order)


def test_a_base_with_other_saved_embeddings_is_refused(saved: Any, tmp_path: Path) -> None:
    make_adapter(make_peer("llama"), tmp_path / "adapter", target_modules=["embed_tokens"])
    other = make_peer("llama")
    with torch.no_grad():
        other.model.embed_tokens.weight[5, 5] += 1
    other.save_pretrained(tmp_path / "other")
    shutil.copy(saved("llama") / "tokenizer.json", tmp_path / "other")
    with pytest.raises(TinyLMError, match="was trained on another base model"):
        tinylm.load(tmp_path / "other", adapters=[tmp_path / "adapter"])
