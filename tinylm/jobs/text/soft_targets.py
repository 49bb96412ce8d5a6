"""Soft targets: what a teacher predicts at each position of a text (Hinton et al. 2015), computed before training.

A model that reads the text many times learns from them at the cost of two evaluations of the text.
"""

from collections.abc import Callable
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
def predict(teacher: Decoder, tokens: Tokens, context: int, dtype: str, check: Callable[[], None]) -> SoftTargets:
    """The teacher's distribution at each position but the last, after at least half a context where the text has so
    many tokens before it.

    tokens: (N,). dtype: of autocast. check: called after each batch; may raise an exception
    """
    count = min(SOFT_CANDIDATES, teacher.vocab_size)
    ids = np.zeros((len(tokens), count), np.min_scalar_type(teacher.vocab_size))
    probabilities = np.zeros((len(tokens), count), np.float16)
    rows = min(default_batch_size(context), MAX_LOGITS // (context * teacher.vocab_size))
    done = 0
    for batch in evaluation_batches(tokens, context, max(1, rows), max(1, context // 2)):
        check()
        batch = batch.to(teacher.device)
        with evaluation_mode(teacher), autocast(teacher.device.type, dtype):
            hidden = decoder_output(teacher, batch).hidden.flatten(0, 1)  # (B*T, D)
            scored = hidden if batch.mask is None else hidden[batch.mask.flatten()]  # (M, D)
            best = log_softmax(teacher.logits(scored)).topk(count)  # (M, K)
        found = slice(done, done + len(scored))
        ids[found] = best.indices.cpu().numpy()
        probabilities[found] = best.values.exp().half().cpu().numpy()
        done = found.stop
    return SoftTargets(ids, probabilities)
