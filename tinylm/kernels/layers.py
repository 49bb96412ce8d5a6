"""Parts of layers on a CPU: the products of linear layers, attention, dropout and RMSNorm.

Products. In fp32, oneDNN, which torch itself uses on x86 for 16-bit formats only (decision 013). CPUs from Intel
(decision 015) and CPUs without AVX-512 (decision 038) use MKL, which is faster there. With 16-bit weights, on x86
processors that have no instructions for the format, fp32: there, torch multiplies many rows in 16 bits several times
slower (decision 038). Converting a weight at each use keeps the memory of the model at 16 bits per weight.

Scaled dot-product attention is unfused where that is faster than torch's fused kernels, in bf16 (decision 010): it
computes scores, softmax and weighted sum as separate operations, and stores the attention weights. Dropout (Srivastava
et al. 2014) takes about a quarter of the time of `F.dropout` (decision 005): torch draws a double for each entry, in
one thread; here 64 random bits are used as four 16-bit numbers. RMSNorm has a backward pass of its own, since torch has
neither a forward nor a backward kernel for it (decision 010).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinylm.kernels import cpu

MIN_ROWS = 32  # with fewer rows, converting the weight takes longer than a faster product gains

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")

MAX_UNFUSED_KEYS = 512  # with more keys, the backward pass of the fused kernel is faster in bf16
_HAS_AMX = cpu.has_amx()
_NORM_BACKWARD = hasattr(torch.ops.aten, "native_layer_norm_backward")


def is_mkl_faster(is_intel: bool, has_avx512: bool) -> bool:
    """Whether MKL multiplies fp32 matrices faster than oneDNN on a processor."""
    return is_intel or not has_avx512


# Whether fp32 layers use oneDNN: if this version of torch has it, and MKL is absent or slower
PREFERS_ONEDNN = _AVAILABLE and not (
    torch.backends.mkl.is_available() and is_mkl_faster(cpu.is_intel(), cpu.has_avx512())
)
# Whether the processor has instructions for a 16-bit format
HAS_INSTRUCTIONS = {
    torch.bfloat16: not cpu.is_x86() or cpu.computes_bf16(),
    torch.float16: not cpu.is_x86() or cpu.computes_fp16(),
}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: (..., in), (out, in) and (out,) -> (..., out). In 16 bits, the result has the dtype of the weight."""
    if is_widened(x, weight):
        with torch.autocast("cpu", enabled=False):
            y = linear(x.float(), weight.float(), None if bias is None else bias.float())
        return y.to(weight.dtype)
    is_onednn_faster = (
        PREFERS_ONEDNN
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() >= MIN_ROWS * x.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # torch.compile supports these operations without gradients only
    )
    if not is_onednn_faster:
        return F.linear(x, weight, bias)
    return (_OneDNNLinear.apply if torch.is_grad_enabled() else _onednn_linear)(x, weight, bias)


def is_widened(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` computes a product of 16-bit weights in fp32. Never with autograd, which would keep the fp32
    weight. x, weight: as for `linear`
    """
    return (
        not HAS_INSTRUCTIONS.get(weight.dtype, True)
        and weight.device.type == "cpu"
        and x.numel() >= MIN_ROWS * x.shape[-1]
        and (torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype) == weight.dtype
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
    )


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    """y = x W^T + b, with dx = g W, dW = g^T x, and db = the sum of g over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _onednn_linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        g_t = g.flatten(0, -2).t()  # (out, N)
        dx = None if weight is None else _onednn_linear(g, weight.t())  # (..., in)
        dw = None
        if x is not None:  # oneDNN copies its first argument, so the smaller one comes first
            x_t = x.flatten(0, -2).t()  # (in, N)
            dw = _onednn_linear(g_t, x_t) if len(g_t) <= len(x_t) else _onednn_linear(x_t, g_t).t()  # (out, in)
        return dx, dw, g_t.sum(dim=1) if ctx.needs_input_grad[2] else None


def dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """softmax(scale q k^T) v for each head: (B, H, T, W) and two of (B, K, S, W) -> (B, H, T, W).

    Query head h reads key/value head h // (H / K). mask: broadcastable to (B, 1, T, S), True where a query attends.
    With `causal` and without a mask, a query attends to the keys up to its own position; T must then be S, or 1 (the
    last position). `scale` is 1/sqrt(W) unless given. `dropout` is applied to the attention weights.
    """
    # In bf16 with few keys, the fused kernel has a slow backward pass and, without AMX, a slow forward pass
    is_slow = torch.is_grad_enabled() or (q.shape[2] > 1 and not _HAS_AMX)
    is_unfused_faster = is_slow and q.dtype == torch.bfloat16 and k.shape[2] <= MAX_UNFUSED_KEYS
    if q.device.type == "cpu" and (dropout or is_unfused_faster):
        return unfused_attention(q, k, v, mask, causal, scale, dropout)
    if q.shape[2] == 1:  # the queries that share a head as rows of one product, so that keys and values are read once
        rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # (B, K, H/K, W)
        return F.scaled_dot_product_attention(rows, k, v, mask, dropout, scale=scale).reshape(q.shape)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None and q.shape[2] > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def max_unfused_keys(device: str, dtype: str) -> int:
    """Largest number of keys with which attention without dropout is unfused in training; 0 if it is always fused."""
    return MAX_UNFUSED_KEYS if (device, dtype) == ("cpu", "bf16") else 0


def causal_triangle(queries: int, keys: int, device: torch.device) -> Tensor:
    """(T, S) causal mask, True where a query attends; the last query has the position of the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def unfused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, dropout: float = 0.0
) -> Tensor:
    """`dot_product_attention`, (B, H, T, W) -> (B, H, T, W): queries that share a head are rows of one product."""
    batch, kv_heads, keys, width = k.shape
    queries, group = q.shape[2], q.shape[1] // kv_heads
    rows = q.reshape(batch * kv_heads, group * queries, width)  # (B*K, H/K*T, W)
    k, v = (x.reshape(batch * kv_heads, keys, width) for x in (k, v))  # (B*K, S, W)
    if mask is None and causal:
        mask = causal_triangle(queries, keys, q.device)
    elif mask is None:
        mask = torch.ones(1, 1, dtype=torch.bool, device=q.device)
    mask = mask.expand(1 if mask.dim() == 2 else batch, 1, queries, keys)  # (1 or B, 1, T, S)
    bias = q.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)  # (1 or B, 1, T, S)
    bias = bias.repeat(1, kv_heads if len(mask) > 1 else 1, group, 1).flatten(0, 1)  # (1 or B*K, H/K*T, S)
    scale = width**-0.5 if scale is None else scale
    weights = torch.baddbmm(bias, rows, k.transpose(1, 2), alpha=scale).softmax(dim=-1)  # (B*K, H/K*T, S)
    if dropout:
        weights = random_dropout(weights, dropout)
    return (weights @ v).view(batch, -1, queries, width)  # (B, H, T, W)


def random_dropout(x: Tensor, p: float) -> Tensor:
    """x / (1 - p) with probability 1 - p, else 0: (...) -> (...).

    On a CPU, the probability p is rounded to a multiple of 2^-16 below 1.
    """
    if x.device.type != "cpu":
        return F.dropout(x, p)
    count = x.numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64)
    (_draw_compiled if torch.compiler.is_compiling() else _draw)(bits)
    numbers = bits.view(torch.int16)[:count].view(x.shape)  # (...), uniform in [-2^15, 2^15)
    kept = numbers >= min(round(p * 2**16), 2**16 - 1) - 2**15
    return x * (kept.to(x.dtype) * (1 / max(1 - p, 2**-16)))


def _draw(bits: Tensor) -> None:
    bits.random_(torch.iinfo(torch.int64).min, None)


@torch.library.custom_op("tinylm::draw_bits", mutates_args=("bits",), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_compiled(bits: Tensor) -> None:
    """`_draw` as an operation that torch.compile calls instead of compiling its own, which is slower (decision 014).

    It mutates its argument, because the compiler would merge two equal operations that return a new tensor.
    """
    _draw(bits)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in the dtype of x: (..., D) and (D,) -> (..., D)."""
    if _NORM_BACKWARD and x.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _RMSNorm.apply(x, weight, eps)
    # Under autocast the weight is fp32, and the fused kernel needs x and weight in the same dtype.
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


class _RMSNorm(torch.autograd.Function):
    """y = x r w with r = 1 / sqrt(mean(x^2) + eps).

    dx = r (g w - x r^2 mean(g w x)) and dw = sum(g x r). torch has a kernel for the gradient of LayerNorm, which at a
    mean of 0 has one more term, -r mean(g w). 16-bit inputs are computed in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        precise = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=precise)  # (..., 1)
        r = (norm * norm).div_(x.shape[-1]).add_(eps).rsqrt_()  # (..., 1)
        ctx.save_for_backward(x, r, weight)
        y = x * r
        return (y if weight is None else y.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, r, weight = ctx.saved_tensors
        g = g.to(r.dtype)
        gain = None if weight is None else weight.to(r.dtype)
        output_mask = [True, ctx.needs_input_grad[1], False]
        dx, dw, _ = torch.ops.aten.native_layer_norm_backward(
            g, x.to(r.dtype), x.shape[-1:], torch.zeros_like(r), r, gain, None, output_mask
        )
        # Add r mean(g w), which the kernel has subtracted.
        sum_gw = g.sum(dim=-1, keepdim=True) if gain is None else (g @ gain).unsqueeze(-1)  # (..., 1)
        return dx.add_((sum_gw * r).div_(x.shape[-1])).to(x.dtype), dw, None
