"""The fitted constants of planning that do not belong to a single job; the other files of this package have none.

Each row names the decision in docs/decisions/ that measured it or the publication it is from, or says "not measured".
An epoch is one pass over the training text.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Recipes: how each preset and each kind of adapter is trained.

LR_BASE_WIDTH = 128  # the model width at which the learning rates below were measured


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The defaults of one kind of training.

    lr, lr_exponent: the peak learning rate is lr * (LR_BASE_WIDTH / width) ** lr_exponent
    settings: fields of TrainingConfig; without `min_lr`, it is the peak learning rate divided by MIN_LR_DIVISOR
    """

    lr: float
    lr_exponent: float
    settings: Mapping[str, Any]


ADAPTER_SETTINGS = {"schedule": "linear", "beta2": 0.99, "warmup": 0.05, "min_lr": 0.0, "weight_decay": 0.0}
RECIPES = {
    # Decisions 008 (Muon), 012, and 033 (momentum). The weight decay follows from the number of epochs: see below.
    "modern": Recipe(
        lr=6e-3,
        lr_exponent=0.5,
        settings={
            "schedule": "linear",
            "optimizer": "muon",
            "momentum": 0.9,
            "beta2": 0.99,
            "warmup": 0.02,
            "min_lr": 0.0,
        },
    ),
    # The learning rate of nanoGPT's character-level model: 0.001 at a width of 384.
    "gpt2": Recipe(lr=3e-3, lr_exponent=1.0, settings={"schedule": "cosine", "beta2": 0.99, "warmup": 0.05}),
    # Vaswani et al. 2017, section 5.3, with a warmup in proportion to the run; learning rate and warmup: not measured.
    "original": Recipe(
        lr=1e-3,
        lr_exponent=1.0,
        settings={
            "schedule": "inverse-sqrt",
            "optimizer": "adam",
            "beta2": 0.98,
            "epsilon": 1e-9,
            "warmup": 0.1,
            "weight_decay": 0.0,
            "min_lr": 0.0,
        },
    ),
    # Decision 022. For LoRA, `lr` is for rank * scale = LORA_ALPHA; it is proportional to (rank * scale)^-0.5.
    "lora": Recipe(lr=1e-2, lr_exponent=0.5, settings=ADAPTER_SETTINGS),
    "bottleneck": Recipe(lr=2e-2, lr_exponent=0.5, settings=ADAPTER_SETTINGS),
}
LORA_ALPHA = 16.0  # decision 022
MAX_ADAPTER_LR_FACTOR = 2.0  # decision 022: largest learning rate of an adapter, as a multiple of its recipe's `lr`
MIN_LR_DIVISOR = 10  # Brown et al. 2020: the learning rate ends at a tenth of its peak

# Preset modern: weight decay (also where training is continued) and output layer (only of new models).

WEIGHT_DECAY_PER_EPOCH = 0.12  # decision 014
MIN_WEIGHT_DECAY, MAX_WEIGHT_DECAY = 0.1, 3.0  # decision 014
WEIGHT_DECAY_LIMIT = (1.0, 0.1)  # decision 014: upper limit = first + second x parameters per token
UNTIED_MAX_TOKENS = 2_500_000  # decision 019: a decoder trained on more tokens ties the output layer to the embedding
UNTIED_MAX_VOCABULARY = 4096  # decision 019: a decoder with a larger vocabulary is tied as well

# Dropout of new models.


@dataclass(frozen=True)
class DropoutRule:
    """Dropout is per_epoch x epochs x parameters per training token, at most `maximum`, and below `minimum` 0.

    Little dropout is left out, since its gain is not worth the time that it takes.
    """

    per_epoch: float
    minimum: float
    maximum: float


DROPOUT = DropoutRule(per_epoch=1 / 1500, minimum=0.04, maximum=0.2)  # decision 014; preset modern

# The context of a new model on examples of different lengths. Those that need more than this multiple of the quantile
# do not lengthen it (`fitting_context`): they are left out or cut.

MIN_CONTEXT, CONTEXT_MULTIPLE = 128, 32  # not measured
CONTEXT_QUANTILE, CONTEXT_FACTOR = 0.99, 2  # not measured

# Length of a run without a budget; also the training time assumed for a budget in steps or epochs.

DEFAULT_SECONDS = 600.0  # not measured
DEFAULT_PATIENCE = 10  # evaluations; not measured
# Decision 043: with less validation data, the loss does not show which weights are better.
MIN_VALIDATION_RECORDS = 20
MIN_EVALUATION_TARGETS = 100  # docs/other-objectives.md, "Labels"
MIN_VALIDATION_TOKENS = 640  # of a continuous text
# Without a chosen budget, where validation cannot end the run: decisions 043 (passes) and 046 (steps of short texts).
UNVALIDATED_EPOCHS, UNVALIDATED_STEPS = 40, 500

# Size of the model: the largest that gets enough training tokens per parameter.

TOKENS_PER_PARAMETER = 1.8  # decision 018
# A base model with a context above LONG_CONTEXT is trained further on shorter sequences; not measured.
LONG_CONTEXT, SEQUENCE_LENGTH = 1024, 512
MAX_USEFUL_EPOCHS = 40  # not measured: tokens of later epochs do not count, since a larger model would overfit

# Sequence length warmup: the fewest tokens of a sequence.

MIN_GROWING_LENGTH = 64  # decision 037

# Multi-token prediction: its weight in new decoders of plain text with at most this vocabulary.

MTP_WEIGHT = 0.5  # decision 039
MTP_MAX_VOCABULARY = 1024  # decision 039

# BPE-dropout where a text is seen often: its probability in new decoders of plain text.

BPE_DROPOUT = 0.3  # decision 044
BPE_DROPOUT_MIN_EPOCHS = 30  # decision 044

# Weight averages where a text is seen often, and the learning rate at the end of such a run, as a part of its peak.

AVERAGE = 0.05  # decision 006
AVERAGE_MIN_EPOCHS = 6  # decision 006
AVERAGE_MIN_LR_DIVISOR = 7  # decision 006

# Generations where a text is seen often: passes of each, their number, and the soft targets per position.

GENERATION_EPOCHS, MAX_GENERATIONS = 6, 8  # decision 051
JOINED, MAX_JOINED_PARAMETERS = 4, 1 << 25  # decision 052
MAX_WORSE = 0.1  # of the lowest loss: worse generations are not joined (decision 052)
MAX_JOIN_SHARE = 0.1  # of a budget of time, the most that joining may be planned to take; not measured
JOIN_STEPS, JOIN_ROWS, JOIN_LENGTH = 40, 2, 256  # that fit the norms of joined models: steps, and their batch
SOFT_CANDIDATES = 64  # decision 051
SOFT_TARGET_SHARE = 0.25  # of the free memory, the most that they may take; not measured

# Batch size.

TOKENS_PER_STEP = {  # minimum and maximum
    "cpu": (1024, 2048),  # decisions 012 and 018
    "gpu": (8192, 65_536),  # not measured
}
MUON_TOKENS_PER_WIDTH = 8  # decision 012: raises the upper limit of tokens per step in wide models
TARGET_STEPS = 1500  # decision 018: steps that a run should have if its budget allows them
MUON_TARGET_STEPS = 800  # decision 018: the same for Muon with a budget in time

# Evaluation, saving, logging and compiling.

EVALUATIONS = 12  # in a run, or one per MIN_EVALUATION_SECONDS if those are fewer; not measured
MIN_EVALUATION_SECONDS = 1.0  # of training between two evaluations; not measured
# Of the training time, with as many tokens as there is time for, and with MIN_EVALUATION_TOKENS; not measured.
EVALUATION_SHARE, MAX_EVALUATION_SHARE = 0.05, 0.1
MIN_EVALUATION_TOKENS, MAX_EVALUATION_TOKENS = 20_000, 1_000_000  # not measured
# Where MIN_EVALUATION_TOKENS take too long: so many evaluations with fewer tokens, down to the second, then fewer.
MIN_EVALUATIONS, MIN_SLOW_EVALUATION_TOKENS = 4, 2048  # not measured
MAX_SAVE_SECONDS = 60.0  # between two saves; not measured
LOGS, MAX_LOG_STEPS = 100, 100  # log lines per run, and maximum number of steps between them; not measured
# Training time from which the 45 s of compiling pay off; decisions 018 and 037.
MIN_SECONDS_TO_COMPILE = {"fp32": 1200.0, "bf16": 600.0, "fp16": 600.0}

# Cost of a step: see plan_request.py. The CPU's figures were measured on two cores of an EPYC for widths of 96 to 384.

MATMUL_EFFICIENCY = {"cpu": 0.75, "gpu": 0.35}  # share of the machine's matmul rate; gpu: not measured
# Per token and layer besides matmuls, on one CPU core, if the layer time was not measured; gpu: not measured.
OTHER_SECONDS = {"cpu": 9e-6, "gpu": 5e-8}
MIN_OTHER_SHARE = 0.1  # of the time of a layer; not measured
# Decision 053, where the time of a layer was measured: the share of its other time that is in proportion to the width;
# logits of a token that take the other time of a measured layer; and the other time of Muon for a parameter, as a share
# of that of a layer for a token and a hidden unit.
WIDTH_SHARE, LOGITS_PER_LAYER, MUON_SHARE = 0.85, 1800, 0.08
EVALUATION_SPEEDUP = 2.0  # tokens per second of evaluation divided by those of training; not measured

# Memory: see memory.py. Decision 030; not measured on a GPU.

MEMORY_SHARE = 0.7  # of the free memory that a plan may use; not measured
MEMORY_ERROR = 0.15  # of the estimate: a run is refused if (1 - this) * estimate exceeds the free memory
MIN_COPIED_SAVE = 64 << 20  # bytes: smaller saves are not written in the background (decision 003)
PROCESS_BYTES = {"cpu": 330_000_000, "gpu": 0}  # of a process that has imported torch, on the device that trains
COMPILER_BYTES = 100_000_000  # additional, if the process has imported torch's compiler, as torch.utils.checkpoint does
RANK_BYTES = 50_000_000  # additional, if the process has imported torch.distributed and joined other processes
GATHERED_BLOCKS = 2  # with sharding: blocks whose gathered weights rank 0 holds at the same time
MUON_COPIES = 3.5  # of the matrices, in the precision of Muon's products
EXTRA_LAYERS = 1  # added to the number of layers, for the gradients of activations
CHECKPOINTED_LAYERS = 3  # with activation checkpointing: layers counted in full; of all layers, the inputs
STORED_PER_ATTENTION_WEIGHT = 4  # numbers, with attention dropout or relative positions; not measured
LOGIT_BYTES = 14  # per token and vocabulary entry: logits in two formats, their softmax and its gradient
LOGIT_GRADIENT_BYTES = 4  # the same for the gradient of a second loss; not measured
