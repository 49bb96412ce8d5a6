"""A signal during training saves the run and stops; a second one stops at once."""

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tinylm.training.session import DUPLICATE_SECONDS, stop_on_signals
from tinylm.training.trainer import StopTraining

SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
each = pytest.mark.parametrize("number", SIGNALS)


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """The handlers of a foreground process, also if the tests run under nohup or in the background."""
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@each
def test_the_first_signal_requests_a_stop_and_a_second_one_stops_at_once_unless_it_comes_at_the_same_moment(
    number: signal.Signals,
) -> None:
    """A Ctrl-C may be sent by the terminal and by a parent process."""
    clock = iter([10.0, 10.0 + 0.9 * DUPLICATE_SECONDS, 10.0 + 2 * DUPLICATE_SECONDS])
    with stop_on_signals(SIGNALS, now=lambda: next(clock)) as stop:
        stop.check()
        assert stop.signal_number == 0
        send(number)
        assert stop.signal_number == number
        with pytest.raises(StopTraining):
            stop.check()
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert stop.signal_number == number
        with pytest.raises(StopTraining):
            stop.check()


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_handlers_are_restored(error: type[Exception] | None) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with contextlib.suppress(RuntimeError), stop_on_signals(SIGNALS):
        assert signal.getsignal(signal.SIGTERM) not in before
        if error:
            raise error
    assert [signal.getsignal(number) for number in SIGNALS] == before


@each
def test_before_the_first_check_a_signal_stops_at_once_and_calls_the_previous_handler(number: signal.Signals) -> None:
    """There is nothing to save yet, and compiling the model may take a minute."""
    received = []
    with stop_on_signals(SIGNALS) as stop:
        with pytest.raises(KeyboardInterrupt):
            send(number)
        assert stop.signal_number == 0
    signal.signal(number, lambda *arguments: received.append(arguments[0]))
    with stop_on_signals(SIGNALS), pytest.raises(KeyboardInterrupt):
        send(number)
    assert received == [number]


@each
def test_ignored_signals_stay_ignored(number: signal.Signals) -> None:
    """As under nohup, and in background jobs of shell scripts."""
    signal.signal(number, signal.SIG_IGN)
    with stop_on_signals(SIGNALS) as stop:
        stop.check()
        send(number)
        stop.check()
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN
