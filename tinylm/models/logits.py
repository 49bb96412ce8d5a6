"""The logits of two models compared, to check what a merge or an export has written."""

import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.transformer.architectures import Transformer

# Relative to the largest absolute logit, or to 1 if that is larger. A merged or exported model adds the same fp32
# products in another order, which moves logits by about 1e-6 of the largest one; a wrong matrix moves them far more.
TOLERANCE = 1e-4


@torch.inference_mode()
def probe_logits(model: Transformer) -> Tensor:
    """The logits (B, T, V) of a fixed batch of random tokens. Switches the model to evaluation mode."""
    model.eval()
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (4, min(64, model.context)), generator=rng)
    return model.logits(model.probe(ids).hidden)


def logit_difference(logits: Tensor, expected: Tensor) -> float:
    """The largest absolute difference between two models' logits; NaN if one of them is."""
    return (logits - expected).abs().max().item()


def require_equal_logits(logits: Tensor, expected: Tensor, what: str, undone: str) -> float:
    """The `logit_difference`. Raises TinyLMError for one above TOLERANCE or NaN.

    what: whose logits they are, for the message. undone: what has not been done then, such as "written"
    """
    difference = logit_difference(logits, expected)
    if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
        raise TinyLMError(f"The logits of {what} differ by {difference:.2e}; nothing was {undone}.")
    return difference
