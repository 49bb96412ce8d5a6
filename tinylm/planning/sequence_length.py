"""The sequence length for further training of a model with a long context."""

from tinylm.planning import recipes
from tinylm.planning.plan_request import PlanRequest
from tinylm.validation import require


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
