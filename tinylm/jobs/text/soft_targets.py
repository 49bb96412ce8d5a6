"""Soft targets: what teachers predict at each position of a text (Hinton et al. 2015), computed before training.

A model that reads the text many times learns from them at the cost of one pass of each teacher.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinylm.evaluation.loop import default_batch_size, evaluation_mode
from tinylm.machine.device import autocast
from tinylm.objectives.loss import MAX_LOGITS, decoder_output
from tinylm.planning.recipes import SOFT_CANDIDATES
from tinylm.text.batches import evaluation_batches
from tinylm.text.token_files import Tokens
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.layers import log_softmax


class SoftTargets(NamedTuple):
    """The likeliest next ids at each position of a text of N tokens, by decreasing probability, and these.

    ids, probabilities: (N, K), in float16; the last row is empty
    """

    ids: np.ndarray
    probabilities: np.ndarray

    def at(self, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
        """The ids and the probabilities, in int64 and fp32, of windows: (B,) -> (B, length, K) of each."""
        positions = starts[:, None] + np.arange(length)
        return torch.from_numpy(self.ids[positions]).long(), torch.from_numpy(self.probabilities[positions]).float()


@torch.no_grad()
def predict(
    teachers: Sequence[Decoder], tokens: Tokens, context: int, dtype: str, check: Callable[[], None]
) -> SoftTargets:
    """The mean of the teachers' distributions at each position but the last, after at least half a context where the
    text has so many tokens before it.

    tokens: (N,). dtype: of autocast. check: called after each batch; may raise an exception
    """
    count = min(SOFT_CANDIDATES, min(teacher.vocab_size for teacher in teachers))
    ids = np.zeros((len(tokens), count), np.min_scalar_type(teachers[0].vocab_size))
    probabilities = np.zeros((len(tokens), count), np.float16)
    done = 0
    rows = min(default_batch_size(context), MAX_LOGITS // (context * teachers[0].vocab_size))
    for batch in evaluation_batches(tokens, context, max(1, rows), max(1, context // 2)):
        check()
        total: Tensor | float = 0.0
        for teacher in teachers:
            with evaluation_mode(teacher), autocast(teacher.device.type, dtype):
                part = batch.to(teacher.device)
                hidden = decoder_output(teacher, part).hidden.flatten(0, 1)  # (B*T, D)
                scored = hidden if part.mask is None else hidden[part.mask.flatten()]  # (M, D)
                total = total + log_softmax(teacher.logits(scored)).exp() / len(teachers)  # (M, V)
        assert isinstance(total, Tensor)
        best = total.topk(count)
        rows = slice(done, done + len(total))
        ids[rows], probabilities[rows] = best.indices.cpu().numpy(), best.values.half().cpu().numpy()
        done = rows.stop
    return SoftTargets(ids, probabilities)
