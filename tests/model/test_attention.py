import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import reference
from tests.variants import randomised
from tinylm.model.attention import DotProduct, Heads, SelfAttention
from tinylm.model.norm import LayerNorm, RMSNorm
from tinylm.model.position import RotaryPosition, Rotation
from tinylm.model.rope_frequencies import rope_frequencies

WIDTH = 16
HEADS = 4
HEAD_DIM = WIDTH // HEADS


def make(kv_heads: int = HEADS, heads: int = HEADS, dropout: float = 0.0, norm: type | None = None) -> SelfAttention:
    """Random weights in float64. The norms of queries and keys have an eps of 0, so that they remove any scale."""
    norms = [norm(WIDTH // heads, eps=0.0) if norm else nn.Identity() for _ in range(2)]
    return randomised(
        SelfAttention(WIDTH, Heads(heads, kv_heads, WIDTH // heads), DotProduct(dropout), *norms, True, True)
    ).double()


def tokens(batch: int = 2, steps: int = 7, seed: int = 1) -> Tensor:
    return torch.randn(batch, steps, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rope(steps: int = 7) -> Rotation:
    return RotaryPosition(steps, rope_frequencies(HEAD_DIM, 100.0)).rotation(torch.arange(steps))


def test_one_head_equals_the_formula() -> None:
    """W^O is the identity and all biases are zero, so that the output is that of the head."""
    attention = make(heads=1, kv_heads=1)
    with torch.no_grad():
        attention.o_proj.weight.copy_(torch.eye(WIDTH))
        for name, parameter in attention.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    wq, wk, wv = (getattr(attention, f"{n}_proj").weight.detach().numpy().T for n in "qkv")
    x = tokens(batch=1)
    expected = reference.attention_one_head(x[0].numpy(), wq, wk, wv)
    np.testing.assert_allclose(attention(x)[0].detach().numpy(), expected, atol=1e-12)


def test_each_head_has_its_slice_of_the_projections_and_heads_are_concatenated_in_order() -> None:
    """concat(head_1, ..., head_H) W^O + b."""
    attention = make()
    w = {name: value.detach().numpy() for name, value in attention.named_parameters()}
    x = tokens(batch=1)
    q, k, v = (x[0].numpy() @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"] for n in "qkv")
    slices = [slice(h * HEAD_DIM, (h + 1) * HEAD_DIM) for h in range(HEADS)]
    heads = np.concatenate([reference.attend(q[:, s], k[:, s], v[:, s]) for s in slices], axis=1)
    expected = heads @ w["o_proj.weight"].T + w["o_proj.bias"]
    np.testing.assert_allclose(attention(x)[0].detach().numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["multi-query", "grouped-query"])
@pytest.mark.parametrize("norm", [None, RMSNorm], ids=["no-qk-norm", "qk-norm"])
def test_shared_keys_and_values_equal_repeated_ones(kv_heads: int, norm: type | None) -> None:
    few, many = make(kv_heads, norm=norm), make(norm=norm)
    group = HEADS // kv_heads
    state = few.state_dict()
    for name in ("k_proj", "v_proj"):
        for kind in ("weight", "bias"):
            per_head = state[f"{name}.{kind}"].unflatten(0, (kv_heads, HEAD_DIM))
            repeated = [per_head[h // group] for h in range(HEADS)]  # query head h reads key/value head h // group
            state[f"{name}.{kind}"] = torch.cat(repeated)
    many.load_state_dict(state)
    torch.testing.assert_close(few(tokens(), rope()), many(tokens(), rope()), rtol=0, atol=1e-12)


def output_for_fixed_values(attention: SelfAttention, x: Tensor) -> Tensor:
    """The output with values that do not depend on x, so that scaling x changes the scores only."""
    zeros = [nn.Parameter(torch.zeros_like(attention.get_parameter(f"{n}_proj.bias"))) for n in "qk"]
    attention.q_proj.bias, attention.k_proj.bias = zeros
    values = torch.randn(x.shape[1], attention.v_proj.out_features, generator=torch.Generator().manual_seed(2))
    attention.v_proj.register_forward_hook(lambda module, inputs, output: values.to(output).expand_as(output))
    return attention(x, rope(x.shape[1]))


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_qk_norm_makes_scores_independent_of_the_scale_of_x(norm: type, scale: float, seed: int) -> None:
    x = tokens(seed=seed)
    expected = output_for_fixed_values(make(norm=norm), x)
    torch.testing.assert_close(output_for_fixed_values(make(norm=norm), scale * x), expected, rtol=0, atol=1e-9)


def test_without_qk_norm_scores_depend_on_the_scale_of_x() -> None:
    x = tokens()
    assert (output_for_fixed_values(make(), 2 * x) - output_for_fixed_values(make(), x)).abs().max() > 0.01


def test_qk_norm_comes_before_the_rotation() -> None:
    """A gain per feature does not commute with a rotation, so the order matters."""
    attention = make(heads=1, kv_heads=1, norm=RMSNorm)
    w = {name: value.detach().numpy() for name, value in attention.named_parameters()}
    x = tokens(batch=1)
    q, k, v = (x[0].numpy() @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"] for n in "qkv")

    def normalised_and_rotated(rows: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return np.array([reference.rotary(reference.rms_norm(r, gain, eps=0.0), p, 100.0) for p, r in enumerate(rows)])

    heads = reference.attend(
        normalised_and_rotated(q, w["q_norm.weight"]), normalised_and_rotated(k, w["k_norm.weight"]), v
    )
    expected = heads @ w["o_proj.weight"].T + w["o_proj.bias"]
    rotation = RotaryPosition(7, rope_frequencies(WIDTH, 100.0)).rotation(torch.arange(7))
    np.testing.assert_allclose(attention(x, rotation)[0].detach().numpy(), expected, atol=1e-6)  # float32 tables


def test_attention_dropout_is_unbiased_and_off_in_evaluation() -> None:
    torch.manual_seed(0)
    attention = make(dropout=0.5)
    x = tokens(batch=1)
    exact = attention(x)
    assert torch.equal(attention(x), exact)
    attention.train()
    many = attention(x.expand(4000, -1, -1))
    spread = many.std(dim=0)
    assert (spread > 0.01).any(dim=-1).all()  # the weights of every token vary, even the single weight of the first
    error = (many.mean(dim=0) - exact[0]).abs() / (spread / 4000**0.5 + 1e-12)
    assert error.max() < 5  # standard errors, over 112 numbers
