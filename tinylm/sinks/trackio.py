"""Trackio."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROJECT = "tinylm"


class Trackio:
    """Logs to the trackio run with the name of the run directory: on this machine, or to the server or Space that
    TRACKIO_SERVER_URL or TRACKIO_SPACE_ID name.

    Points up to the last step that trackio has are left out, so a resumed run has no point twice. trackio catches its
    errors and warns; `problem` is called with these warnings.
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
        """Log all values at a step, with the present time: trackio takes no other."""
        if step > self._last:
            self._run.log(values, step=step)

    def finish(self) -> None:
        """Write or upload the rest."""
        self._run.finish()
