"""Which keys a query may see. `None` stands for what kernels do without a mask: all, or all that came before."""

import torch
from torch import Tensor


def causal_mask(
    queries: int,
    offset: int,
    starts: Tensor | None = None,
    device: torch.device | None = None,
    window: int | None = None,
) -> Tensor | None:
    """True where query t, at slot i = offset + t, may see slot s: i - window < s <= i, and s >= starts[b] in row b.

    Slots before a row's start are padding. A padding query sees itself, so that its softmax has something to sum; no
    other query sees it. Of slots that no query can see any more, a rolling cache keeps none, and the mask has none.

    Returns (T, S), or with starts (B, 1, T, S), where S is the number of slots kept; `None` where a query sees all that
    came before it.
    """
    first = 0 if window is None else max(0, offset - (window - 1))
    every_past_slot = queries == 1 or (offset == 0 and (window is None or queries <= window))
    if starts is None and every_past_slot:
        return None
    query_slots = torch.arange(offset, offset + queries, device=device).unsqueeze(1)  # (T, 1)
    key_slots = torch.arange(first, offset + queries, device=device)  # (S,)
    visible = key_slots <= query_slots  # (T, S)
    if window is not None:
        visible &= key_slots > query_slots - window
    if starts is None:
        return visible
    in_row = key_slots >= starts.view(-1, 1, 1)  # (B, 1, S)
    return ((visible & in_row) | (key_slots == query_slots)).unsqueeze(1)  # (B, 1, T, S)


def padding_mask(lengths: Tensor | None, keys: int) -> Tensor | None:
    """`within` for every head and query: (B,) to (B, 1, 1, S). `None` where no row has padding."""
    if lengths is None:
        return None
    return within(lengths, keys).view(-1, 1, 1, keys)  # (B, 1, 1, S)


def within(lengths: Tensor, slots: int) -> Tensor:
    """True where a slot is within a row's length: (B,) to (B, S)."""
    return torch.arange(slots, device=lengths.device) < lengths.unsqueeze(1)  # (B, S)
