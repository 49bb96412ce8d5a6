"""The variables of torchrun, and the rendezvous of ranks, which are threads here, with its store."""

import functools
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shell import child_process, environment, run_child
from tinylm.distributed.ranks import QUIET_SECONDS, Rendezvous, meet
from tinylm.errors import JoinError, UsageError
from tinylm.system.ranks import Launch

TORCHRUN = {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500", "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
TORCHRUN |= {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job-7"}


def test_the_variables_of_torchrun_give_rank_size_and_store_or_an_error_with_their_names() -> None:
    local: dict[str, Any] = {"local_rank": 1, "local_size": 4}
    expected = Launch(rank=5, size=8, host="node-1", port=29500, run_id="job-7", has_store=True, **local)
    assert Launch.of(TORCHRUN) == expected
    assert Launch.of({"RANK": "5", "WORLD_SIZE": "8"}) == Launch(), "without torchrun there is one rank"
    assert Launch.of({"MASTER_ADDR": "node-1"}).size == 1
    for missing in (["MASTER_PORT"], ["LOCAL_RANK", "LOCAL_WORLD_SIZE"], ["RANK"]):
        variables = {name: value for name, value in TORCHRUN.items() if name not in missing}
        with pytest.raises(UsageError, match=f"WORLD_SIZE is 8, but {' and '.join(missing)} (is|are) not set"):
            Launch.of(variables)
    numbers = {"RANK": ("8", "-1", "0" * 9 + "99", "0" * 6000), "WORLD_SIZE": ("0", "9" * 99)}
    numbers |= {"LOCAL_RANK": ("x",), "MASTER_PORT": ("0", "65536")}
    for name, values in numbers.items():
        for value in values:
            with pytest.raises(UsageError, match=f"{name} is .* torchrun sets it"):
                Launch.of({**TORCHRUN, name: value})


pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")

SIZE = 3


# The server looks up the name of each client before it answers: 10 s and more where no DNS server answers.
PATIENT = timedelta(seconds=60)


@pytest.fixture
def store() -> Any:
    return torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def start(store: Any, *run_ids: str) -> list[Rendezvous]:
    """The rendezvous of each rank of each job, in processes that have just started."""
    jobs = run_ids or ("",)
    shared: dict[str, Any] = {"size": SIZE, "port": store.port, "has_store": True}
    launches = [Launch(rank=rank, run_id=job, **shared) for job in jobs for rank in reversed(range(SIZE))]
    with ThreadPoolExecutor(len(launches)) as pool:
        return list(pool.map(lambda launch: meet(launch, print, 0, PATIENT), launches))


def test_jobs_of_one_store_and_ranks_after_a_restart_see_no_others(store: Any) -> None:
    found = start(store, "one", "two")
    assert len({meeting.job for meeting in found[:SIZE]}) == len({meeting.job for meeting in found[SIZE:]}) == 1
    assert found[0].job != found[SIZE].job
    assert {meeting.restarts for meeting in found} == {0}
    first, second = start(store), start(store)
    first[0].store.set("error", "of the first")
    assert all(found.store.get("error") == b"of the first" for found in first)
    assert not any(found.store.check(["error"]) for found in second)


def test_the_job_stays_and_restarts_are_counted(store: Any) -> None:
    torch.distributed.PrefixStore("tinylm/", store).set("ask/1", "number of an ended process")
    rounds = [start(store) for _ in range(3)]
    assert len({found.job for ranks in rounds for found in ranks}) == 1
    assert [[found.restarts for found in ranks] for ranks in rounds] == [[number] * SIZE for number in range(3)]


def test_the_second_rendezvous_of_a_process_is_no_restart(store: Any) -> None:
    launch = Launch(port=store.port, has_store=True)
    found = [meet(launch, print, number, PATIENT) for number in range(2)]
    assert [meeting.restarts for meeting in found] == [0, 0]
    assert found[0].job != found[1].job, "a restart of the first call must not resume the run of the second"
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    alone = meet(Launch(port=port), print, 0, PATIENT)
    assert (alone.job, alone.restarts) == (None, 0), "without torchrun there is no job"


def test_missing_ranks_are_reported_and_named_in_the_error(store: Any) -> None:
    notes: list[str] = []
    launch = Launch(size=3, port=store.port, has_store=True)
    readings = iter([0.0, QUIET_SECONDS + 1, PATIENT.seconds + 1.0])
    with pytest.raises(JoinError, match=r"2 of 3 processes .*ranks 1, 2.* unset MASTER_ADDR, RANK and WORLD_SIZE"):
        meet(launch, notes.append, 0, PATIENT, now=functools.partial(next, readings))
    assert notes == ["Waiting for 2 of 3 processes (ranks 1, 2)..."]
    with pytest.raises(JoinError, match=f"Rank 1 of 2 found no rank 0 at localhost:{store.port}"):
        meet(Launch(rank=1, size=2, port=store.port, has_store=True), print, 0, timedelta(seconds=0.5))


IMPATIENT = """
import functools, sys
from datetime import timedelta
from tinylm.distributed import ranks
ranks.MEETING_TIMEOUT, ranks.QUIET_SECONDS = timedelta(seconds={limit}), 0
from tinylm.__main__ import main
sys.argv = ["tinylm", *{arguments!r}]
main()
"""


def lone(rank: int, limit: float, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of one rank of two, without the other one."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    variables |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    return [sys.executable, "-c", IMPATIENT.format(limit=limit, arguments=arguments)], environment() | variables


def test_a_process_without_the_others_says_which_variables_to_unset() -> None:
    command, variables = lone(1, 0.5, "train", "text.txt")
    done = run_child(command, env=variables)
    assert done.returncode == 1 and not done.stdout
    assert "unset MASTER_ADDR, RANK and WORLD_SIZE." in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_other_than_0_prints_help_and_where_asked_to_its_messages(tmp_path: Path) -> None:
    def ended(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command, variables = lone(1, 0.5, "train", *arguments)
        return run_child(command, **{"env": variables | options.pop("changed", {}), **options})

    assert "Usage" in ended("--help").stdout
    assert "RANK is '1'" in ended("text.txt", changed={"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}).stderr
    assert ended("--unknown-option").stderr == ""
    assert "No such option" in ended("--unknown-option", "--debug").stderr
    own_log = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    with (tmp_path / "stderr.log").open("w") as file:
        assert ended("--unknown-option", changed=own_log, stderr=file).returncode == 2
    assert "No such option" in (tmp_path / "stderr.log").read_text()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_signal_ends_a_process_that_waits_for_the_others() -> None:
    command, variables = lone(0, 300, "train", "text.txt")
    with child_process(command, env=variables, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None and "Waiting for 1 of 2 processes" in child.stderr.readline()
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == -signal.SIGTERM


DIVERGED = """
import os, sys, time
from tinylm.distributed import ranks
from tinylm.errors import DivergedError, PeerError
from tinylm.system.ranks import Launch
ranks.LINGER_SECONDS = 60
try:
    with ranks.join_ranks(Launch.of(os.environ)) as joined:
        joined.gather(None)
        if joined.is_first:
            raise DivergedError("not finite")
        time.sleep(2)  # until rank 0, if it does not wait, has ended
        joined.gather(None)
except (DivergedError, PeerError) as error:
    sys.exit(error.exit_code)
"""


@pytest.mark.slow
def test_without_the_store_of_torchrun_rank_0_keeps_its_own_until_the_others_have_read_its_error() -> None:
    _, variables = lone(0, 0)
    other = variables | {"RANK": "1", "LOCAL_RANK": "1"}
    command = [sys.executable, "-c", DIVERGED]
    with child_process(command, env=variables) as first, child_process(command, env=other) as second:
        assert [child.wait(100) for child in (first, second)] == [3, 3]
