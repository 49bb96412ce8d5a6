"""Trackio: metrics in a local database, on a server or in a Hugging Face Space."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = "tinylm"


class Trackio:
    """Logs to the trackio run with the name of the run directory: on this machine, or to the Space or server that
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names.

    run: the result of `describe_run`.
    problem: called with the warnings of trackio, which catches its errors and warns about them

    A resumed run leaves out the steps that trackio already has, so no point is logged twice.
    """

    def __init__(self, run: dict[str, Any], problem: Callable[[str], None]) -> None:
        import trackio

        def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any, **options: Any) -> None:
            if "trackio" in Path(filename).parts:
                problem(str(message))

        warnings.showwarning = show
        resumed = run["step"] is not None
        self._run = trackio.init(
            project=PROJECT,
            name=run["name"],
            config=run["config"],
            resume="allow" if resumed else "never",
            embed=False,
        )
        self._last = self._run._next_step - 1 if resumed else -1  # a private name of trackio 0.43

    def log(self, step: int, values: dict[str, float], time: float) -> None:
        """Log all values at a step. `time` is unused, since trackio records the time of the call."""
        if step > self._last:
            self._run.log(values, step=step)

    def finish(self) -> None:
        """Write or upload the rest."""
        self._run.finish()
