"""The model to train: its size, context, output layer and dropout, and the lengths of its training sequences."""

from dataclasses import replace

from tinylm.config.model import ModelConfig
from tinylm.config.presets import SIZES, check_options_have_effect, make_model_config
from tinylm.config.sequence_growth import SEQUENCE_GROWTHS
from tinylm.config.validation import require
from tinylm.errors import UsageError
from tinylm.machine.measure import Machine
from tinylm.planning import recipes
from tinylm.planning.cost import matrix_parameters, training_step_seconds
from tinylm.planning.hyperparameters import RunLength
from tinylm.planning.memory_plan import max_tokens_per_step
from tinylm.planning.plan_request import PlanRequest


def choose_sequence_length(request: PlanRequest, notices: list[str]) -> int | None:
    """Tokens per training sequence; `None` for the context of the model, and always for a new model.

    A published model has a context of thousands of tokens, and the memory of a step grows with the sequence length. On
    text, a base with a context above LONG_CONTEXT is trained on sequences of SEQUENCE_LENGTH tokens. The length of
    pairs and conversations follows from the data.

    Raises UsageError if a length is set for a new model, or is above the context of the base model.
    """
    base, length = request.base, request.training.get("sequence_length")
    if length is not None:
        require(base is not None, "`sequence_length` is for a model that is trained further; set `context` instead.")
        assert base is not None
        require(
            length <= base.context,
            f"`sequence_length` is {length}; it must be at most the context of the model, {base.context}.",
        )
        return int(length)
    if base is None or not request.data.is_plain_text or base.context <= recipes.LONG_CONTEXT:
        return None
    length = max(1, min(recipes.SEQUENCE_LENGTH, request.data.train_tokens - 1))
    notices.append(
        f"The context of the model is {base.context:,} tokens; it is trained on sequences of {length} "
        "(`sequence_length`)."
    )
    return length


def with_sequence_growth(request: PlanRequest, config: ModelConfig) -> PlanRequest:
    """The request with a choice of `sequence_growth`: the user's, or else the planned one (decision 037).

    Sequences of new modern decoders with RoPE grow on plain text, as far as the shortest have at least
    MIN_GROWING_LENGTH tokens.
    """
    if "sequence_growth" in request.training:
        return request
    growth = 1
    if _may_grow(request, config):
        growth = max(parts for parts in SEQUENCE_GROWTHS if parts == 1 or _is_long_enough(config.context, parts))
    return replace(request, training={**request.training, "sequence_growth": growth})


def _may_grow(request: PlanRequest, config: ModelConfig) -> bool:
    is_plain_decoder = config.architecture == "decoder" and config.position == "rope"
    return request.is_new_modern and is_plain_decoder and request.data.is_plain_text


def _is_long_enough(context: int, parts: int) -> bool:
    return context % parts == 0 and context // parts >= recipes.MIN_GROWING_LENGTH


def choose_model(request: PlanRequest, size: str, notices: list[str]) -> ModelConfig:
    """The base model, or a new model of this size.

    The context of a new model is shortened to one less than the number of training tokens, or chosen for the pairs or
    conversations, unless the user set it. Sentences about a shortened context, and about pairs and conversations that
    are cut or left out, are appended to `notices`.

    Raises UsageError for an invalid model, for a choice that has no effect, for a context longer than the text, and for
    conversations without a scored token within the context.
    """
    config = request.base or _new_model(request, size)
    is_new = request.base is None
    if is_new and "context" not in request.model:
        config = replace(config, context=request.shape.choose_context(request.data, config.context, notices))
    notices += request.shape.check_context(request.data, config.context, is_new=is_new)
    check_options_have_effect(config, request.model)  # again, since the context may have changed
    return config


def _new_model(request: PlanRequest, size: str) -> ModelConfig:
    return make_model_config(vocab_size=request.vocab_size, preset=request.preset, size=size, **request.model_fields)


def choose_sizes(machine: Machine, request: PlanRequest) -> list[str]:
    """The sizes to plan with, in descending order; a smaller size is used if the model does not fit in memory.

    With a chosen size or a base model, the only item is `request.size`. Otherwise, the first is the largest valid size
    with TOKENS_PER_PARAMETER training tokens per parameter, or else the smallest valid size. If none is valid, the
    smallest size, which `make_model_config` rejects.
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
    """Tokens that a model is trained on in `request.seconds`, at most MAX_USEFUL_EPOCHS of the training data."""
    length = with_sequence_growth(request, config).mean_length(config)
    per_step = max_tokens_per_step(machine, config.width, request.optimizer)
    steps = request.seconds / training_step_seconds(machine, config, per_step, request.optimizer, length)
    return min(steps * per_step, recipes.MAX_USEFUL_EPOCHS * request.data.train_tokens)


def with_tying(config: ModelConfig, request: PlanRequest, length: RunLength) -> ModelConfig:
    """Set whether a new modern decoder ties its output layer, unless the user set `tie` (decision 019).

    It is untied in a run of at most UNTIED_MAX_TOKENS with a vocabulary of at most UNTIED_MAX_VOCABULARY.
    """
    if not request.is_new_modern or config.architecture != "decoder" or "tie" in request.model:
        return config
    untied = length.tokens <= recipes.UNTIED_MAX_TOKENS and request.vocab_size <= recipes.UNTIED_MAX_VOCABULARY
    return replace(config, tie=not untied)


def with_dropout(config: ModelConfig, request: PlanRequest, length: RunLength, parameters: int) -> ModelConfig:
    """Set the dropout of a new model that is modern or trained on pairs, unless the user set `dropout`."""
    pairs = request.data.train_pairs > 0
    if request.base is not None or not (request.is_new_modern or pairs) or "dropout" in request.model:
        return config
    rule = recipes.PAIR_DROPOUT if pairs else recipes.DROPOUT
    return replace(config, dropout=choose_dropout(rule, length.epochs, parameters / request.data.train_tokens))


def choose_dropout(rule: recipes.DropoutRule, epochs: float, parameters_per_token: float) -> float:
    """Dropout proportional to epochs and to parameters per training token, within the limits of the rule."""
    dropout = min(rule.per_epoch * epochs * parameters_per_token, rule.maximum)
    return float(f"{dropout:.2g}") if dropout >= rule.minimum else 0.0
