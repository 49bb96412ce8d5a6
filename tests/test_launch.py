"""The environment variables of torchrun."""

import os

import pytest

from tinylm.errors import UsageError
from tinylm.launch import Launch

TORCHRUN = {
    "MASTER_ADDR": "localhost",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_RUN_ID": "job-7",
}


def test_without_torchrun_there_is_one_rank() -> None:
    assert Launch.of({"RANK": "5", "WORLD_SIZE": "8"}) == Launch()


def test_the_variables_of_torchrun_give_rank_size_and_job() -> None:
    expected = Launch(rank=5, size=8, local_rank=1, local_size=4, restarts=2, job="job-7")
    assert Launch.of(TORCHRUN) == expected


def test_a_job_without_an_id_is_named_by_the_process_of_torchrun() -> None:
    assert Launch.of({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).job == f"process {os.getppid()}"


@pytest.mark.parametrize(
    "name, value", [("RANK", "8"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "x"), ("WORLD_SIZE", "9" * 99)]
)
def test_a_number_that_torchrun_does_not_set_is_an_error_with_its_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is .* torchrun sets it"):
        Launch.of({**TORCHRUN, name: value})
