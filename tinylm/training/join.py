"""Models of the same architecture side by side, as one model that is as many times as wide.

A hidden vector of the joined model is those of its members, one after the other. Its matrices are block-diagonal and
its heads are those of the members, so that these do not mix, and its logits are the mean of theirs: the joined model
predicts about as well as an ensemble of its members, and is an ordinary model. Only its norms differ from theirs, as
they divide by the root mean square of the whole vector and have one gain for the queries, or keys, of all heads.
`fit_norms` makes up for that.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.machine.device import autocast
from tinylm.planning.recipes import JOIN_STEPS
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_empty_model

FIT_LR, FIT_WARMUP = 0.1, 5  # of Adam, for gains of about 1; steps


def join_weights(members: Sequence[Mapping[str, Tensor]], number: int) -> dict[str, Tensor]:
    """The weights of `number` models side by side; the ones after `members` have only zeros."""
    zeros = {name: torch.zeros_like(tensor) for name, tensor in members[0].items()}
    weights = [*members, *[zeros] * (number - len(members))]
    return {name: _join_tensors(name, [of[name] for of in weights], len(members)) for name in zeros}


def _join_tensors(name: str, tensors: list[Tensor], count: int) -> Tensor:
    """The joined tensor of a name. tensors: those of all members. count: of the first ones, which are not zero"""
    *_, layer, kind = name.split(".")
    if layer in ("q_norm", "k_norm"):
        return torch.stack(tensors[:count]).mean(dim=0)
    if layer in ("embedding", "output"):
        return torch.cat(tensors, dim=1)
    if layer.endswith("norm"):
        # The mean square is that of all members, and the logits are the mean of those that are not zero.
        root = math.sqrt(count / len(tensors)) if kind == "weight" else 1.0
        return torch.cat(tensors) * (root / count if layer == "norm" else root)
    return torch.cat(tensors) if kind == "bias" else torch.block_diag(*tensors)


def join_models(
    members: Sequence[Decoder],
    config: ModelConfig,
    number: int,
    batches: Iterable[Tensor],
    dtype: str,
    check: Callable[[], None],
) -> Decoder:
    """`number` models side by side, with the configuration `config`, which predict about the mean of the `members`.

    members: on one device, in evaluation mode; at most `number`
    batches: ids (B, T) of the text, for JOIN_STEPS steps
    dtype: of autocast. check: called before each step; may raise an exception
    """
    joined = build_empty_model(config)
    assert isinstance(joined, Decoder)
    joined.load_state_dict(join_weights([member.state_dict() for member in members], number), assign=True)
    joined.eval()
    if len(members) > 1:
        fit_norms(joined, members, batches, dtype, check)
    return joined


def fit_norms(
    joined: Decoder, members: Sequence[Decoder], batches: Iterable[Tensor], dtype: str, check: Callable[[], None]
) -> None:
    """Train the gains of the norms of `joined`, in place, so that it predicts the mean of the `members`: with Adam, on
    the cross-entropy with their mean distribution. Arguments: see `join_models`.
    """
    joined.requires_grad_(False)
    gains = [weight.requires_grad_() for name, weight in joined.named_parameters() if name.endswith("norm.weight")]
    optimizer = torch.optim.Adam(gains, betas=(0.9, 0.99))
    for step, ids in enumerate(batches):
        check()
        ids = ids.to(joined.device)
        with torch.no_grad(), autocast(joined.device.type, dtype):
            target = sum(member.logits(member(ids).hidden).float().softmax(-1) for member in members) / len(members)
        with autocast(joined.device.type, dtype):
            log_p = joined.logits(joined(ids).hidden).float().log_softmax(-1)
        loss = -(target * log_p).sum(-1).sum()  # a sum: in fp16, gradients of a mean may vanish; Adam has no scale
        optimizer.param_groups[0]["lr"] = FIT_LR * min(1, (step + 1) / FIT_WARMUP) * (1 - step / JOIN_STEPS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    joined.requires_grad_(True)
