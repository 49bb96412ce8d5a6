"""The peer: GPT-2 of `transformers` with the shape and the weights of a tinylm model of preset gpt2.

The logits of both are compared before any measurement, so that speeds are compared for the same computation.
transformers is installed by `pip install -e '.[bench]'`.
"""

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tinylm.model.build import build_model
from tinylm.model.decoder import Decoder
from tinylm.model_config import ModelConfig

TOLERANCE = 1e-4

# GPT-2's GELU with the tanh approximation: as separate operations (transformers' default), and as one kernel.
PLAIN_GELU, FUSED_GELU = "gelu_new", "gelu_pytorch_tanh"


def build_pair(config: ModelConfig, seed: int = 0) -> tuple[Decoder, GPT2LMHeadModel]:
    """A tinylm model of preset gpt2 and its peer, both in evaluation mode.

    Every weight is perturbed, so that biases (initialised with 0) and gains (with 1) affect the compared logits.
    """
    model = build_model(config, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model, build_peer(config, model)


def build_peer(config: ModelConfig, model: Decoder, gelu: str = PLAIN_GELU) -> GPT2LMHeadModel:
    """transformers' GPT-2 with the weights of `model`, without dropout like tinylm's presets.

    Raises AssertionError if a logit differs by more than TOLERANCE.
    """
    shape = GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        n_inner=config.ffn_width,
        activation_function=gelu,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    peer = GPT2LMHeadModel(shape).eval()
    peer.loss_type = "ForCausalLM"  # the default of transformers, which otherwise prints a warning
    peer.load_state_dict(peer_weights(model))
    ids = torch.randint(config.vocab_size, (2, config.context), generator=torch.Generator().manual_seed(0))
    assert_same_logits(model, peer, ids)
    return peer


def peer_weights(model: Decoder) -> dict[str, Tensor]:
    """The weights by transformers' names. Its Conv1D stores a matrix as (in, out), and q, k and v as one matrix."""
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    weights = {
        "transformer.wte.weight": own["embedding.weight"],
        "transformer.wpe.weight": own["position.weight"],
        "transformer.ln_f.weight": own["norm.weight"],
        "transformer.ln_f.bias": own["norm.bias"],
        "lm_head.weight": own["embedding.weight"],
    }
    for number in range(len(model.layers)):
        ours, theirs = f"layers.{number}", f"transformer.h.{number}"
        for kind in ("weight", "bias"):
            weights |= {
                f"{theirs}.ln_1.{kind}": own[f"{ours}.attention_norm.{kind}"],
                f"{theirs}.ln_2.{kind}": own[f"{ours}.feedforward_norm.{kind}"],
                f"{theirs}.attn.c_attn.{kind}": torch.cat(
                    [own[f"{ours}.attention.{p}_proj.{kind}"] for p in "qkv"]
                ).t(),
                f"{theirs}.attn.c_proj.{kind}": own[f"{ours}.attention.o_proj.{kind}"].t(),
                f"{theirs}.mlp.c_fc.{kind}": own[f"{ours}.feedforward.up_proj.{kind}"].t(),
                f"{theirs}.mlp.c_proj.{kind}": own[f"{ours}.feedforward.down_proj.{kind}"].t(),
            }
    return weights


@torch.inference_mode()
def assert_same_logits(model: Decoder, peer: GPT2LMHeadModel, ids: Tensor) -> None:
    """Raises AssertionError if a logit differs by more than TOLERANCE."""
    torch.testing.assert_close(model.logits(model(ids).hidden), peer(ids).logits, rtol=0, atol=TOLERANCE)
