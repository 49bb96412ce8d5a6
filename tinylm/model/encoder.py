"""The encoder-only transformer: every token sees every other (seeds 001, 004; Devlin et al. 2019)."""

import torch
from torch import Tensor

from tinylm.model.mask import padding_mask, within
from tinylm.model.stack import Output, Stack, Transformer


class Encoder(Transformer):
    """Its layers' attention is not causal."""

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Output:
        """(B, T) -> (B, T, D). lengths: (B,), after which a row is padding, which no token sees."""
        return encode(self, self.embed(ids), lengths)


def encode(stack: Stack, x: Tensor, lengths: Tensor | None) -> Output:
    """Embedded tokens (B, T, D) through layers that see all of them but the padding after each row's length (B,)."""
    positions = torch.arange(x.shape[1], device=x.device)  # (T,)
    mask = padding_mask(lengths, x.shape[1])
    real = None if lengths is None else within(lengths, x.shape[1])
    return stack.through_layers(x, positions, [mask] * len(stack.layers), real=real)
