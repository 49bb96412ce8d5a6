"""Logits and gradients on a device, compared with those of the same model and batch on the CPU in fp32."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor
from training_step import random_batch

from tinylm.device import autocast
from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.model_config import ModelConfig
from tinylm.objectives.loss import next_token
from tinylm.text.batches import Batch

BOUNDS = {"fp32": 1e-3, "bf16": 0.1}  # of `relative_difference`


class Differences(NamedTuple):
    """Relative differences of the logits, and of the gradient of the parameter for which it is largest."""

    logits: float
    gradient: float
    parameter: str


def differences(config: ModelConfig, rows: int, device: str, dtype: str) -> Differences:
    """Compare a model with random weights on a device with its copy on the CPU in fp32, on a batch of random ids."""
    model, batch = random_model(config), random_batch(config, rows)
    expected_logits, expected = logits_and_gradients(copy.deepcopy(model), batch, "cpu", "fp32")
    logits, gradients = logits_and_gradients(model, batch, device, dtype)
    of_gradients = {name: relative_difference(gradients[name], expected[name]) for name in expected}
    worst = max(of_gradients, key=of_gradients.__getitem__)
    return Differences(relative_difference(logits, expected_logits), of_gradients[worst], worst)


def random_model(config: ModelConfig) -> Decoder:
    """A model whose matrices are all random: those that begin as zeros would make gradients zero."""
    model, generator = build_model(config, 0), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    return model


def logits_and_gradients(model: Decoder, batch: Batch, device: str, dtype: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of a batch, and the gradient of its mean loss by parameter name, both on the CPU."""
    model, batch = model.to(device), batch.to(torch.device(device))
    with autocast(device, dtype):
        with torch.no_grad():
            logits = model.logits(model(batch.ids).hidden)
        loss = next_token(model, batch).total / batch.n_targets
    loss.backward()
    return logits.float().cpu(), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||"""
    return float((found - expected).norm() / expected.norm())
