"""Adapters trained here, exported and loaded by PEFT on the model that transformers loads: equal logits."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tinylm
from tests.formats.peers import make_peer, save_peer
from tests.formats.peft_adapters import TOKENS, in_peft, make_adapter, peer_logits
from tests.shell import snapshot
from tinylm.errors import TinyLMError, UsageError
from tinylm.models.exporting import Exported, export_adapter
from tinylm.models.logits import TOLERANCE
from tinylm.reporter import LogReporter
from tinylm.run_directory.layout import weights_file
from tinylm.run_directory.loading import read_config, read_weights
from tinylm.run_directory.weights import write_weights

TEXT = "once upon a time there was a model, and it was small; " * 60
TIED = "llama tied, theta, epsilon"
# By name: the model, and the settings of its LoRA.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2, everything": ("gpt2 untied, exact GELU, narrow", {"target": ["all"]}),
    "gpt2, tied, everything": ("gpt2", {"target": ["all"]}),
    "gpt2, query and value": ("gpt2", {"target": ["query", "value"], "rank_stabilised": True}),
    "gpt2, output only": ("gpt2", {"target": ["output"]}),
    "gpt2, key only": ("gpt2", {"target": ["key"], "alpha": 3.5}),
    "llama, everything": ("llama with biases, head_dim, GELU", {"target": ["all"]}),
    "llama, tied embedding": (TIED, {"target": ["embedding", "mlp"], "rank_stabilised": True}),
    "llama, shared B": ("llama", {"target": ["attention"], "share_b": True, "dropout": 0.1}),
    "mistral": ("mistral", {}),
    "qwen3": ("qwen3", {"target": ["all"]}),
    "mixtral, everything": ("mixtral", {"target": ["all"], "rank": 2, "dropout": 0.1}),
    "mixtral, experts": ("mixtral", {"target": ["experts"], "rank_stabilised": True}),
    "gpt_neox, everything": ("gpt_neox", {"target": ["all"]}),
    "gpt_neox, key and value": (
        "gpt_neox sequential, full RoPE",
        {"target": ["key", "value"], "rank_stabilised": True},
    ),
    "gemma, everything": ("gemma", {"target": ["all"]}),
    "gemma3_text": ("gemma3_text", {"target": ["all"]}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains an adapter of `ADAPTERS` for some steps, once; returns the folder of its base and its run."""
    runs: dict[str, tuple[Path, Path]] = {}
    home = tmp_path_factory.mktemp("trained")
    (home / "text").write_text(TEXT)

    def train(name: str) -> tuple[Path, Path]:
        if name not in runs:
            case, settings = ADAPTERS[name]
            folder = tmp_path_factory.mktemp("base")
            save_peer(case, folder)
            options = {"rank": 3, "steps": 4, "eval_every": 4, "lr": 0.05, "seed": 1, "batch_size": 2, **settings}
            run = tinylm.finetune_lora(home / "text", model=folder, out=home / str(len(runs)), **options).run
            runs[name] = folder, run
        return runs[name]

    return train


def exported(trained: tuple[Path, Path], out: Path, **options: Any) -> Exported:
    base, run = trained
    return export_adapter(run, out, base, LogReporter(), **options)


# One of each way of writing matrices; the others are slow.
OFTEN = (
    *("gpt2, everything", "gpt2, query and value", "llama, everything", "llama, shared B", "qwen3"),
    *("mixtral, everything", "gpt_neox, everything", "gemma, everything", "gemma3_text"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in ADAPTERS]
)
def test_peft_loads_the_run_and_its_export_with_equal_logits(name: str, trained: Any, tmp_path: Path) -> None:
    base, run = trained(name)
    result = exported((base, run), tmp_path / "adapter")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter"}
    assert {path.name for path in result.path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    ours = tinylm.load(base, adapters=[run], dtype="fp32").logits(TOKENS)
    without = peer_logits(make_peer(ADAPTERS[name][0]))
    for folder in (result.path, run):  # the run itself has the adapter in PEFT's format, too
        theirs = peer_logits(in_peft(make_peer(ADAPTERS[name][0]), folder))
        torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    assert (ours - without).abs().max() > 1e-3
    assert result.difference <= TOLERANCE * ours.abs().max()
    again = tinylm.load(base, adapters=[result.path], dtype="fp32")
    torch.testing.assert_close(again.logits(TOKENS), ours, atol=1e-4, rtol=1e-4)


def test_fused_matrices_have_one_adapter_of_a_larger_rank(trained: Any, tmp_path: Path) -> None:
    configs = {
        name: json.loads((exported(trained(f"gpt2, {name}"), tmp_path / name).path / "adapter_config.json").read_text())
        for name in ("query and value", "output only", "key only")
    }
    both, output, key = configs.values()
    assert both["target_modules"] == key["target_modules"] == ["c_attn"] and both["fan_in_fan_out"] is True
    assert (both["r"], both["lora_alpha"], both["use_rslora"]) == (3, 6, True)
    assert both["rank_pattern"] == {r"attn\.c_attn": 6}
    assert both["alpha_pattern"] == {r"attn\.c_attn": pytest.approx(6 * 2**0.5)}
    assert output["target_modules"] == ["attn.c_proj"] and output["rank_pattern"] == {}
    assert key["lora_alpha"] == 3.5 and key["rank_pattern"] == {}


def test_the_base_is_recorded_by_path_or_by_its_name_in_the_hub(trained: Any, tmp_path: Path) -> None:
    base, run = trained("mistral")
    cached = tmp_path / "hub/models--someone--small-model/snapshots/0123abc"
    shutil.copytree(base, cached)
    (tmp_path / "text").write_text(TEXT)
    other = tinylm.finetune_lora(tmp_path / "text", model=cached, out=tmp_path / "b", steps=1, eval_every=1, lr=0.05)
    for pair, expected in (((base, run), str(base.resolve())), ((cached, other.run), "someone/small-model")):
        path = exported(pair, tmp_path / "adapter", force=True).path
        assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == expected


def test_an_adapter_on_a_base_of_tinylm_has_the_module_names_of_the_exported_base(tmp_path: Path) -> None:
    """The default decoder is exported as a Qwen3."""
    (tmp_path / "text").write_text(TEXT)
    base = tinylm.train(
        tmp_path / "text", out=tmp_path / "base", steps=2, width=16, heads=2, layers=1, eval_every=2
    ).run
    run = tinylm.finetune_lora(tmp_path / "text", model=base, out=tmp_path / "lora", steps=2, eval_every=2).run
    result = export_adapter(run, tmp_path / "adapter", None, LogReporter())
    assert result.family == "qwen3"
    config = json.loads((result.path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_a_bottleneck_an_adapter_of_peft_and_a_model_are_refused(trained: Any, tmp_path: Path) -> None:
    base, _ = trained("mistral")
    (tmp_path / "text").write_text(TEXT)
    bottleneck = tinylm.finetune_adapter(tmp_path / "text", model=base, out=tmp_path / "b", steps=1, eval_every=1).run
    with pytest.raises(UsageError, match="is a bottleneck adapter; PEFT has LoRA, but not this kind"):
        export_adapter(bottleneck, tmp_path / "out", base, LogReporter())
    make_adapter(make_peer("mistral"), tmp_path / "peft", target_modules=["q_proj"])
    with pytest.raises(UsageError, match="in PEFT's format already"):
        export_adapter(tmp_path / "peft", tmp_path / "out", base, LogReporter())
    own = tinylm.train(tmp_path / "text", out=tmp_path / "own", steps=1, width=16, heads=2, layers=1, eval_every=1).run
    with pytest.raises(UsageError, match="own is a model, and PEFT's format is for LoRA adapters; choose another `to`"):
        export_adapter(own, tmp_path / "out", None, LogReporter())
    assert not (tmp_path / "out").exists()


def test_an_adapter_with_other_tensors_than_its_config_is_refused(trained: Any, tmp_path: Path) -> None:
    base, run = trained("mistral")
    forged = shutil.copytree(run, tmp_path / "forged")
    config = read_config(forged)
    saved = read_weights(forged, config)
    first = min(saved.tensors)
    for tensors, message in (
        ({**saved.tensors, "other": torch.zeros(1)}, "has the unknown tensor other"),
        ({name: tensor for name, tensor in saved.tensors.items() if name != first}, f"lacks tensor {first}"),
        ({**saved.tensors, first: torch.tensor(1.0)}, f"{first} is torch.float32"),
    ):
        write_weights(forged / weights_file(config), tensors, config, saved.step, saved.val_loss)
        with pytest.raises(TinyLMError, match=re.escape(message)):
            export_adapter(forged, tmp_path / "out", base, LogReporter())
    assert not (tmp_path / "out").exists()


def test_only_an_exported_adapter_is_replaced_and_only_with_force(trained: Any, tmp_path: Path) -> None:
    pair = trained("mistral")
    out = exported(pair, tmp_path / "adapter").path
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=r"contains an earlier export; .* replace it with `force`"):
        exported(pair, out)
    assert snapshot(tmp_path) == before
    exported(pair, out, force=True)
    for other in pair:
        before = snapshot(other)
        with pytest.raises(UsageError, match="contains files that do not belong to an export"):
            exported(pair, other, force=True)
        assert snapshot(other) == before


def test_an_export_whose_logits_differ_does_not_appear(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tinylm.models.exporting as export

    write = export.write_adapter

    def damaged(folder: Path, tensors: Any, fields: Any) -> None:
        first = next(iter(tensors))
        write(folder, {**tensors, first: tensors[first] * 1.5}, fields)

    monkeypatch.setattr(export, "write_adapter", damaged)
    with pytest.raises(TinyLMError, match="The logits of the exported adapter differ"):
        exported(trained("mistral"), tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []
