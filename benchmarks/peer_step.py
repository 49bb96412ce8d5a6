"""One step of a plain training loop for the peers, and nanoGPT's model."""

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from torch import Tensor, nn

from tinylm.device import autocast
from tinylm.model_config import ModelConfig


def peer_step(
    peer: nn.Module, loss: Callable[[], Tensor], dtype: str, fused: bool, device: str = "cpu"
) -> Callable[[], object]:
    """A training step of a peer in training mode. loss: computes the loss. fused: use fused AdamW."""
    peer.train()
    optimizer = torch.optim.AdamW(peer.parameters(), fused=True if fused else None)

    def step() -> None:
        with autocast(device, dtype):
            nats = loss()
        nats.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def build_nanogpt(path: Path, config: ModelConfig) -> nn.Module:
    """The GPT class of nanoGPT's model.py without dropout, and with biases, which are its default."""
    spec = spec_from_file_location("nanogpt", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = {"n_layer": config.layers, "n_head": config.heads, "n_embd": config.width, "dropout": 0.0}
    return module.GPT(module.GPTConfig(block_size=config.context, vocab_size=config.vocab_size, **shape))
