"""Import a model of another tool, a Hugging Face folder or a GGUF file, as a run."""

from dataclasses import dataclass
from pathlib import Path

from tinylm.errors import UsageError
from tinylm.machine.torch_settings import usual_settings
from tinylm.models.open import find_model, imported_run, is_foreign, open_model
from tinylm.reporter import LogReporter, Reporter
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import MODEL_FILE, replaces
from tinylm.run_directory.lock_and_commit import reserve
from tinylm.run_directory.weights import check_weights_file
from tinylm.transformer.build import count_parameters


@dataclass(frozen=True)
class Imported:
    """An imported model: path of its run, its family (Hugging Face's model type) and its number of parameters."""

    run: Path
    family: str
    parameters: int


@usual_settings()
def import_model(
    source: str | Path, out: str | Path | None = None, *, force: bool = False, reporter: Reporter | None = None
) -> Imported:
    """Write a run with the weights and the tokenizer of a foreign model.

    source: a Hugging Face folder, hf:OWNER/NAME[@REVISION], or a GGUF file.
    out: run directory to write. Default: the model's name under checkpoints/. force: replace an existing run there.

    The written file is read again before the run appears at `out`.

    Raises UsageError for a source or path that cannot be used, and TinyLMError for a failed download, for damaged files
    and for a model that tinylm cannot represent.
    """
    source, reporter = Path(source), reporter or LogReporter()
    path = find_model(source, reporter)
    if not is_foreign(path):
        raise UsageError(f"{path} is not a Hugging Face folder or a GGUF file; runs of tinylm need no import.")
    out = imported_run(source) if out is None else Path(out)
    if replaces(out, path):
        raise UsageError(f"{out} is the model to import, which is never overwritten; choose another `out`.")
    with reserve(out, force) as staging:
        model = open_model(path)
        run = RunDirectory.create(out, model.config, model.tokenizer)
        run.save_for_inference(model.weights.tensors, model.config, model.weights.step, model.weights.val_loss)
        check_weights_file(staging / MODEL_FILE, model.config)
        run.commit()
    return Imported(out, str(model.config.family), count_parameters(model.network)["total"])
