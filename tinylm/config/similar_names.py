"""The names that a user may mean by an unknown one, for options on the command line and settings in Python."""

import difflib
from collections.abc import Collection, Iterable, Mapping

MAX_SUGGESTIONS = 3
NEARNESS = 0.75  # of similar names, as difflib measures it

# Names in nanoGPT, transformers, PEFT, litgpt, mlx-lm, llama.cpp and ollama, by the option of tinylm.
OTHER_OPTIONS = {
    "adapter": "adapter-path adapters lora lora-adapter peft-model",
    "activation": "act hidden-act activation-function nonlinearity",
    "alpha": "lora-alpha",
    "attention-dropout": "attn-dropout attn-pdrop",
    "baselines": "baseline gzip",
    "batch-size": "batch bs bsz n-batch global-batch-size train-batch-size eval-batch-size",
    "beams": "num-beams beam beam-size beam-width",
    "beta1": "adam-beta1",
    "beta2": "adam-beta2",
    "checkpoint-activations": "gradient-checkpointing grad-checkpoint activation-checkpointing",
    "compile": "torch-compile",
    "context": "block-size n-ctx ctx ctx-size ctx-len num-ctx context-size context-window max-seq-len max-seq-length "
    "seq-len n-positions max-position-embeddings",
    "device": "gpu cuda accelerator n-gpu-layers",
    "dropout": "lora-dropout resid-pdrop",
    "dtype": "precision torch-dtype outtype mixed-precision fp16 bf16",
    "epochs": "num-epochs n-epochs max-epochs num-train-epochs",
    "eval-every": "eval-interval eval-steps steps-per-eval val-every",
    "experts": "num-experts n-experts num-local-experts",
    "experts-per-token": "num-experts-per-tok",
    "ffn-width": "d-ff intermediate-size ffn-dim mlp-dim n-inner",
    "force": "overwrite overwrite-output-dir",
    "format": "data-format dataset-format",
    "grad-clip": "clip clip-grad max-norm max-grad-norm gradient-clip-val",
    "heads": "n-head n-heads num-heads num-attention-heads",
    "init-from": "model base-model model-path model-name-or-path pretrained checkpoint weights",
    "kv-heads": "n-kv-head n-kv-heads num-kv-heads num-key-value-heads",
    "layers": "n-layer n-layers num-layers num-hidden-layers depth",
    "log-every": "log-interval logging-steps steps-per-report",
    "log-to": "report-to wandb tensorboard",
    "lr": "learning-rate max-lr peak-lr",
    "max-tokens": "max-new-tokens max-length max-len length n-predict num-predict num-tokens max-output-tokens",
    "micro-batch": "micro-batch-size per-device-train-batch-size device-batch-size",
    "min-lr": "min-learning-rate final-lr",
    "model": "model-path model-name model-name-or-path base-model checkpoint checkpoint-dir ckpt ckpt-path run",
    "norm": "norm-type normalization",
    "num-samples": "n-samples samples count num-return-sequences num-sequences",
    "optimizer": "optim opt",
    "out": "output output-dir output-path out-dir outfile save-dir save-path adapter-path",
    "parallel": "ddp fsdp strategy",
    "patience": "early-stopping early-stopping-patience",
    "position": "positional-encoding position-embedding pos-encoding",
    "preset": "arch model-type",
    "prompt": "text input start",
    "prompt-file": "file input-file prompts",
    "quantize": "quantization quant load-in-8bit int8",
    "rank": "lora-r lora-rank r",
    "repeat-penalty": "repetition-penalty rep-penalty",
    "resume": "resume-from resume-from-checkpoint continue",
    "rope-theta": "rope-base rope-freq-base",
    "save-every": "save-interval save-steps checkpoint-interval",
    "schedule": "scheduler lr-schedule lr-scheduler lr-scheduler-type",
    "seed": "random-seed rng-seed manual-seed random-state",
    "sequence-length": "block-size max-seq-len max-seq-length seq-len context",
    "steps": "iters max-iters num-iters iterations max-steps num-steps train-steps",
    "stop": "stop-sequence stop-sequences stop-string stop-words reverse-prompt eos",
    "system": "system-prompt sys",
    "target": "target-modules lora-target lora-layers",
    "temperature": "temp",
    "text-key": "text-column text-field dataset-text-field column field",
    "tie": "tie-weights tie-word-embeddings",
    "time": "max-time time-limit duration minutes max-seconds",
    "to": "format",
    "tokenizer": "tokenizer-path tokenizer-name tokeniser",
    "train-on": "mask-prompt train-on-inputs completion-only",
    "val-data": "validation-data eval-data val-file validation-file valid",
    "val-fraction": "val-split validation-split val-ratio test-size",
    "vocab-size": "n-vocab vocab num-embeddings",
    "warmup-steps": "warmup warmup-iters num-warmup-steps lr-warmup-steps",
    "weight-decay": "wd",
    "width": "n-embd n-embed d-model hidden-size hidden-dim embed-dim embedding-size dim",
}


def known_names(table: Mapping[str, str], name: str) -> list[str]:
    """The entries of a table of other names that have this one."""
    return [ours for ours, others in table.items() if name in others.split()]


def suggest_options(name: str, options: list[str]) -> list[str]:
    """Those of the options, without dashes, that a user may mean by an option `name` that is not among them."""
    name = name.lstrip("-").replace("_", "-").lower()
    known = [option for option in known_names(OTHER_OPTIONS, name) if option in options]
    begun = [option for option in options if option.startswith(name)]
    found = known or (begun if len(begun) <= MAX_SUGGESTIONS else [])
    return found or difflib.get_close_matches(name, options, MAX_SUGGESTIONS, NEARNESS)


def require_settings(names: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for names that are not among the known settings of a function, with those that may be meant."""
    unknown = []
    for name in sorted(set(names) - set(known)):
        options = suggest_options(name, [setting.replace("_", "-") for setting in known])
        meant = " or ".join(option.replace("-", "_") for option in options)
        unknown.append(f"{name} (did you mean {meant}?)" if meant else name)
    if unknown:
        raise TypeError(f"unknown settings: {', '.join(unknown)}")
