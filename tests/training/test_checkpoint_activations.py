"""Reference: the same model without checkpointing, to the bit. Whole runs are compared in test_run.py."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.variants import small
from tinylm.config.model import ModelConfig
from tinylm.jobs.masked.job import masked_token
from tinylm.jobs.pairs.job import sequence_to_sequence
from tinylm.machine.device import autocast
from tinylm.objectives.loss import next_token
from tinylm.text.batches import Batch
from tinylm.training.execution import checkpoint_activations
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_model

DROPOUT = {"dropout": 0.2, "attention_dropout": 0.2}
OBJECTIVES = {"decoder": next_token, "encoder": masked_token, "encoder-decoder": sequence_to_sequence}
BLOCKS: dict[str, dict[str, Any]] = {  # each kind of block
    "modern": {},
    "experts": {"experts": 4},
    "merged experts in parallel": {"experts": 3, "expert_mode": "merge", "parallel_residual": True},
    "local and relative": {"position": "relative", "local_window": 3, "local_layers": (0,)},
    "sandwich": {"norm_placement": "sandwich", "head_dim": 6, "activation": "geglu"},
    "encoder": {"architecture": "encoder"},
    "encoder-decoder": {"architecture": "encoder-decoder", "encoder_layers": 1},
}


def batch_for(config: ModelConfig, rows: int = 3) -> Batch:
    ids = torch.randint(config.vocab_size, (rows, config.context + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets, mask = ids[:, :-1], ids[:, 1:], ids[:, 1:] > 3
    if config.architecture == "encoder-decoder":
        return Batch(inputs, targets, mask, targets, torch.arange(config.context - rows + 1, config.context + 1))
    return Batch(inputs, targets, mask if config.architecture == "encoder" else None)


def losses_and_gradients(model: Transformer, config: ModelConfig, dtype: str = "fp32") -> list[Tensor | None]:
    """The loss, the load-balancing loss, and the gradient of each parameter."""
    torch.manual_seed(0)
    with autocast("cpu", dtype):
        loss = OBJECTIVES[config.architecture](model, batch_for(config))
    (loss.total + loss.aux).backward()
    return [loss.total.detach(), loss.aux.detach(), *(parameter.grad for parameter in model.parameters())]


COMPILED = (pytest.mark.slow, pytest.mark.filterwarnings("ignore"))  # the warnings of torch's compiler


@pytest.mark.parametrize(
    ("block", "dtype", "compiled"),
    [
        *((block, dtype, False) for block in BLOCKS for dtype in ("fp32", "bf16")),
        pytest.param("modern", "fp32", True, marks=COMPILED),
    ],
)
def test_losses_and_gradients_are_those_without_checkpointing(block: str, dtype: str, compiled: bool) -> None:
    """With dropout: the second pass has the same masks and number format. If the call of `checkpoint` were itself
    compiled, the gradients of compiled blocks would differ: its masks would be new ones."""
    config = small(**BLOCKS[block], **DROPOUT)
    plain = build_model(config, 0).train()
    checkpointed = copy.deepcopy(plain)
    checkpoint_activations(checkpointed)
    assert list(checkpointed.state_dict()) == list(plain.state_dict())
    found = []
    for model in (plain, checkpointed, copy.deepcopy(checkpointed)):  # the copy has its own parameters
        for layer in model.layers if compiled else ():
            layer.compile(backend="aot_eager")
        found.append(losses_and_gradients(model, config, dtype))
    for expected, *others in zip(*found, strict=True):
        assert all(other is expected is None or torch.equal(other, expected) for other in others)
    if compiled:
        torch.compiler.reset()


@pytest.mark.parametrize("block", ["modern", "experts", "sandwich"])
def test_only_the_inputs_of_blocks_are_stored(block: str) -> None:
    """The bytes that the blocks store for the backward pass, with one and with three blocks."""
    config = small(**BLOCKS[block])

    def stored(layers: int, checkpointed: bool) -> int:
        model = build_model(dataclasses.replace(config, layers=layers), 0).train()
        if checkpointed:
            checkpoint_activations(model)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.setdefault(x.data_ptr(), x), lambda x: x):
            model(batch_for(config).ids)
        return sum(x.untyped_storage().nbytes() for address, x in found.items() if address not in parameters)

    of_two_blocks = stored(3, True) - stored(1, True)
    inputs = 2 * 4 * batch_for(config).ids.numel() * config.width
    routing = 0 if config.experts == 1 else 2 * batch_for(config).ids.numel() * (4 * config.experts + 24)
    assert 0 < of_two_blocks <= inputs + 2 * routing
    assert of_two_blocks < (stored(3, False) - stored(1, False)) / 3


def test_evaluation_computes_each_block_once() -> None:
    config = small()
    model = build_model(config, 0)
    checkpoint_activations(model)
    calls = []
    model.layers[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(batch_for(config).ids)
    assert len(calls) == 1
    losses_and_gradients(model, config)
    assert len(calls) == 3
