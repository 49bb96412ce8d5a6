"""The environment variables of torchrun."""

import pytest

from tinylm.errors import UsageError
from tinylm.launch import Launch

TORCHRUN = {
    "MASTER_ADDR": "node-1",
    "MASTER_PORT": "29500",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_without_torchrun_there_is_one_rank() -> None:
    assert Launch.of({"RANK": "5", "WORLD_SIZE": "8"}) == Launch()


def test_the_variables_of_torchrun_give_rank_size_and_the_address_of_its_store() -> None:
    expected = Launch(rank=5, size=8, local_rank=1, local_size=4, host="node-1", port=29500, has_store=True)
    assert Launch.of(TORCHRUN) == expected


def test_a_missing_port_is_an_error_for_several_processes_only() -> None:
    assert Launch.of({"MASTER_ADDR": "node-1"}).size == 1
    with pytest.raises(UsageError, match="MASTER_PORT is not set"):
        Launch.of({"MASTER_ADDR": "node-1", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    "name, value",
    [
        ("RANK", "8"),
        ("RANK", "-1"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "x"),
        ("WORLD_SIZE", "9" * 99),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_a_number_that_torchrun_does_not_set_is_an_error_with_its_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is .* torchrun sets it"):
        Launch.of({**TORCHRUN, name: value})
