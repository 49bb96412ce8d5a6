"""Attention masks, True where a query attends to a key, and positions in rows of several texts.

A mask of `None` stands for plain causal attention in a decoder, and for full attention elsewhere.
"""

import torch
from torch import Tensor


def causal_mask(
    queries: int,
    offset: int,
    starts: Tensor | None = None,
    device: torch.device | None = None,
    window: int | None = None,
) -> Tensor | None:
    """True where query t, at slot i = offset + t, attends to slot s: i - window < s <= i, and s >= starts[b] in row b.

    Slots before starts[b] are padding in row b. A padding query attends only to itself, so that its softmax is defined;
    no other query attends to it. Slots before the first query's window, which a SlidingWindowCache drops, have no
    column in the mask.

    Returns (T, S), or (B, 1, T, S) with `starts`, where S is the number of columns; `None` if plain causal attention
    needs no mask.
    """
    first = 0 if window is None else max(0, offset - (window - 1))
    is_plain_causal = queries == 1 or (offset == 0 and (window is None or queries <= window))
    if starts is None and is_plain_causal:
        return None
    query_slots = torch.arange(offset, offset + queries, device=device).unsqueeze(1)  # (T, 1)
    key_slots = torch.arange(first, offset + queries, device=device)  # (S,)
    allowed = key_slots <= query_slots  # (T, S)
    if window is not None:
        allowed &= key_slots > query_slots - window
    if starts is None:
        return allowed
    in_row = key_slots >= starts.view(-1, 1, 1)  # (B, 1, S)
    return ((allowed & in_row) | (key_slots == query_slots)).unsqueeze(1)  # (B, 1, T, S)


def segment_mask(segments: Tensor, window: int | None) -> Tensor:
    """Causal attention within each of the texts that share a row: (B, T) -> (B, 1, T, T).

    Query i attends to slot s if both have the same number in `segments`, s <= i and, with a window, s > i - window.
    """
    slots = torch.arange(segments.shape[1], device=segments.device)
    distance = slots.unsqueeze(1) - slots  # (T, T)
    allowed = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (allowed & (segments.unsqueeze(2) == segments.unsqueeze(1))).unsqueeze(1)  # (B, 1, T, T)


def segment_positions(segments: Tensor) -> Tensor:
    """The position of each token in its text: (B, T) -> (B, T). A text is a run of equal numbers in a row."""
    slots = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)  # (B, T)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return slots - torch.where(begins, slots, 0).cummax(dim=1).values


def padding_mask(lengths: Tensor | None, keys: int) -> Tensor | None:
    """`valid_tokens` broadcast over heads and queries: (B,) -> (B, 1, 1, S). `None` without `lengths`."""
    if lengths is None:
        return None
    return valid_tokens(lengths, keys).view(-1, 1, 1, keys)  # (B, 1, 1, S)


def valid_tokens(lengths: Tensor, slots: int) -> Tensor:
    """True for the first lengths[b] slots of row b, False for padding: (B,) -> (B, S)."""
    return torch.arange(slots, device=lengths.device) < lengths.unsqueeze(1)  # (B, S)
