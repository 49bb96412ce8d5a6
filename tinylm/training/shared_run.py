"""Sending a training run from rank 0 to the other ranks: configuration, tokenizer, weights and the last save."""

from pathlib import Path

from tinylm.config.run import RunConfig
from tinylm.distributed.ranks import Ranks
from tinylm.models.adapter import add_adapter
from tinylm.run_directory.directory import LastSave, ShardOnlyRun
from tinylm.run_directory.weights import WHOLE
from tinylm.text.run_tokens import open_folder
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.parallel import build_for_rows, rank_shard, restore_rows
from tinylm.training.run import TrainingRun
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_model


def share_run(run: TrainingRun, ranks: Ranks) -> None:
    """Send a run from rank 0 to the other ranks, which receive it with `receive_run`. Does nothing for a single rank.

    Raises UsageError for a device that several processes cannot use, and PeerError if another rank fails.
    """
    if ranks.size == 1:
        return
    ranks.require_device(run.runtime.device)
    ranks.announce()
    save = run.resume_from
    ranks.first(
        {
            "path": str(run.directory.path.absolute()),
            "config": run.config.to_json(),
            "tokenizer": run.tokenizer.to_str(),
            "tokens": str(run.tokens.path.absolute()),
            "save": None if save is None else save.to_json(),
            "parallel": run.parallel,
        }
    )
    if save is None or run.shard == WHOLE:
        ranks.broadcast(dict(run.model.named_parameters()))
    ranks.gather(None)  # every rank has opened the token files, which may now be moved


def receive_run(ranks: Ranks) -> TrainingRun:
    """The run that rank 0 sends with `share_run`.

    Raises TinyLMError if this rank cannot take part, and PeerError if another rank fails.
    """
    ranks.wait()
    shared = ranks.first(None)
    path, config = Path(shared["path"]), RunConfig.from_json(shared["config"])
    _, runtime, data = config.training_parts(path)
    ranks.require_device(runtime.device)
    tokenizer = Tokenizer.parse(shared["tokenizer"], config.tokenizer.special, path / "tokenizer.json")
    tokens = open_folder(Path(shared["tokens"]), data, tokenizer)
    save = None if shared["save"] is None else LastSave.from_json(shared["save"])
    shard, rows = rank_shard(shared["parallel"], config, ranks), None
    if shard == WHOLE:
        model = _receive_model(config, ranks)
    elif save is None:
        rows = ranks.broadcast({}, lambda tensor: shard.rows(tensor).clone())
        model = build_for_rows(config, rows)
    else:
        model, rows = restore_rows(config, save, shard)
    ranks.gather(None)
    return TrainingRun(ShardOnlyRun(path), config, model, tokenizer, tokens, save, ranks, shared["parallel"], rows)


def _receive_model(config: RunConfig, ranks: Ranks) -> Transformer:
    model = build_model(config.model)
    if config.adapter is not None:
        add_adapter(model, config.adapter)
    parameters = dict(model.named_parameters())
    for name, tensor in ranks.broadcast({}).items():
        parameters[name].data = tensor
    return model
