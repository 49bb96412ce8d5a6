"""Rank 0 prepares a training run, and the other ranks get it: configuration, tokenizer, weights and the last save."""

from pathlib import Path

import torch

from tinylm.adapters.load import add_adapter
from tinylm.errors import UsageError
from tinylm.model.build import build_model
from tinylm.model.stack import Transformer
from tinylm.ranks import Ranks
from tinylm.run_config import RunConfig
from tinylm.run_directory.directory import LastSave, UnwrittenRun
from tinylm.text.run_tokens import open_folder
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.run import TrainingRun


def share_run(run: TrainingRun, ranks: Ranks) -> None:
    """Send a run from rank 0 to the other ranks, which receive it with `receive_run`."""
    if ranks.size == 1:
        return
    _require_device(run.runtime.device, ranks)
    ranks.announce()
    save = run.resume_from
    ranks.first(
        {
            "path": str(run.directory.path),
            "config": run.config.to_json(),
            "tokenizer": run.tokenizer.to_str(),
            "tokens": str(run.tokens.path.absolute()),
            "state": None if save is None else save.state,
        }
    )
    ranks.broadcast(dict(run.model.named_parameters()))
    ranks.broadcast({} if save is None else save.optimizer)
    ranks.gather(None)  # every rank has opened the token files, which may now be moved


def receive_run(ranks: Ranks) -> TrainingRun:
    """The run that rank 0 shares. Raises TinyLMError if this rank cannot take part, and PeerError if rank 0 fails."""
    ranks.wait()
    shared = ranks.first(None)
    path, config = Path(shared["path"]), RunConfig.from_json(shared["config"])
    assert config.data is not None and config.runtime is not None
    _require_device(config.runtime.device, ranks)
    tokenizer = Tokenizer.parse(shared["tokenizer"], config.tokenizer.special, path / "tokenizer.json")
    tokens = open_folder(Path(shared["tokens"]), config.data, tokenizer)
    model = _receive_model(config, ranks)
    optimizer, state = ranks.broadcast({}), shared["state"]
    save = None if state is None else LastSave({}, optimizer, state)
    ranks.gather(None)
    return TrainingRun(UnwrittenRun(path), config, model, tokenizer, tokens, save, ranks)


def _receive_model(config: RunConfig, ranks: Ranks) -> Transformer:
    model = build_model(config.model)
    if config.adapter is not None:
        add_adapter(model, config.adapter)
    parameters = dict(model.named_parameters())
    for name, tensor in ranks.broadcast({}).items():
        parameters[name].data = tensor
    return model


def _require_device(device: str, ranks: Ranks) -> None:
    """Raise UsageError for a device that torch.distributed does not support, and for fewer GPUs than ranks."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"Several processes cannot train on {device}; add `device` cpu, or start one process.")
    if device == "cuda" and torch.cuda.device_count() < ranks.launch.local_size:
        raise UsageError(
            f"{ranks.launch.local_size} processes on this machine need as many GPUs, and it has "
            f"{torch.cuda.device_count()}; start fewer processes."
        )
