"""The number of sequences that each window of text is split into at first (decision 037)."""

from dataclasses import replace

from tinylm.model_config import ModelConfig
from tinylm.planning import recipes
from tinylm.planning.plan_request import PlanRequest
from tinylm.sequence_growth import SEQUENCE_GROWTHS


def with_sequence_growth(request: PlanRequest, config: ModelConfig) -> PlanRequest:
    """The request with a choice of `sequence_growth`: the user's, or else the planned one.

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
