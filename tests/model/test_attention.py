import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import reference
from tests.variants import randomised
from tinylm.model.attention import FEW_KEYS, Attention, DotProduct
from tinylm.model.norm import LayerNorm, RMSNorm
from tinylm.model.position import RotaryPosition, Rotation

WIDTH = 16
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS


def make(kv_heads: int = HEADS, heads: int = HEADS, dropout: float = 0.0, norm: type | None = None) -> Attention:
    """Random weights in float64; the norms of queries and keys without an eps, so that they forget a scale entirely."""
    norms = [norm(WIDTH // heads, eps=0.0) if norm else nn.Identity() for _ in range(2)]
    return randomised(Attention(WIDTH, heads, kv_heads, True, DotProduct(dropout), *norms)).double()


def tokens(batch: int = 2, steps: int = 7, seed: int = 1) -> Tensor:
    return torch.randn(batch, steps, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rope(steps: int = 7) -> Rotation:
    return RotaryPosition(steps, HEAD_WIDTH, 100.0).rotation(torch.arange(steps))


def test_one_head_is_the_formula_of_the_notes() -> None:
    """a_i = head_i W^O, with W^O left as the identity."""
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


def test_heads_read_their_own_slice_and_are_concatenated_in_order() -> None:
    """(head_1 + ... + head_A) W^O with + for concatenation."""
    attention = make()
    w = {name: value.detach().numpy() for name, value in attention.named_parameters()}
    x = tokens(batch=1)
    q, k, v = (x[0].numpy() @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"] for n in "qkv")
    slices = [slice(h * HEAD_WIDTH, (h + 1) * HEAD_WIDTH) for h in range(HEADS)]
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
            per_head = state[f"{name}.{kind}"].unflatten(0, (kv_heads, HEAD_WIDTH))
            repeated = [per_head[h // group] for h in range(HEADS)]  # query head h reads key/value head h // group
            state[f"{name}.{kind}"] = torch.cat(repeated)
    many.load_state_dict(state)
    torch.testing.assert_close(few(tokens(), rope()), many(tokens(), rope()), rtol=0, atol=1e-12)


def scores_seen_through(attention: Attention, x: Tensor) -> Tensor:
    """The attention's output when values do not follow x: scaling x must then show in the scores alone."""
    bare = [nn.Parameter(torch.zeros_like(attention.get_parameter(f"{n}_proj.bias"))) for n in "qk"]
    attention.q_proj.bias, attention.k_proj.bias = bare
    values = torch.randn(x.shape[1], attention.v_proj.out_features, generator=torch.Generator().manual_seed(2))
    attention.v_proj.register_forward_hook(lambda module, inputs, output: values.to(output).expand_as(output))
    return attention(x, rope(x.shape[1]))


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_qk_norm_makes_scores_independent_of_the_scale_of_x(norm: type, scale: float, seed: int) -> None:
    x = tokens(seed=seed)
    expected = scores_seen_through(make(norm=norm), x)
    torch.testing.assert_close(scores_seen_through(make(norm=norm), scale * x), expected, rtol=0, atol=1e-9)


def test_without_qk_norm_scores_follow_the_scale_of_x() -> None:
    x = tokens()
    assert (scores_seen_through(make(), 2 * x) - scores_seen_through(make(), x)).abs().max() > 0.01


def test_qk_norm_comes_before_the_rotation() -> None:
    """A gain of its own for each feature does not commute with a rotation, so the order shows."""
    attention = make(heads=1, kv_heads=1, norm=RMSNorm)
    w = {name: value.detach().numpy() for name, value in attention.named_parameters()}
    x = tokens(batch=1)
    q, k, v = (x[0].numpy() @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"] for n in "qkv")

    def place(rows: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return np.array([reference.rotary(reference.rms_norm(r, gain, eps=0.0), p, 100.0) for p, r in enumerate(rows)])

    heads = reference.attend(place(q, w["q_norm.weight"]), place(k, w["k_norm.weight"]), v)
    expected = heads @ w["o_proj.weight"].T + w["o_proj.bias"]
    rotation = RotaryPosition(7, WIDTH, 100.0).rotation(torch.arange(7))
    np.testing.assert_allclose(attention(x, rotation)[0].detach().numpy(), expected, atol=1e-6)  # float32 tables


def test_attention_dropout_is_unbiased_and_only_while_training() -> None:
    torch.manual_seed(0)
    attention = make(dropout=0.5)
    x = tokens(batch=1)
    exact = attention(x)
    assert torch.equal(attention(x), exact)
    attention.train()
    many = attention(x.expand(4000, -1, -1))
    spread = many.std(dim=0)
    assert (spread > 0.01).any(dim=-1).all()  # each token's weights are dropped, the first token's single one too
    error = (many.mean(dim=0) - exact[0]).abs() / (spread / 4000**0.5 + 1e-12)
    assert error.max() < 5  # standard errors, over 112 numbers


@pytest.mark.parametrize("keys", [FEW_KEYS // 4, FEW_KEYS, FEW_KEYS + 1], ids=["fewer-keys", "few-keys", "many-keys"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "causal"])
def test_sixteen_bits_give_the_formula_and_its_gradient(keys: int, masked: bool) -> None:
    """Two query heads share each key/value head. The formula is computed in float64, from the rounded inputs.

    Rounding to 8 bits is an error of up to 0.4 per cent; a gradient's is judged over all its entries.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, keys, 8, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    visible = torch.ones(keys, keys, dtype=torch.bool).tril()
    if masked:
        visible = (torch.rand(2, 1, keys, keys, generator=generator) < 0.7) | torch.eye(keys, dtype=torch.bool)
    weight = torch.randn(2, 4, keys, 8, generator=generator)
    q, k, v = exact[0], exact[1].repeat_interleave(2, 1), exact[2].repeat_interleave(2, 1)
    scores = torch.einsum("bhqw,bhkw->bhqk", q, k) / 8**0.5
    expected = scores.masked_fill(~visible, -np.inf).softmax(-1) @ v
    (expected * weight).sum().backward()
    found = DotProduct()(*inputs, visible if masked else None, True)
    (found.float() * weight).sum().backward()
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.02)
    for rounded, precise in zip(inputs, exact, strict=True):
        assert (rounded.grad.double() - precise.grad).norm() < 0.01 * precise.grad.norm()
        if keys <= 128:  # of more entries, one is further off, in torch's own kernel too
            scale = precise.grad.square().mean().sqrt().item()
            torch.testing.assert_close(rounded.grad.double(), precise.grad, rtol=0.03, atol=0.05 * scale)


@pytest.mark.parametrize(
    ("keys", "dtype", "gradient", "fused"),
    [
        (FEW_KEYS, torch.bfloat16, True, False),
        (FEW_KEYS + 1, torch.bfloat16, True, True),
        (FEW_KEYS, torch.bfloat16, False, True),
        (FEW_KEYS, torch.float32, True, True),
    ],
)
def test_few_keys_of_sixteen_bits_are_written_out_where_a_gradient_is_wanted(
    keys: int, dtype: torch.dtype, gradient: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, calls = F.scaled_dot_product_attention, []
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *inputs, **how: (calls.append(1), kernel(*inputs, **how))[1]
    )
    q, k, v = (torch.randn(1, 2, keys, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    with torch.set_grad_enabled(gradient):
        DotProduct()(q, k, v, None, True)
    assert len(calls) == fused
