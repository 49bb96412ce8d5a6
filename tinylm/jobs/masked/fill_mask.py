"""Mask filling with an encoder (Devlin et al. 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tinylm.errors import UsageError
from tinylm.text.tokenizer import MASK, Tokenizer
from tinylm.transformer.architectures import Encoder

DEFAULT_CANDIDATES = 5


class MaskCandidate(NamedTuple):
    """The text of a token predicted for a mask, with the token's probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class FilledPrompt:
    """A filled prompt.

    text: the prompt with each mask replaced by its most likely token. masks: the candidates for each mask, in the order
    of the masks, most likely first.
    """

    prompt: str
    text: str
    masks: list[list[MaskCandidate]]


def fill_mask(model: Encoder, tokenizer: Tokenizer, prompt: str, candidates: int, name: str) -> FilledPrompt:
    """Fill each `<mask>` of a prompt, independently of the other masks.

    candidates: number of candidates per mask; 0 for DEFAULT_CANDIDATES. name: name of the prompt in error messages.

    Raises UsageError for a prompt without a mask, longer than the context, or with unknown characters.
    """
    if MASK not in prompt:
        raise UsageError(f"{name} has no {MASK} to fill; put one where a token is to be predicted.")
    parts = prompt.split(MASK)
    if tokenizer.kind != "char":  # a word's token includes the space before the word and replaces that space
        parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
    ids = [int(i) for i in tokenizer.encode(parts[0])]
    for part in parts[1:]:
        ids += [tokenizer.mask_id, *(int(i) for i in tokenizer.encode(part))]
    if len(ids) > model.context:
        raise UsageError(f"{name} has {len(ids)} tokens, and the model's context is {model.context}; shorten it.")
    predictions = predict_masks(
        model, ids, tokenizer.mask_id, candidates or DEFAULT_CANDIDATES, exclude=[tokenizer.end_of_text_id]
    )
    most_likely = (candidates_of_mask[0][0] for candidates_of_mask in predictions)
    text = tokenizer.decode([next(most_likely) if token == tokenizer.mask_id else token for token in ids])
    masks = [
        [MaskCandidate(tokenizer.decode([token]), probability) for token, probability in candidates_of_mask]
        for candidates_of_mask in predictions
    ]
    return FilledPrompt(prompt, text, masks)


@torch.inference_mode()
def predict_masks(
    model: Encoder, ids: Sequence[int], mask_id: int, candidates: int, exclude: Sequence[int] = ()
) -> list[list[tuple[int, float]]]:
    """The `candidates` most likely tokens for each `mask_id` in `ids` (at most the context), in order, with their
    probabilities, the most likely first.

    The mask token and the ids in `exclude` are not predicted; the probabilities of all other tokens add up to 1.
    """
    positions = [position for position, token in enumerate(ids) if token == mask_id]
    inputs = torch.tensor([list(ids)], device=model.device)  # (1, T)
    logits = model.logits(model(inputs).hidden[0, positions]).float()  # (N, V) for N masks
    excluded = list({mask_id, *exclude})
    logits[:, excluded] = -torch.inf
    best = logits.softmax(dim=-1).topk(min(candidates, logits.shape[-1] - len(excluded)))  # (N, K)
    return [[*zip(*row, strict=True)] for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
