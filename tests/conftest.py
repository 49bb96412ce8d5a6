"""Fixtures of every test: its own cache with a machine profile, default signals, and one thread, on which small models
are fastest."""

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.browser import browser, opened  # noqa: F401, fixtures
from tests.machines import AUTO_DTYPE, write_profile
from tests.trained_runs import adapter, bpe_run, encoder, run, shelf, shelf_cache, translator  # noqa: F401, fixtures
from tinylm.kernels.cpu import computes_bf16
from tinylm.machine import measure as machine

# The same examples in every run, so that a failure is due to a change; --hypothesis-profile explore draws others. No
# deadline, since a busy machine is slow.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tinylm", settings.get_profile("explore"), derandomize=True)
settings.load_profile("tinylm")

_caches = itertools.count()


def pytest_configure() -> None:
    """TINYLM_TEST_DTYPE: fp32 or bf16, the number format that `auto` chooses on a CPU, in child processes, too."""
    if AUTO_DTYPE not in ("fp32", "bf16"):
        raise pytest.UsageError("TINYLM_TEST_DTYPE is fp32 or bf16.")
    if AUTO_DTYPE == "bf16" and not computes_bf16():
        pytest.exit("This processor has no instructions for bf16, so `auto` is always fp32 here.", returncode=0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, machine_profile: Path) -> None:
    cache = tmp_path_factory.getbasetemp() / f"tinylm-cache-{next(_caches)}"
    shutil.copytree(machine_profile, cache, copy_function=os.link)  # tinylm replaces files and never writes into one
    monkeypatch.setenv("TINYLM_CACHE", str(cache))
    monkeypatch.setattr(machine, "MEASURE_SECONDS", 0.0)  # in tests whose cache has no profile
    monkeypatch.setattr(machine, "MIN_ROUNDS", 5)


@pytest.fixture(autouse=True, scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory, machine_profile: Path) -> Iterator[None]:
    """The cache of fixtures that several tests share."""
    cache = tmp_path_factory.mktemp("shared") / "cache"
    shutil.copytree(machine_profile, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLM_CACHE", str(cache))
        patch.delenv("TINYLM_TEST_DTYPE", raising=False)  # AUTO_DTYPE has it; commands warn of unknown variables
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same tensors whichever tests ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def machine_profile(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """A cache folder that holds the profile of a machine, so that no test measures this one."""
    cache = tmp_path_factory.mktemp("profile") / "cache"
    write_profile(cache)
    return cache


@pytest.fixture(autouse=True, scope="session")
def default_signals() -> Iterator[None]:
    """Signals that were ignored when the tests started (nohup, a job in the background) are handled by doing nothing.

    A child process inherits that a signal is ignored, but not a handler, so children start as they do from a terminal.
    """
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda number, frame: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty cache of a huggingface_hub without network; see `tests.formats.peers.in_hub`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"
