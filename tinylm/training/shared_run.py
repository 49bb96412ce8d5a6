"""The run that rank 0 shares with the other ranks of a training in several processes."""

from pathlib import Path

from tinylm.config.run import RunConfig
from tinylm.jobs.run_tokens import open_folder
from tinylm.models.teachers import open_teacher
from tinylm.run_directory.directory import LastSave, ShardOnlyRun
from tinylm.run_directory.loading import trained_weights
from tinylm.run_directory.weights import WHOLE
from tinylm.system.ranks import Ranks
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.parallel import build_for_rows, rank_shard, restore_rows
from tinylm.training.run import TrainingRun
from tinylm.training.session import Session
from tinylm.transformer.build import build_model


def share_run(run: TrainingRun, session: Session) -> None:
    """Send a run from rank 0 to the other ranks, which receive it with `receive_run`. Does nothing for a single rank.

    Raises UsageError for a device that several processes cannot use, and PeerError if another rank fails.
    """
    ranks = session.ranks
    if ranks.size == 1:
        return
    if run.parallel == "fsdp":
        session.reporter.note(f"The model is sharded among {ranks.size} processes.")
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
            "teachers": [str(teacher.path.absolute()) for teacher in run.teachers],
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
        model = build_model(config.model)
        trained_weights(config.adapter).add(model)
        parameters = dict(model.named_parameters())
        for name, tensor in ranks.broadcast({}).items():
            parameters[name].data = tensor
    elif save is None:
        rows = ranks.broadcast({}, lambda tensor: shard.rows(tensor).clone())
        model = build_for_rows(config, rows)
    else:
        model, rows = restore_rows(config, save, shard)
    ranks.gather(None)
    teachers = tuple(open_teacher(Path(teacher)) for teacher in shared["teachers"])
    directory, parallel = ShardOnlyRun(path), shared["parallel"]
    return TrainingRun(directory, config, model, tokenizer, tokens, save, ranks, parallel, rows, teachers)
