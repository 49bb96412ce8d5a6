"""What every test may rely on: a token cache of its own, and one thread, on which small models are fastest."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples for everyone, so that a change is judged by itself; --hypothesis-profile explore looks for others.
# A busy machine is slow, and that is no failure.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tinylm", settings.get_profile("explore"), derandomize=True)
settings.load_profile("tinylm")

_caches = itertools.count()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYLM_CACHE", str(tmp_path_factory.getbasetemp() / f"tinylm-cache-{next(_caches)}"))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
