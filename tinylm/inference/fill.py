"""Guesses for covered tokens with an encoder."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tinylm.model.encoder import Encoder


class Guess(NamedTuple):
    """The likeliest tokens for one covered place, best first, with their probabilities."""

    tokens: list[int]
    probabilities: list[float]


@torch.inference_mode()
def guess(model: Encoder, ids: Sequence[int], mask: int, candidates: int, never: Sequence[int] = ()) -> list[Guess]:
    """A guess for every mask among the ids, each by itself, in order: neither the mask itself, nor one of `never`."""
    places = [place for place, token in enumerate(ids) if token == mask]
    inputs = torch.tensor([list(ids)], device=model.device)
    logits = model.logits(model(inputs).hidden[0, places]).float()  # (N, V)
    left_out = list({mask, *never})
    logits[:, left_out] = -torch.inf
    best = logits.softmax(dim=-1).topk(min(candidates, logits.shape[-1] - len(left_out)))  # (N, K)
    return [
        Guess(tokens, probabilities)
        for tokens, probabilities in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
