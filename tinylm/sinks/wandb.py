"""Weights & Biases (wandb)."""

import os
from collections.abc import Callable
from typing import Any

PROJECT = "tinylm"


class Wandb:
    """Logs to the wandb run with the id in config.json.

    run: the result of `describe_run`.
    note: called with the URL of the run or, without a login, with the command that uploads it

    Without a login, unless WANDB_MODE is set, wandb records into ./wandb and uploads nothing. WANDB_PROJECT,
    WANDB_ENTITY and other variables of wandb apply. wandb ignores steps before the last one that it has, so no point of
    a resumed run is logged twice.
    """

    def __init__(self, run: dict[str, Any], note: Callable[[str], None]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no reports of wandb's own errors to its developers
        import wandb

        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False)
        self._run = wandb.init(
            project=None if os.environ.get("WANDB_PROJECT") else PROJECT,
            name=run["name"],
            id=run["id"],
            resume="allow",
            config=run["config"],
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        if self._run.url:
            note(str(self._run.url))
        elif offline:
            note(
                f"not logged in, so nothing is uploaded; wandb sync {self._run.dir.removesuffix('files')} does it later"
            )

    def log(self, step: int, values: dict[str, float], time: float) -> None:
        """Log all values at a step. `time` is unused, since wandb records the time of the call."""
        self._run.log(values, step=step)

    def finish(self) -> None:
        """Upload the rest."""
        self._run.finish()
