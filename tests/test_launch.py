"""The environment variables of torchrun."""

from typing import Any

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
    "TORCHELASTIC_RUN_ID": "job-7",
}


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
    numbers = {
        "RANK": ("8", "-1", "0" * 9 + "99", "0" * 6000),
        "WORLD_SIZE": ("0", "9" * 99),
        "LOCAL_RANK": ("x",),
        "MASTER_PORT": ("0", "65536"),
    }
    for name, values in numbers.items():
        for value in values:
            with pytest.raises(UsageError, match=f"{name} is .* torchrun sets it"):
                Launch.of({**TORCHRUN, name: value})
