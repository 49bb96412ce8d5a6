"""Print the mean squared error of the model in the folder `run` on texts.jsonl: one text at a time, in float64."""

import json
from pathlib import Path

import tests.jobs.regression.row  # noqa: F401  # adds the job

if __name__ == "__main__":
    import numpy as np
    import torch

    from tinylm.models.load import load

    model = load("run")
    network, errors = model.network.double(), []
    for line in Path("texts.jsonl").read_text().splitlines():
        record = json.loads(line)
        vector = network(torch.tensor([model.encode(record["text"])])).hidden[0].mean(dim=0)
        errors.append((float(network.logits(vector)) - record["number"]) ** 2)
    print(np.mean(errors))
