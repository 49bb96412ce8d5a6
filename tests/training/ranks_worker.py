"""A process of torchrun that trains the runs in a JSON file, one after the other: [command, files, settings] each.

The setting stop_at is for tests only: the step after which the first rank gets a signal. The command resume has the
command that began the run in the place of the files.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings
from tinylm.distributed.ranks import join_ranks
from tinylm.reporter import LogReporter
from tinylm.system.ranks import Launch, Ranks
from tinylm.training.events import Event, Stepped
from tinylm.training.pipeline import train_or_resume
from tinylm.training.session import Session
from tinylm.training.training_request import TrainingRequest


def train(runs: list[Any], ranks: Ranks) -> None:
    """Train each run in the ranks."""
    for command, files, given in runs:
        settings = dict(given)
        out = Path(settings.pop("out"))
        stop_at = settings.pop("stop_at", None)
        if command == "train":
            request = TrainingRequest(settings=TrainSettings(**settings), files=files, out=out)
        elif command == "resume":
            kinds: dict[str, Any] = {"finetune-lora": LoRASettings, "finetune-adapter": AdapterSettings}
            request = TrainingRequest(settings=kinds.get(files, TrainSettings)(**settings), resume=out)
        else:
            model = Path(settings.pop("model"))
            chosen = LoRASettings if command == "finetune-lora" else AdapterSettings
            request = TrainingRequest(settings=chosen(**settings), files=files, model=model, out=out)

        def stop(event: Event, stop_at: int | None = stop_at) -> None:
            if isinstance(event, Stepped) and event.step == stop_at:
                os.kill(os.getpid(), signal.SIGINT)

        train_or_resume(request, Session(reporter=LogReporter(), callbacks=[stop], ranks=ranks))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_ranks(Launch.of(os.environ)) as joined:
        train(json.loads(Path(sys.argv[1]).read_text()), joined)
