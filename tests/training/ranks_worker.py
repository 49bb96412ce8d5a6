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
from tinylm.distributed.launch import Launch
from tinylm.distributed.ranks import Ranks, join_ranks
from tinylm.reporter import LogReporter
from tinylm.training.events import Event, Stepped
from tinylm.training.pipeline import Session
from tinylm.training.resume import start_run
from tinylm.training.training_request import adapter_request, resume_request, train_request


def train(runs: list[Any], ranks: Ranks) -> None:
    """Train each run in the ranks."""
    for command, files, given in runs:
        settings = dict(given)
        out = Path(settings.pop("out"))
        stop_at = settings.pop("stop_at", None)
        request: Any
        if command == "train":
            request = train_request(files, out, TrainSettings(**settings))
        elif command == "resume":
            kind = {"finetune-lora": "lora", "finetune-adapter": "bottleneck"}.get(files)
            request = resume_request(out, [], TrainSettings(**settings), adapter_kind=kind)
        else:
            model = Path(settings.pop("model"))
            chosen = LoRASettings if command == "finetune-lora" else AdapterSettings
            request = adapter_request(files, model, out, chosen(**settings))

        def stop(event: Event, stop_at: int | None = stop_at) -> None:
            if isinstance(event, Stepped) and event.step == stop_at:
                os.kill(os.getpid(), signal.SIGINT)

        start_run(request, Session(reporter=LogReporter(), callbacks=[stop], ranks=ranks))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with join_ranks(Launch.of(os.environ)) as joined:
        train(json.loads(Path(sys.argv[1]).read_text()), joined)
