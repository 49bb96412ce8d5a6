"""LoRA adapters with random values, made and saved by PEFT, and adapters loaded by PEFT."""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from tests.formats.peers import ids

TOKENS = ids(24)


def make_adapter(peer: Any, folder: Path, **fields: Any) -> Tensor:
    """Save an adapter of the peer, all of whose trainable parameters differ from the start, and return its logits."""
    config = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 5, "init_lora_weights": False, "task_type": "CAUSAL_LM", **fields}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied layers, saved embeddings, and fan_in_fan_out
        model = peft.get_peft_model(peer, config).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    noise = torch.randn_like(parameter) * 0.2
                    parameter.copy_(noise if "lora_" in name else parameter + noise)
        model.save_pretrained(str(folder))
    return peer_logits(model)


def in_peft(base: Any, folder: Path) -> Any:
    """The base with the adapter in a folder, of which every tensor has its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied layers, fan_in_fan_out, and PEFT's use of transformers
        warnings.filterwarnings("error", message=".*(missing|unexpected) adapter keys")
        return peft.PeftModel.from_pretrained(base, folder).eval()


@torch.no_grad()
def peer_logits(peer: Any) -> Tensor:
    """The logits of `TOKENS`."""
    return peer(TOKENS).logits
