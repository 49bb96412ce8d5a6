"""Sampling of the next token: functions of logits (B, V), and the Sampler that applies them in order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.generation.generation_config import SamplingConfig


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive logits of seen tokens by the penalty, and multiply negative ones by it (Keskar et al. 2019).

    (B, V) -> (B, V). seen: (B, V), True for the tokens that occur in each row's text.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Set all but the k largest logits to -inf; ties with the k-th stay. (B, V) -> (B, V)"""
    if k >= logits.shape[-1]:
        return logits
    kth_largest = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kth_largest, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with total probability p or more (Holtzman et al. 2020).

    (B, V) -> (B, V), with -inf for all other tokens.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities  # total probability of the more likely tokens
    dropped = before >= max(p, torch.finfo(before.dtype).tiny)  # if p rounds to 0, the most likely token is kept
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def keep_min_p(logits: Tensor, p: float) -> Tensor:
    """Set the logits of tokens less than p times as likely as the most likely one to -inf (Nguyen et al. 2024).

    (B, V) -> (B, V)
    """
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the first token at which the cumulative probability exceeds the row's uniform number.

    logits (B, V), uniform (B,) in [0, 1) -> token ids (B,)
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    chosen = torch.searchsorted(cumulative, uniform.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    return chosen.clamp(max=logits.shape[-1] - 1)


class Sampler:
    """Samples one token per row.

    Row i draws from the random stream (seed, first_stream + i), whatever the number of rows. Ids from `vocab_size` on,
    whose rows pad an embedding, are never sampled.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        seed: int,
        rows: int,
        device: torch.device,
        vocab_size: int,
        first_stream: int = 0,
    ) -> None:
        self.sampling = sampling
        self._vocab_size = vocab_size
        self._is_checked = False
        self._generators = [
            torch.Generator().manual_seed(_stream_seed(seed, first_stream + row)) for row in range(rows)
        ]
        self._seen = (
            torch.zeros(rows, vocab_size, dtype=torch.bool, device=device) if sampling.repeat_penalty != 1 else None
        )

    def observe(self, row: int, ids: Sequence[int]) -> None:
        """Mark the tokens of a prompt as seen in one row, for the repeat penalty. Sampled tokens are marked anyway."""
        if self._seen is not None and ids:
            self._seen[row, list(ids)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits (B, V) -> token ids (B,). Raises TinyLMError if the first logits are NaN or infinite."""
        sampling = self.sampling
        logits = logits[:, : self._vocab_size].float()
        if not self._is_checked:
            _require_finite(logits)
            self._is_checked = True
        if self._seen is not None:
            logits = penalise_repeats(logits, self._seen, sampling.repeat_penalty)
        if sampling.temperature == 0:
            chosen = logits.argmax(dim=-1)
        else:
            # Subtracting the maximum avoids overflow at tiny temperatures; a divisor below 1e-30 could round to 0.
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


def _require_finite(logits: Tensor) -> None:
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):  # NaN is the maximum, too
        raise TinyLMError(
            "The model's logits are not finite numbers: some weights are too large for the number format of the "
            "computation. Try `dtype` fp32."
        )


def _stream_seed(seed: int, stream: int) -> int:
    """Mix both numbers by SplitMix64 (Steele et al. 2014), so that adjacent seeds and streams are independent."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + stream * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
