import os
import signal
from collections.abc import Iterator

import pytest

from tinylm.training import signals
from tinylm.training.signals import stop_on_signals
from tinylm.training.trainer import StopTraining

SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
each = pytest.mark.parametrize("number", SIGNALS)


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """As for a process in the foreground, though these tests may run under nohup or in the background."""
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@each
def test_the_first_signal_asks_to_stop_and_is_remembered(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        stop.check()
        assert stop.signal_number == 0
        os.kill(os.getpid(), number)
        assert stop.signal_number == number
        with pytest.raises(StopTraining):
            stop.check()


@each
def test_a_second_signal_stops_at_once(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.0 + 2 * signals.SAME_PRESS])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(clock))
    with stop_on_signals() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert stop.signal_number == signal.SIGINT


@each
def test_two_signals_at_the_same_moment_are_one_wish(number: signal.Signals) -> None:
    """A Ctrl-C may come from the terminal and from a program in between."""
    with stop_on_signals() as stop:
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), number)
        assert stop.signal_number == signal.SIGINT
        with pytest.raises(StopTraining):
            stop.check()


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_afterwards_signals_do_what_they_did_before(error: type[Exception] | None) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with stop_on_signals():
            assert signal.getsignal(signal.SIGTERM) not in before
            if error:
                raise error
    except RuntimeError:
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


@each
def test_before_the_first_check_a_signal_stops_at_once(number: signal.Signals) -> None:
    """Nothing is there to save, and what is being done, as compiling, may take a minute."""
    with stop_on_signals() as stop:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert stop.signal_number == 0


@each
def test_a_signal_that_stops_at_once_does_what_it_did_before(number: signal.Signals) -> None:
    came = []
    signal.signal(number, lambda *arguments: came.append(arguments[0]))
    with stop_on_signals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert came == [number]


@each
def test_a_signal_that_is_to_be_ignored_is_ignored(number: signal.Signals) -> None:
    """As nohup has it, and a shell script for its jobs in the background."""
    signal.signal(number, signal.SIG_IGN)
    with stop_on_signals() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        stop.check()
        assert signal.getsignal(number) is signal.SIG_IGN
    assert signal.getsignal(number) is signal.SIG_IGN
