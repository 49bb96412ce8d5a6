"""Layer fusion for generation, fewer and larger matrix products (decision 013), and int8 weights.

Except with int8, the outputs stay the same up to rounding.
"""

import torch
from torch import Tensor, nn

from tinylm.adapters.adapter import replace_modules, unwrapped_name
from tinylm.kernels import int8
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.attention import SelfAttention
from tinylm.transformer.feedforward import GatedFeedForward, Routing
from tinylm.transformer.layers import LayerNorm, Linear, RMSNorm, UnitOffsetRMSNorm
from tinylm.transformer.position import Rotation, rotate


class Int8Linear(nn.Module):
    """x W^T + b with W ~ scale * round(W / scale), where the scale of a row is its largest magnitude over 127, in bf16.

    The kernel takes scales in bf16. Weights are divided by the rounded scales, which avoids an error of that rounding.
    """

    weight: Tensor  # (out, in'), int8, with padded inputs; see `int8.align`
    scale: Tensor  # (out,), bf16
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-12).bfloat16()
        self.register_buffer("weight", int8.align((weight / scale.unsqueeze(1)).round().to(torch.int8)))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        y = int8.linear(x, self.weight, self.scale)
        return (y if self.bias is None else self.bias + y).to(x.dtype)


def quantize_int8(model: nn.Module) -> None:
    """Replace every linear layer except routers by an `Int8Linear`, in place.

    Routers are small, and rounding them could change the choice of experts. The embedding and an output layer tied to
    it are not quantized either; `fuse_model` unties a large one first.
    """

    def quantized(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        return Int8Linear(module)

    replace_modules(
        model,
        lambda name, module: isinstance(module, nn.Linear) and not unwrapped_name(name).endswith(".router"),
        quantized,
    )


LARGE_EMBEDDING = 2**18  # number of weights; a smaller one stays in a core's cache


def fuse_model(model: Transformer, int8: bool = False) -> None:
    """Fuse a model's layers in place; with `int8`, also quantize them (`quantize_int8`).

    Afterwards the model can generate and be evaluated, but not be trained or saved. With `int8`, a large embedding and
    the output layer are untied if they are tied, and the output layer becomes a second copy of the weight, in int8.
    """
    _fuse_layers(model)
    replace_modules(model, _is_transposed, _made_contiguous)
    if int8:
        embedding = model.embedding
        if model.output is None and type(embedding) is nn.Embedding and embedding.weight.numel() >= LARGE_EMBEDDING:
            model.output = _linear(embedding.weight, None)
        quantize_int8(model)


def _is_transposed(_: str, module: nn.Module) -> bool:
    """Whether a linear layer's weight is not contiguous, such as the transposed weights of GPT-2 files."""
    return isinstance(module, nn.Linear) and not module.weight.is_contiguous()


def _made_contiguous(_: str, module: nn.Module) -> Linear:
    assert isinstance(module, nn.Linear)
    return _linear(module.weight.contiguous(), module.bias)


class FusedAttention(SelfAttention):
    """`SelfAttention` with one product for queries, keys and values, and one norm and rotation for queries and keys."""

    def __init__(self, attention: SelfAttention) -> None:
        nn.Module.__init__(self)  # SelfAttention.__init__ would create new projections
        self.head_dim = attention.head_dim
        self.heads, self.kv_heads = (p.out_features // self.head_dim for p in (attention.q_proj, attention.k_proj))
        self.qkv_proj = _concatenate(attention.q_proj, attention.k_proj, attention.v_proj)
        self.qk_norm = _fuse_norms(attention.q_norm, attention.k_norm, self.heads, self.kv_heads)
        self.o_proj, self.core, self.causal = attention.o_proj, attention.core, attention.causal

    def project(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, D) -> queries (B, H, T, W), keys and values (B, K, T, W)."""
        heads = self._split(self.qkv_proj(x)).transpose(1, 2)  # (B, H+2K, T, W)
        qk, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        qk = self.qk_norm(qk)  # (B, H+K, T, W)
        if rotation is not None:
            qk = rotate(qk, rotation)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        return q, k, v


class FusedHeadNorm(nn.Module):
    """One norm for queries and keys.

    norm: has no gain and no bias. gains, biases: those of each head, (H+K, 1, W), or `None`.
    """

    gains: Tensor | None
    biases: Tensor | None

    def __init__(self, norm: nn.Module, gains: Tensor | None, biases: Tensor | None) -> None:
        super().__init__()
        self.norm = norm
        self.register_buffer("gains", gains)
        self.register_buffer("biases", biases)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H+K, T, W) -> (B, H+K, T, W)"""
        # Gains in a wider format than x are multiplied in that format, and the product is rounded once.
        y = self.norm(x if self.gains is None else x.to(torch.promote_types(x.dtype, self.gains.dtype)))
        y = (y if self.gains is None else y * self.gains).to(x.dtype)
        return y if self.biases is None else y + self.biases


class FusedGatedFeedForward(nn.Module):
    """`GatedFeedForward` whose `gate_proj` and `up_proj` are one product."""

    def __init__(self, feedforward: GatedFeedForward) -> None:
        super().__init__()
        self.gate_up_proj = _concatenate(feedforward.gate_proj, feedforward.up_proj)
        self.down_proj = feedforward.down_proj
        self.activation = feedforward.activation

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """(..., D) -> (..., D), and `None` for the routing."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activation(gate) * up), None


def _fuse_layers(model: nn.Module) -> None:
    """Fuse linear layers that have the same input, and fold the 1 of fp32 `UnitOffsetRMSNorm`s into their weights.

    Layers with adapters, and layers of experts (`nn.Linear`), are not fused.
    """

    def are_plain(*modules: nn.Module) -> bool:
        return all(type(module) is Linear for module in modules)

    def is_attention(_: str, module: nn.Module) -> bool:
        if type(module) is not SelfAttention or not are_plain(module.q_proj, module.k_proj, module.v_proj):
            return False
        norms = (module.q_norm, module.k_norm)
        return all(isinstance(norm, nn.Identity | LayerNorm | RMSNorm) for norm in norms)

    def is_gated(_: str, module: nn.Module) -> bool:
        return isinstance(module, GatedFeedForward) and are_plain(module.gate_proj, module.up_proj)

    def has_foldable_offset(_: str, module: nn.Module) -> bool:
        return isinstance(module, UnitOffsetRMSNorm) and module.weight.dtype == module.gain.dtype

    def fold_offset(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, UnitOffsetRMSNorm)
        return _fold_offset(module)

    def fuse_attention(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, SelfAttention)
        return FusedAttention(module)

    def fuse_gated(_: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, GatedFeedForward)
        return FusedGatedFeedForward(module)

    replace_modules(model, has_foldable_offset, fold_offset)
    replace_modules(model, is_attention, fuse_attention)
    replace_modules(model, is_gated, fuse_gated)


def _concatenate(*linears: nn.Linear) -> Linear:
    """One layer with the outputs of all layers, in order."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return _linear(torch.cat(weights), torch.cat(biases) if biases else None)


def _fold_offset(norm: UnitOffsetRMSNorm) -> RMSNorm:
    """The same norm with 1 + weight as its weight. Only for fp32 or wider: a 16-bit sum would be rounded."""
    folded = RMSNorm(*norm.shape, gain=False, bias=False, eps=norm.eps)
    folded.weight = nn.Parameter(norm.gain.detach(), requires_grad=False)
    folded.bias = norm.bias
    return folded


def _fuse_norms(q_norm: nn.Module, k_norm: nn.Module, heads: int, kv_heads: int) -> nn.Module:
    """One norm for the concatenated heads of queries and keys, (B, H+K, T, W)."""
    if isinstance(q_norm, nn.Identity):
        return q_norm

    def per_head(q_parameter: Tensor | None, k_parameter: Tensor | None) -> Tensor | None:
        if q_parameter is None or k_parameter is None:
            return None
        q, k = q_parameter.detach().expand(heads, 1, -1), k_parameter.detach().expand(kv_heads, 1, -1)
        return torch.cat((q, k))  # (H+K, 1, W)

    assert isinstance(q_norm, LayerNorm | RMSNorm) and isinstance(k_norm, LayerNorm | RMSNorm)
    norm_type = LayerNorm if isinstance(q_norm, LayerNorm) else RMSNorm
    norm = norm_type(*q_norm.shape, gain=False, bias=False, eps=q_norm.eps)
    return FusedHeadNorm(norm, per_head(q_norm.gain, k_norm.gain), per_head(q_norm.bias, k_norm.bias))


def _linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A frozen layer with these parameters."""
    linear = Linear(1, 1, bias is not None)  # 1 x 1, since the initial weights are replaced
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
