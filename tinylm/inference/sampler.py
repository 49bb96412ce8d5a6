"""From logits to the next token: small functions, each on (B, V) logits, and the Sampler that applies them in order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinylm.checks import check_numbers


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by the penalty, multiply negative ones (Keskar et al. 2019).

    seen: (B, V), True for tokens in the text so far.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """All but the k largest become -inf; ties with the k-th stay."""
    if k >= logits.shape[-1]:
        return logits
    smallest = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest most likely tokens whose probabilities reach p together (Holtzman et al. 2020)."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    beyond = before >= max(p, torch.finfo(before.dtype).tiny)  # a p that rounds to 0 keeps the likeliest token
    dropped = beyond.scatter(-1, order, beyond)
    return logits.masked_fill(dropped, -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative probability passes each row's uniform number: (B, V), (B,) -> (B,)."""
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    chosen = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    return chosen.clamp(max=logits.shape[-1] - 1)


@dataclass(frozen=True)
class Sampling:
    """How to choose a token; values of 0 (top_k, min_p) and 1 (top_p, repeat_penalty) change nothing."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raises UsageError for a value out of range."""
        check_numbers(vars(self))


class Sampler:
    """Draws one token a row. Row i draws from (seed, i), so it gets the same tokens however many rows there are.

    The rows may be numbered from another `first` one on.
    """

    def __init__(
        self, sampling: Sampling, seed: int, rows: int, device: torch.device, vocab_size: int, first: int = 0
    ) -> None:
        self.sampling = sampling
        self._generators = [torch.Generator().manual_seed(_row_seed(seed, first + row)) for row in range(rows)]
        self._seen = (
            torch.zeros(rows, vocab_size, dtype=torch.bool, device=device) if sampling.repeat_penalty != 1 else None
        )

    def observe(self, row: int, ids: Sequence[int]) -> None:
        """Count a prompt's tokens as seen."""
        if self._seen is not None and ids:
            self._seen[row, list(ids)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B,)"""
        sampling = self.sampling
        logits = logits.float()
        if self._seen is not None:
            logits = penalise_repeats(logits, self._seen, sampling.repeat_penalty)
        if sampling.temperature == 0:
            chosen = logits.argmax(dim=-1)
        else:
            # Subtracting the maximum first keeps a tiny temperature from overflowing; fp32 takes the tiniest for zero.
            logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(sampling.temperature, 1e-30)
            if sampling.top_k:
                logits = keep_top_k(logits, sampling.top_k)
            if sampling.top_p < 1:
                logits = keep_top_p(logits, sampling.top_p)
            if sampling.min_p:
                logits = keep_min_p(logits, sampling.min_p)
            uniform = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators])
            chosen = draw(logits.cpu(), uniform).to(logits.device)
        if self._seen is not None:
            self._seen.scatter_(1, chosen.unsqueeze(1), True)
        return chosen


def _row_seed(seed: int, row: int) -> int:
    """Neighbouring seeds and rows must not share a stream: mixed by SplitMix64 (Steele et al. 2014)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + row * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
