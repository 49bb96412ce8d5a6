import dataclasses
import math

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.variants import VARIANTS, every_variant, randomised, small
from tinylm import model_config
from tinylm.model.build import BLOCKS, build_model, count_parameters
from tinylm.model.decoder import Decoder
from tinylm.model_config import ModelConfig

IDS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 12, 0]]

# Large enough to estimate a standard deviation within 1 %.
LARGE = {"vocab_size": 400, "context": 100, "layers": 3, "heads": 4, "kv_heads": 4, "width": 96, "ffn_width": 320}


def large(preset: str, **choices: object) -> ModelConfig:
    return small(preset, **{**LARGE, **choices})


def matrices(model: Decoder) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.dim() == 2 and "norm" not in n}


def writes_to_residual(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def assert_normal(weight: Tensor, std: float) -> None:
    """Mean, deviation and share beyond two deviations, each within five standard errors of N(0, std)."""
    n = weight.numel()
    assert abs(float(weight.mean())) < 5 * std / math.sqrt(n)
    assert float(weight.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    share = float((weight.abs() > 2 * std).float().mean())
    assert share == pytest.approx(0.0455, abs=5 * math.sqrt(0.0455 / n))


def assert_uniform(weight: Tensor, bound: float) -> None:
    """All values within the bound, the largest close to it, and half of them within half the bound."""
    n = weight.numel()
    assert 0.99 * bound < float(weight.abs().max()) <= bound
    assert abs(float(weight.mean())) < 5 * bound / math.sqrt(3 * n)
    assert float((weight.abs() < bound / 2).float().mean()) == pytest.approx(0.5, abs=2.5 / math.sqrt(n))


def test_the_variants_have_every_value_of_every_choice() -> None:
    """Of numbers without bounds, two values. Dropout, and encoders, are tested apart from the variants."""
    configs = [config for _, config in VARIANTS]
    names = {"position": "POSITIONS", "norm": "NORMS", "norm_placement": "NORM_PLACEMENTS"}
    names |= {"activation": "ACTIVATIONS", "expert_mode": "EXPERT_MODES", "initialisation": "INITIALISATIONS"}
    wanted: dict[str, set[object]] = {name: set(getattr(model_config, values)) for name, values in names.items()}
    same = {"vocab_size", "context", "layers", "width", "ffn_width"}
    same |= {"architecture", "encoder_layers", "dropout", "attention_dropout", "expert_balance"}
    missing = []
    for field in dataclasses.fields(ModelConfig):
        found = {getattr(config, field.name) for config in configs}
        if field.name not in same and (wanted.get(field.name, set()) - found or len(found) < 2):
            missing.append(f"{field.name} has only the values {found}")
    scalings = {config.rope_scaling.kind for config in configs if config.rope_scaling}
    assert scalings == set(model_config.ROPE_SCALINGS)
    blocks = {(config.norm_placement, config.residual, config.parallel_residual) for config in configs}
    assert blocks == set(BLOCKS)
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("choices", [{}, {"tie": False}, {"position": "learned"}], ids=["default", "untied", "learned"])
def test_modern_weights_are_normal_and_zero_for_projections_into_the_residual_stream(
    choices: dict[str, object],
) -> None:
    for name, weight in matrices(build_model(large("modern", **choices))).items():
        if writes_to_residual(name):
            assert not weight.any()
        else:
            assert_normal(weight, 0.02)


def test_a_modern_layer_starts_as_the_identity() -> None:
    model = build_model(small())
    ids = torch.tensor(IDS)
    torch.testing.assert_close(model(ids).hidden, model.norm(model.embedding(ids)))


@pytest.mark.parametrize("layers", [1, 3])
def test_gpt2_weights_are_normal_and_scaled_down_for_projections_into_the_residual_stream(layers: int) -> None:
    """0.02; 0.01 for positions, as in the published code; 0.02 / sqrt(N) for the N = 2 layers residual sublayers."""
    for name, weight in matrices(build_model(large("gpt2", layers=layers, tie=False))).items():
        if writes_to_residual(name):
            assert_normal(weight, 0.02 / math.sqrt(2 * layers))
        else:
            assert_normal(weight, 0.01 if name == "position.weight" else 0.02)


def test_original_weights_are_glorot_uniform_and_the_scaled_embedding_has_deviation_one() -> None:
    config = large("original", tie=False)
    for name, weight in matrices(build_model(config)).items():
        if name == "embedding.weight":
            assert_normal(weight * math.sqrt(config.width), 1.0)
        else:
            assert_uniform(weight, math.sqrt(6 / sum(weight.shape)))


@every_variant
def test_biases_start_at_zero_and_gains_at_one(config: ModelConfig) -> None:
    for name, parameter in build_model(config).named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif name.endswith("norm.weight"):
            assert (parameter == (0 if config.norm_unit_offset else 1)).all(), name


@every_variant
def test_a_seed_gives_the_same_weights_whatever_the_state_of_the_global_generator(config: ModelConfig) -> None:
    torch.manual_seed(1)
    first = build_model(config, seed=7).state_dict()
    torch.manual_seed(2)
    second = build_model(config, seed=7).state_dict()
    other = build_model(config, seed=8).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_building_a_model_does_not_change_the_global_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model(small(), seed=7)
    assert torch.equal(torch.rand(3), expected)


def test_building_a_model_does_not_change_the_generators_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr("torch.cuda.manual_seed_all", seeded.append)
    build_model(small(), seed=7)
    assert seeded == []


def test_layers_have_different_initial_weights() -> None:
    first, second = build_model(small()).layers
    assert not torch.equal(first.attention.q_proj.weight, second.attention.q_proj.weight)


def test_dropout_is_set_for_embeddings_residuals_and_attention() -> None:
    model = build_model(small(dropout=0.3, attention_dropout=0.2, layers=2))
    dropped = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    attention = {f"layers.{i}.attention.core.dropout": 0.2 for i in range(2)}
    assert dropped == {"dropout": 0.3, "layers.0.dropout": 0.3, "layers.1.dropout": 0.3, **attention}


@every_variant
def test_a_model_on_the_meta_device_equals_the_original_after_loading_its_weights(config: ModelConfig) -> None:
    """Position tables are computed, not loaded, so they exist before the weights are loaded."""
    model = randomised(build_model(config))
    with torch.device("meta"):
        empty = build_model(config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    ids = torch.tensor(IDS)
    assert torch.equal(empty.eval()(ids).hidden, model(ids).hidden)


def test_tied_logits_use_the_embedding_weight() -> None:
    model = build_model(small())
    hidden = torch.ones(1, 1, 16)
    with torch.no_grad():
        model.embedding.weight[5] = 2.0
    assert model.logits(hidden)[0, 0, 5].item() == 32.0
    assert not any("output" in name for name, _ in model.named_parameters())


def test_a_tied_embedding_receives_the_gradients_of_both_uses() -> None:
    tied = randomised(build_model(small())).double()
    untied = build_model(small(tie=False)).double().eval()
    untied.load_state_dict({**tied.state_dict(), "output.weight": tied.embedding.weight})
    for model in (tied, untied):
        model.logits(model(torch.tensor(IDS)).hidden).pow(2).sum().backward()
    assert isinstance(untied.output, nn.Linear)
    as_input, as_output = untied.embedding.weight.grad, untied.output.weight.grad
    assert as_input is not None and as_output is not None
    assert as_input.any() and as_output.any()
    torch.testing.assert_close(tied.embedding.weight.grad, as_input + as_output)


def test_parameters_are_counted_by_part() -> None:
    """Width 16, 4 heads of 4, 2 for keys and values, feed-forward 24, vocabulary 13, context 24, 2 layers.

    QK-norms count as attention.
    """
    assert count_parameters(build_model(small())) == {
        "embedding": 13 * 16,
        "norms": 2 * (16 + 16) + 16,
        "attention": 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 4 + 4),
        "feedforward": 2 * (3 * 16 * 24),
        "total": 208 + 80 + 1552 + 2304,
    }
    assert count_parameters(build_model(small("gpt2", kv_heads=4, tie=False))) == {
        "embedding": 13 * 16,
        "position": 24 * 16,
        "norms": (2 * 2 + 1) * (16 + 16),
        "attention": 2 * 4 * (16 * 16 + 16),
        "feedforward": 2 * (16 * 24 + 24 + 24 * 16 + 16),
        "output": 16 * 13,
        "total": 208 + 384 + 160 + 2176 + 1616 + 208,
    }


@pytest.mark.filterwarnings("ignore")
def test_the_gpt2_preset_has_the_logits_of_gpt2_in_transformers() -> None:
    config = small("gpt2", kv_heads=4)
    ours = randomised(build_model(config)).double()
    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.heads,
            n_inner=config.ffn_width,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    state = {
        "transformer.wte.weight": ours.embedding.weight,
        "transformer.wpe.weight": ours.get_parameter("position.weight"),
    }
    names = {"ln_1": "attention_norm", "ln_2": "feedforward_norm"}
    projections = {
        "attn.c_proj": "attention.o_proj",
        "mlp.c_fc": "feedforward.up_proj",
        "mlp.c_proj": "feedforward.down_proj",
    }
    for n in range(config.layers):
        for kind in ("weight", "bias"):
            for theirs, name in names.items():
                state[f"transformer.h.{n}.{theirs}.{kind}"] = ours.get_parameter(f"layers.{n}.{name}.{kind}")
            for theirs, name in projections.items():
                state[f"transformer.h.{n}.{theirs}.{kind}"] = ours.get_parameter(f"layers.{n}.{name}.{kind}").t()
            qkv = [ours.get_parameter(f"layers.{n}.attention.{x}_proj.{kind}") for x in "qkv"]
            state[f"transformer.h.{n}.attn.c_attn.{kind}"] = torch.cat(qkv).t()
    state["transformer.ln_f.weight"], state["transformer.ln_f.bias"] = ours.norm.weight, ours.norm.bias
    assert_same_logits(ours, peer, state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("theta", [10_000.0, 100.0])
def test_the_modern_preset_has_the_logits_of_qwen3_in_transformers(tie: bool, theta: float) -> None:
    config = small(tie=tie, rope_theta=theta)
    ours = randomised(build_model(config)).double()
    peer = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.context,
            hidden_size=config.width,
            intermediate_size=config.ffn_width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            rms_norm_eps=1e-6,
            tie_word_embeddings=tie,
        )
    )
    renamed = {
        "embedding.": "model.embed_tokens.",
        "output.": "lm_head.",
        "norm.": "model.norm.",
    }
    state = {}
    for name, weight in ours.state_dict().items():
        for mine, theirs in renamed.items():
            if name.startswith(mine):
                state[name.replace(mine, theirs, 1)] = weight
        if name.startswith("layers."):
            theirs = name.replace("attention_norm", "input_layernorm")
            theirs = theirs.replace("feedforward_norm", "post_attention_layernorm")
            theirs = theirs.replace(".attention.", ".self_attn.").replace(".feedforward.", ".mlp.")
            state[f"model.{theirs}"] = weight
    assert_same_logits(ours, peer, state, atol=1e-5)  # transformers computes the angles in float32


def assert_same_logits(ours: Decoder, peer: nn.Module, state: dict[str, Tensor], atol: float = 1e-10) -> None:
    missing, unexpected = peer.load_state_dict({name: weight.detach() for name, weight in state.items()}, strict=False)
    assert unexpected == []
    assert missing in ([], ["lm_head.weight"])  # which is tied
    peer.double().eval()
    ids = torch.tensor(IDS)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(ids).hidden), peer(ids).logits, rtol=0, atol=atol)
