"""Small random models of transformers whose configs together use every setting of the families that tinylm reads, and
edits of the files that they are saved in.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from tinylm.formats.family import ForeignModel
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_empty_model

VOCABULARY = 300  # 8 more than the ids of the tokenizer
CONTEXT = 64
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
TEXT = "the bee who sees the moon in the sea sings to her; no one hears, and soon the day is here again.\n" * 3

IDS = {"bos_token_id": 0, "eos_token_id": 1}
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 2,
    **IDS,
}
NEOX = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
GPT2 = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_embd": 32, "n_layer": 3, "n_head": 4, **IDS}
THETA = {"rope_type": "default", "rope_theta": 700.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.4}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 90_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
LOCAL_THETA = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
MIXED = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
BIASES = {"attention_bias": True, "mlp_bias": True}

# By name, which begins with the model_type: the settings that differ from the small config.
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt2 untied, exact GELU, narrow": {"activation_function": "gelu", "n_inner": 40, "tie_word_embeddings": False},
    "gpt2 ReLU, unscaled attention, epsilon": {
        "activation_function": "relu",
        "scale_attn_weights": False,
        "layer_norm_epsilon": 1e-3,
    },
    "llama": {},
    "llama tied, theta, epsilon": {"tie_word_embeddings": True, "rope_parameters": THETA, "rms_norm_eps": 1e-3},
    "llama with biases, head_dim, GELU": {**BIASES, "head_dim": 12, "hidden_act": "gelu"},
    "llama 3 scaling": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}, "head_dim": 32},
    "llama linear scaling, multi-head, biases": {"rope_parameters": LINEAR, "num_key_value_heads": 4, **BIASES},
    "llama yarn scaling": {"rope_parameters": YARN},
    "llama yarn with mscale": {"rope_parameters": MSCALE},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "mistral with a window": {"sliding_window": 7},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2 with windows in the last layers": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3 with biases, windows by layer, yarn": {
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        **MIXED,
        "rope_parameters": YARN,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral with a window, one expert of three": {
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "sliding_window": 9,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "head_dim": 16},
    "qwen3_moe without normalised routing, windows": {
        **EXPERTS,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 8,
    },
    "gpt_neox": {},
    "gpt_neox sequential, full RoPE": {
        "use_parallel_residual": False,
        "rope_parameters": {**THETA, "partial_rotary_factor": 1.0},
    },
    "gpt_neox without attention biases, half RoPE, tanh GELU, tied": {
        "attention_bias": False,
        "rope_parameters": {**THETA, "partial_rotary_factor": 0.5},
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-3,
        "tie_word_embeddings": True,
    },
    "gemma": {"head_dim": 16},
    "gemma with legacy activation, untied": {
        "head_dim": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "gemma3_text": {"head_dim": 16, **MIXED},
    "gemma3_text with scaling, scalar, pattern": {
        "head_dim": 16,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "rope_parameters": GEMMA3_ROPE,
        "attention_bias": True,
    },
    "gemma3_text as published": {
        "head_dim": 16,
        "num_hidden_layers": 7,
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {**GEMMA3_ROPE, **LOCAL_THETA},
    },
}
BASES = {name.split()[0]: SMALL for name in CASES} | {"gpt2": GPT2, "gpt_neox": NEOX}


def make_peer(case: str) -> Any:
    """The model of a case in fp32. All parameters are random, also those that transformers initialises to constants."""
    kind = case.split()[0]
    config = transformers.AutoConfig.for_model(kind, **{**BASES[kind], **CASES[case]})
    torch.manual_seed(sum(map(ord, case)))
    peer = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name and not kind.startswith("gemma") else 0.0, std=0.2)
    return peer


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of 292 ids that puts <s> before each text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - 8,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, 0)]
    )
    return tokenizer


TEMPLATE = "{% for message in messages %}{{ message.content }}</s>{% endfor %}"


def save_tokenizer(folder: Path) -> None:
    """The files of the tokenizer, as transformers writes them, with a chat template."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(), bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def save_peer(case: str, folder: Path, **options: Any) -> Any:
    """Save the model of a case with a tokenizer in a folder, and return it."""
    peer = make_peer(case)
    peer.save_pretrained(folder, **options)
    save_tokenizer(folder)
    return peer


def ids(length: int, rows: int = 2) -> torch.Tensor:
    """Random token ids, always the same: (rows, length)."""
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))


def edit_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON object in a file; `...` removes one."""
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def load(model: ForeignModel) -> Decoder:
    """The decoder with the imported weights in its parameters, without a copy."""
    decoder = build_empty_model(model.config)
    decoder.load_state_dict(dict(model.tensors), assign=True)
    assert isinstance(decoder, Decoder)
    return decoder.eval()


def in_hub(cache: Path, folder: Path, name: str) -> Path:
    """Lay a model folder into a cache of huggingface_hub as OWNER/NAME; returns the folder of its snapshot."""
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text("0123")
    shutil.copytree(folder, root / "blobs")
    (root / "snapshots/0123").mkdir(parents=True)
    for file in folder.iterdir():
        (root / "snapshots/0123" / file.name).symlink_to(Path("../../blobs") / file.name)
    return root / "snapshots/0123"
