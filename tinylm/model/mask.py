"""Which keys a query may see. `None` stands for plain causal attention, which kernels do without a mask."""

import torch
from torch import Tensor


def causal_mask(queries: int, offset: int, starts: Tensor | None = None, device: torch.device | None = None) -> Tensor:
    """True where query t, at slot offset + t, may see slot s: s <= offset + t, and s >= starts[b] in row b.

    Slots before a row's start are padding. A padding query sees itself, so that its softmax has something to sum; no
    other query sees it. Returns (T, S), or with starts (B, 1, T, S), where S = offset + T.
    """
    query_slots = torch.arange(offset, offset + queries, device=device).unsqueeze(1)  # (T, 1)
    key_slots = torch.arange(offset + queries, device=device)  # (S,)
    causal = key_slots <= query_slots  # (T, S)
    if starts is None:
        return causal
    in_row = key_slots >= starts.view(-1, 1, 1)  # (B, 1, S)
    return ((causal & in_row) | (key_slots == query_slots)).unsqueeze(1)  # (B, 1, T, S)
