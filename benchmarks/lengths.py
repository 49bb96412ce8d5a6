"""Length extrapolation: the loss by position in windows of twice the context that a model was trained with.

    python benchmarks/lengths.py ablation/positions-*

Evaluates run directories on their own validation texts. Prints nats per token for each quarter of the window: the first
two quarters are within the trained context, the last two beyond it. Learned positions exist only within the context.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from measure import table

from tinylm.run_directory.loading import read_config, read_tokenizer, read_weights, restore_model
from tinylm.text.batches import windows_at
from tinylm.text.run_tokens import reopen_part

QUARTERS = 4
ROWS = 256


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories of decoders")
    rows = [[run.name, *loss_by_quarter(run)] for run in parser.parse_args(arguments).runs]
    print(table(["run", "first quarter", "second", "third", "fourth"], rows))


def loss_by_quarter(run: Path) -> list[str]:
    """The loss in each quarter of ROWS windows, which may overlap; - where learned positions do not exist."""
    config, context = read_config(run), read_config(run).model.context
    assert config.data is not None
    tokenizer = read_tokenizer(run, config)
    tokens = reopen_part(run, config.data, tokenizer, "val")
    length = 2 * context
    if config.model.position == "learned":
        length = context
    longer = replace(config, model=replace(config.model, context=length))
    model = restore_model(longer, read_weights(run, config).tensors, run).eval()
    starts = np.linspace(0, len(tokens) - 2 * context - 1, ROWS).astype(int)
    batch = windows_at(tokens, starts, length)
    with torch.inference_mode():
        logits = model.logits(model(batch.ids).hidden).float()
        nats = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    by_position = nats.view(ROWS, length).mean(dim=0)
    quarters = by_position.split(2 * context // QUARTERS)
    return [f"{part.mean().item():.3f}" for part in quarters] + ["-"] * (QUARTERS - len(quarters))


if __name__ == "__main__":
    main()
