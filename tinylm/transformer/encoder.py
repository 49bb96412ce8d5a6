"""The encoder-only transformer with bidirectional attention (Devlin et al. 2019)."""

import torch
from torch import Tensor

from tinylm.transformer.attention import padding_mask, valid_tokens
from tinylm.transformer.stack import Output, Stack, Transformer


class Encoder(Transformer):
    """Encoder-only transformer (BERT)."""

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Output:
        """(B, T) -> (B, T, D). lengths: (B,), tokens per row; the padding after them is masked."""
        return encode(self, self.embed(ids), lengths)


def encode(stack: Stack, x: Tensor, lengths: Tensor | None) -> Output:
    """Run embedded tokens (B, T, D) through a bidirectional stack. lengths: (B,), tokens per row; padding is masked."""
    positions = torch.arange(x.shape[1], device=x.device)  # (T,)
    mask = padding_mask(lengths, x.shape[1])
    valid = None if lengths is None else valid_tokens(lengths, x.shape[1])
    return stack.run_layers(x, positions, [mask] * len(stack.layers), valid=valid)
