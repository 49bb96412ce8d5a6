"""A process of torchrun that trains the runs in a JSON file, one after the other: [command, files, settings] each."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tinylm.launch import Launch
from tinylm.ranks import Ranks, join_ranks
from tinylm.reporter import LogReporter
from tinylm.training.pipeline import Session
from tinylm.training.restart import start_run
from tinylm.training.training_request import bottleneck_request, lora_request, train_request


def train(runs: list[Any], ranks: Ranks) -> None:
    """Train each run in the ranks."""
    for command, files, given in runs:
        settings = dict(given)
        out = Path(settings.pop("out"))
        if command == "train":
            request = train_request(files, out, settings)
        else:
            make = lora_request if command == "finetune-lora" else bottleneck_request
            request = make(files, Path(settings.pop("model")), out, settings)
        start_run(request, Session(reporter=LogReporter(), ranks=ranks))


if __name__ == "__main__":
    import os

    torch.set_num_threads(1)
    with join_ranks(Launch.of(os.environ)) as joined:
        train(json.loads(Path(sys.argv[1]).read_text()), joined)
