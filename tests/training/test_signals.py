import os
import signal

import pytest

from tinylm.training import signals
from tinylm.training.signals import stop_on_signals
from tinylm.training.trainer import StopTraining

SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
each = pytest.mark.parametrize("number", SIGNALS)


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
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert stop.signal_number == signal.SIGINT


@each
def test_two_signals_at_the_same_moment_are_one_wish(number: signal.Signals) -> None:
    """A Ctrl-C may come from the terminal and from a program in between."""
    with stop_on_signals() as stop:
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


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_a_hangup_that_is_to_be_ignored_is_ignored() -> None:
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal_number == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
