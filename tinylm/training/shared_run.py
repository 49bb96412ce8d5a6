"""Rank 0 prepares a training run, and the other ranks get it: configuration, tokenizer, weights and the last save."""

import functools
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from tinylm.adapters.load import add_adapter
from tinylm.model.build import build_empty_model, build_model
from tinylm.model.stack import Transformer
from tinylm.ranks import Ranks
from tinylm.run_config import RunConfig
from tinylm.run_directory.directory import LastSave, UnwrittenRun
from tinylm.text.run_tokens import open_folder
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.run import TrainingRun
from tinylm.training.sharded_tensors import own_rows


def share_run(run: TrainingRun, ranks: Ranks) -> None:
    """Send a run from rank 0 to the other ranks, which receive it with `receive_run`."""
    if ranks.size == 1:
        return
    ranks.require_device(run.runtime.device)
    ranks.announce()
    save = run.resume_from
    ranks.first(
        {
            "path": str(run.directory.path),
            "config": run.config.to_json(),
            "tokenizer": run.tokenizer.to_str(),
            "tokens": str(run.tokens.path.absolute()),
            "state": None if save is None else save.state,
            "parallel": run.parallel,
        }
    )
    ranks.broadcast(dict(run.model.named_parameters()))
    if save is None or not _by_rows(run.parallel, run.config):
        ranks.broadcast({} if save is None else save.optimizer)
    else:
        run.resume_from = LastSave({}, ranks.broadcast(save.optimizer, _keep_rows(ranks)), save.state)
    ranks.gather(None)  # every rank has opened the token files, which may now be moved


def receive_run(ranks: Ranks) -> TrainingRun:
    """The run that rank 0 shares. Raises TinyLMError if this rank cannot take part, and PeerError if rank 0 fails."""
    ranks.wait()
    shared = ranks.first(None)
    path, config = Path(shared["path"]), RunConfig.from_json(shared["config"])
    assert config.data is not None and config.runtime is not None
    ranks.require_device(config.runtime.device)
    tokenizer = Tokenizer.parse(shared["tokenizer"], config.tokenizer.special, path / "tokenizer.json")
    tokens = open_folder(Path(shared["tokens"]), config.data, tokenizer)
    rows = None
    if _by_rows(shared["parallel"], config):
        model = build_empty_model(config.model)
        rows = ranks.broadcast({}, _keep_rows(ranks))
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(rows[name].dtype)
        optimizer = ranks.broadcast({}, _keep_rows(ranks))
    else:
        model = _receive_model(config, ranks)
        optimizer = ranks.broadcast({})
    state = shared["state"]
    save = None if state is None else LastSave({}, optimizer, state)
    ranks.gather(None)
    return TrainingRun(UnwrittenRun(path), config, model, tokenizer, tokens, save, ranks, shared["parallel"], rows)


def _by_rows(parallel: str, config: RunConfig) -> bool:
    """Whether a rank keeps only its rows of what it receives. With an adapter, it receives whole tensors."""
    return parallel == "fsdp" and config.adapter is None


def _keep_rows(ranks: Ranks) -> Callable[[Tensor], Tensor]:
    return functools.partial(own_rows, size=ranks.size, rank=ranks.launch.rank)


def _receive_model(config: RunConfig, ranks: Ranks) -> Transformer:
    model = build_model(config.model)
    if config.adapter is not None:
        add_adapter(model, config.adapter)
    parameters = dict(model.named_parameters())
    for name, tensor in ranks.broadcast({}).items():
        parameters[name].data = tensor
    return model
