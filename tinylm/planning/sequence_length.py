"""The lengths of training sequences: of further training, and of the sequence length warmup of new models."""

from dataclasses import replace

from tinylm.config.model import ModelConfig
from tinylm.config.sequence_growth import SEQUENCE_GROWTHS
from tinylm.config.validation import require
from tinylm.planning import recipes
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
