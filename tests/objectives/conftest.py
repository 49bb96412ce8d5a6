"""Fixtures of the tests of losses."""

from collections.abc import Callable

import pytest

from tinylm.objectives import loss

LimitLogits = Callable[[int], None]


@pytest.fixture
def limit_logits(monkeypatch: pytest.MonkeyPatch) -> LimitLogits:
    """A function that sets the largest number of logits in a chunk."""

    def limit(number: int) -> None:
        for name in ("MAX_LOGITS", "MAX_FROZEN_LOGITS"):
            monkeypatch.setattr(loss, name, number)

    return limit
