"""Child processes that tests start: they have default signal handlers, and end at their time limit."""

import os
import signal
import subprocess
import sys

import pytest

from tests.shell import child_process, run_child

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and process groups")


@posix
def test_a_child_starts_with_default_signals() -> None:
    program = "import signal; print(*(signal.getsignal(n) == signal.SIG_IGN for n in (1, 15)), signal.getsignal(2))"
    assert run_child([sys.executable, "-c", program]).stdout.startswith("False False <built-in function default_int")


@posix
def test_a_child_that_ignores_signals_ends_at_its_limit_with_all_that_it_started() -> None:
    """The child of the child holds the pipe open."""
    script = "trap '' INT HUP TERM; sleep 1000 & echo started; sleep 1000"
    with child_process(["bash", "-c", script], limit=1.0, stdout=subprocess.PIPE) as child:
        assert child.communicate() == ("started\n", None)
    assert child.returncode == -signal.SIGKILL
