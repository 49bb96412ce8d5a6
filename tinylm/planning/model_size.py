"""The model to train: its size, context, output layer and dropout."""

import math
from dataclasses import replace

import numpy as np

from tinylm.errors import UsageError
from tinylm.machine import Machine
from tinylm.model_config import ModelConfig
from tinylm.planning import recipes
from tinylm.planning.batch_size import max_tokens_per_step
from tinylm.planning.cost import matrix_parameters, training_step_seconds
from tinylm.planning.plan_request import PlanRequest
from tinylm.planning.schedule import RunLength
from tinylm.presets import SIZES, check_options_have_effect, make_model_config
from tinylm.text.chat_batches import ChatParts, describe_left_out, require_usable
from tinylm.text.pair_batches import PairContexts


def choose_model(request: PlanRequest, size: str, notices: list[str]) -> ModelConfig:
    """The base model, or a new model of this size.

    The context of a new model is shortened to the number of training tokens, or chosen for the pairs or conversations,
    unless the user set it. Sentences about a shortened context, and about pairs and conversations that are cut or left
    out, are appended to `notices`.

    Raises UsageError for an invalid model, for a choice that has no effect, for a context longer than the text, and for
    conversations without a token that counts in the loss.
    """
    config = request.base or _new_model(request, size)
    if request.chat is not None:
        config = _fit_context_to_chat(config, request, request.chat)
        for name, part in zip(("training", "validation"), request.chat, strict=True):
            notices += describe_left_out(part, config.context, name)
    elif request.pair_contexts is None:
        config = _fit_context_to_text(config, request, notices)
    else:
        if request.base is None and "context" not in request.model:
            config = replace(config, context=choose_context(*request.pair_contexts))
        notices += _pairs_left_out(config.context, request.pair_contexts)
    check_options_have_effect(config, request.model)  # again, since the context may have changed
    return config


def _new_model(request: PlanRequest, size: str) -> ModelConfig:
    fields = request.model_fields
    if 0 < request.data.train_pairs < recipes.PAIR_DROPOUT_MAX_PAIRS:
        fields.setdefault("dropout", recipes.PAIR_DROPOUT)
    return make_model_config(vocab_size=request.vocab_size, preset=request.preset, size=size, **fields)


def choose_sizes(machine: Machine, request: PlanRequest) -> list[str]:
    """The sizes to plan with, in descending order; a smaller size is used if the model does not fit in memory.

    A chosen size, or that of a base model, is the only one. Otherwise, the first is the largest valid size with
    TOKENS_PER_PARAMETER training tokens per parameter, or else the smallest valid size. If none is valid, the smallest
    size, which `make_model_config` rejects.
    """
    if request.size != "auto" or request.base is not None:
        return [request.size]
    valid: list[str] = []
    preferred = 0
    for size in SIZES:
        try:
            config = _new_model(request, size)
        except UsageError:
            continue
        valid.append(size)
        if training_tokens(machine, request, config) >= recipes.TOKENS_PER_PARAMETER * matrix_parameters(config):
            preferred = len(valid) - 1
    return valid[preferred::-1] or [next(iter(SIZES))]


def training_tokens(machine: Machine, request: PlanRequest, config: ModelConfig) -> float:
    """Tokens that a model is trained on within the time budget, at most MAX_USEFUL_EPOCHS of the text."""
    per_step = max_tokens_per_step(machine, config.width, request.optimizer)
    steps = request.seconds / training_step_seconds(machine, config, per_step, request.optimizer)
    return min(steps * per_step, recipes.MAX_USEFUL_EPOCHS * request.data.train_tokens)


def _fit_context_to_text(config: ModelConfig, request: PlanRequest, notices: list[str]) -> ModelConfig:
    """Shorten the context to the number of training tokens.

    Raises UsageError if the context is too long and is set by the user or the base model.
    """
    tokens = request.data.train_tokens
    available = tokens - 1  # the last token is a target only
    if config.context <= available:
        return config
    if request.base is not None or "context" in request.model:
        shorter = "" if request.base is not None else f", or a `context` of at most {available}"
        raise UsageError(
            f"The training text has {tokens} tokens, and a context of {config.context} needs {config.context + 1}; "
            f"give more text{shorter}."
        )
    notices.append(f"The training text has only {tokens} tokens: the context is shortened to {available}.")
    return replace(config, context=available)


def _fit_context_to_chat(config: ModelConfig, request: PlanRequest, chat: ChatParts) -> ModelConfig:
    """Lengthen the context so that nearly all conversations fit, unless it is set by the user or the base model.

    Raises UsageError if no token within the context counts in the loss.
    """
    if request.base is None and "context" not in request.model:
        config = replace(config, context=max(config.context, choose_context(*(part.lengths - 1 for part in chat))))
    for name, part in zip(("training", "validation"), chat, strict=True):
        require_usable(part, config.context, name)
    return config


def choose_context(train: np.ndarray, val: np.ndarray) -> int:
    """A context that fits nearly all examples; fitting a few very long ones would take most of the memory.

    train, val: (N,) and (M,), the context that each example needs
    """
    usual = int(np.quantile(train, recipes.PAIR_CONTEXT_QUANTILE, method="higher"))
    longest = max(int(part.max()) for part in (train, val))
    context, multiple = min(longest, recipes.PAIR_CONTEXT_FACTOR * usual), recipes.PAIR_CONTEXT_MULTIPLE
    return max(recipes.MIN_PAIR_CONTEXT, math.ceil(context / multiple) * multiple)


def _pairs_left_out(context: int, needed: PairContexts) -> list[str]:
    """A notice for the training pairs, and one for the validation pairs, if any of them are longer than the context."""
    notices = []
    for name, part in zip(("training", "validation"), needed, strict=True):
        left_out = int((part > context).sum())
        if left_out:
            notices.append(
                f"{left_out:,} of {len(part):,} {name} pairs are left out: they do not fit the context of {context}, "
                f"and the longest needs {part.max()}."
            )
    return notices


def with_output_layer(config: ModelConfig, request: PlanRequest, length: RunLength) -> ModelConfig:
    """Untie the output layer of a modern decoder in a short run, unless the user set `tie` (decision 019).

    Only with a vocabulary of at most UNTIED_MAX_VOCABULARY.
    """
    if not request.is_new_modern or config.architecture != "decoder" or "tie" in request.model:
        return config
    untied = length.tokens <= recipes.UNTIED_MAX_TOKENS and request.vocab_size <= recipes.UNTIED_MAX_VOCABULARY
    return replace(config, tie=not untied)


def with_dropout(config: ModelConfig, request: PlanRequest, length: RunLength, parameters: int) -> ModelConfig:
    """Set the dropout of a modern model that is trained on text, unless the user set `dropout` (decision 014)."""
    if not request.is_new_modern or request.data.train_pairs or "dropout" in request.model:
        return config
    return replace(config, dropout=choose_dropout(length.epochs, parameters / request.data.train_tokens))


def choose_dropout(epochs: float, parameters_per_token: float) -> float:
    """Dropout proportional to epochs and to parameters per training token, at most MAX_DROPOUT (decision 014).

    Below MIN_DROPOUT it is 0, since its gain would not be worth the time that it takes.
    """
    dropout = min(recipes.DROPOUT_PER_EPOCH * epochs * parameters_per_token, recipes.MAX_DROPOUT)
    return float(f"{dropout:.2g}") if dropout >= recipes.MIN_DROPOUT else 0.0
