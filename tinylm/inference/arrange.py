"""A model's weights arranged for writing a token at a time: fewer and larger products, in the layout that a CPU reads
fastest. What the model computes stays the same, but for rounding (decision 013).
"""

import torch
from torch import Tensor, nn

from tinylm.adapters.inject import replace_modules
from tinylm.inference.quantize import quantize_int8
from tinylm.model.attention import Attention
from tinylm.model.cache import Cache
from tinylm.model.feedforward import GatedFeedForward
from tinylm.model.linear import USES_ONEDNN, Linear, onednn_product
from tinylm.model.norm import LayerNorm, RMSNorm
from tinylm.model.position import Rotation, rotate
from tinylm.model.routing import Routing
from tinylm.model.stack import Transformer

FEWEST_WEIGHTS = 2**18  # of a matrix, for which a call of oneDNN is worth its own cost
ROWS = 32  # that oneDNN arranges a matrix for: it is as fast for fewer then


def arrange(model: Transformer, int8: bool = False, packed: bool = True) -> None:
    """Change a model in its place; with `int8`, quantize it, too (`quantize_int8`). What is to be compiled must not be
    `packed`: a compiler has a layout of its own.

    It can write and predict afterwards, and no longer be trained or saved. Of a large embedding that is the output
    layer, too, there are two copies then: one to look up, and one to multiply by.
    """
    _join(model)
    embedding = model.embedding
    if model.output is None and type(embedding) is nn.Embedding and embedding.weight.numel() >= FEWEST_WEIGHTS:
        model.output = _linear(embedding.weight, None)
    if int8:
        quantize_int8(model)
    elif packed and USES_ONEDNN and model.device.type == "cpu":
        replace_modules(model, lambda _, module: _is_large(module), lambda _, module: PackedLinear(module))


def _is_large(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Linear)
        and module.weight.dtype == torch.float32
        and module.weight.numel() >= FEWEST_WEIGHTS
    )


class PackedLinear(nn.Module):
    """x W^T + b with W as oneDNN wants it."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        return onednn_product(x, self.weight, self.bias)


class JoinedAttention(nn.Module):
    """`Attention` whose queries, keys and values are one product, and whose queries and keys are rotated together."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.head_width = attention.head_width
        self.heads, self.kv_heads = (p.out_features // self.head_width for p in (attention.q_proj, attention.k_proj))
        self.qkv_proj = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.qk_norm = _joined_norm(attention.q_norm, attention.k_norm, self.heads, self.kv_heads)
        self.o_proj, self.core, self.causal = attention.o_proj, attention.core, attention.causal

    def forward(
        self, x: Tensor, rotation: Rotation | None = None, mask: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """(B, T, D) -> (B, T, D)"""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, H+2K, T, W)
        qk, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        qk = self.qk_norm(qk)  # (B, H+K, T, W)
        if rotation is not None:
            qk = rotate(qk, rotation)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, K, S, W)
        return self.o_proj(self.core(q, k, v, mask, self.causal).transpose(1, 2).flatten(2))  # (B, T, D)


class JoinedNorm(nn.Module):
    """A norm for heads that have gains and biases of their own."""

    gains: Tensor | None
    biases: Tensor | None

    def __init__(self, bare: nn.Module, gains: Tensor | None, biases: Tensor | None) -> None:
        super().__init__()
        self.bare = bare
        self.register_buffer("gains", gains)
        self.register_buffer("biases", biases)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H+K, T, W) -> (B, H+K, T, W)"""
        x = self.bare(x)
        x = x if self.gains is None else x * self.gains
        return x if self.biases is None else x + self.biases


class JoinedGatedFeedForward(nn.Module):
    """`GatedFeedForward` whose gate and first matrix are one product."""

    def __init__(self, feedforward: GatedFeedForward) -> None:
        super().__init__()
        self.gate_up_proj = _joined(feedforward.gate_proj, feedforward.up_proj)
        self.down_proj = feedforward.down_proj
        self.activation = feedforward.activation

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """(..., D) -> (..., D), and no routing."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up), None


def _join(model: nn.Module) -> None:
    """Join the layers of one input, but those that carry adapters, and those of experts, which are torch's own."""

    def plain(*modules: nn.Module) -> bool:
        return all(type(module) is Linear for module in modules)

    def is_attention(_: str, module: nn.Module) -> bool:
        return isinstance(module, Attention) and plain(module.q_proj, module.k_proj, module.v_proj)

    def is_gated(_: str, module: nn.Module) -> bool:
        return isinstance(module, GatedFeedForward) and plain(module.gate_proj, module.up_proj)

    def join_attention(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, Attention)
        return JoinedAttention(module)

    def join_gated(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, GatedFeedForward)
        return JoinedGatedFeedForward(module)

    replace_modules(model, is_attention, join_attention)
    replace_modules(model, is_gated, join_gated)


def _joined(*linears: nn.Linear) -> Linear:
    """Their outputs side by side."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return _linear(torch.cat(weights), torch.cat(biases) if biases else None)


def _joined_norm(q_norm: nn.Module, k_norm: nn.Module, heads: int, kv_heads: int) -> nn.Module:
    if isinstance(q_norm, nn.Identity):
        return q_norm

    def each(of_q: Tensor | None, of_k: Tensor | None) -> Tensor | None:
        if of_q is None or of_k is None:
            return None
        return torch.cat((of_q.detach().expand(heads, 1, -1), of_k.detach().expand(kv_heads, 1, -1)))  # (H+K, 1, W)

    assert isinstance(q_norm, LayerNorm | RMSNorm) and isinstance(k_norm, LayerNorm | RMSNorm)
    bare = type(q_norm)(*q_norm.shape, gain=False, bias=False, eps=q_norm.eps)
    return JoinedNorm(bare, each(q_norm.weight, k_norm.weight), each(q_norm.bias, k_norm.bias))


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    linear = Linear(1, 1, bias is not None)  # small, since what is built is drawn at random
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
