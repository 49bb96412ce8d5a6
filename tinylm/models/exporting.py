"""Export a model, trained by tinylm or imported, as a Hugging Face folder or a GGUF file, and adapters for PEFT."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinylm.config.run import run_of
from tinylm.config.validation import check_choice, require
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.export_folder import check_folder_free, replacing_folder
from tinylm.formats.gguf_header import MAGIC
from tinylm.formats.gguf_writer import SAMPLES, check_name, from_line, make_modelfile, modelfile_path, write_gguf
from tinylm.formats.huggingface import FOLDER_FILES, rebuilds_tokenizer, write_folder
from tinylm.formats.imported import ForeignModel
from tinylm.models.export_adapter import export_adapter
from tinylm.models.open import find_model, open_model
from tinylm.reporter import LogReporter, Reporter
from tinylm.run_directory.find_run import newest_model
from tinylm.run_directory.loading import LoadedModel, restore_model
from tinylm.system.files import open_regular, resolve_links, write_text
from tinylm.text.tokenizer import Tokenizer

FORMATS = ("hf", "gguf", "peft")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DEFAULT_GGUF_DTYPE = "f16"
TOLERANCE = 1e-4  # in fp32, relative to the largest absolute logit, or to 1 if that is larger


@dataclass(frozen=True)
class Exported:
    """An export that was written and verified.

    family: the model family (of an adapter, its base model's) as Hugging Face names it, or the architecture as GGUF
        names it.
    difference: the largest difference between the logits of the export and of the model, or of an adapter's; `None` for
        GGUF, where tensors and tokens are compared instead.
    """

    path: Path
    family: str
    difference: float | None


def export_model(
    model: str | Path | None = None,
    *,
    to: str,
    out: str | Path,
    dtype: str | None = None,
    base: str | Path | None = None,
    force: bool = False,
    reporter: Reporter | None = None,
) -> Exported:
    """Write a model for other tools, and verify it before it appears at its path.

    model: as in `load`; for peft, the directory of a LoRA adapter. Default: the newest model under checkpoints/.
    to: hf, a folder for transformers and vLLM; gguf, a file for llama.cpp and ollama, with a Modelfile beside it; or
        peft, a folder for PEFT.
    dtype: of the weights: f32, f16 or bf16, and for GGUF q8_0. Default: their own; for GGUF f16.
    base: for peft, the base model of the adapter. Default: the one that `find_base_model` finds.
    force: replace an earlier export at `out`.

    Raises UsageError for a model that the format cannot represent and for a path that cannot be used; TinyLMError for
    damaged files, if writing fails, and if the export differs from the model. An earlier export at `out` is then
    unchanged, unless only the Modelfile cannot be written.
    """
    check_choice("to", to, FORMATS)
    check_choice("dtype", dtype or "f32", (*DTYPES, "q8_0") if to == "gguf" else tuple(DTYPES))
    reporter = reporter or LogReporter()
    require(base is None or to == "peft", '`base` is for `to="peft"`; leave it out.')
    if to == "peft":
        require(model is not None, "Name the adapter to export.")
        require(dtype is None, '`dtype` has no effect with `to="peft"`, which stores adapters in fp32; leave it out.')
        written = export_adapter(
            Path(str(model)), Path(out), None if base is None else Path(base), reporter, force=force
        )
        return Exported(Path(out), written.family, written.difference)
    path = newest_model(reporter) if model is None else find_model(Path(model), reporter)
    out = Path(out)
    _check_free(out, path, to, force)
    opened = open_model(path)
    if to == "gguf":
        exported = _foreign(opened)
        architecture = write_gguf(out, exported, dtype or DEFAULT_GGUF_DTYPE, name=run_of(path).stem)
        try:
            write_text(modelfile_path(out), make_modelfile(out, exported))
        except OSError as error:
            raise TinyLMError(f"Cannot write {modelfile_path(out)}: {error.strerror or error}.") from error
        return Exported(out, architecture, None)
    with replacing_folder(out) as folder:
        family = write_folder(folder, _foreign(opened), DTYPES[dtype] if dtype else None)
        difference = _compare(opened, open_model(folder), out)
    if rebuilds_tokenizer(family, opened.tokenizer.to_str()):
        reporter.warn(
            "AutoTokenizer of transformers 5 makes Qwen's own tokenizer for every model of the type qwen2, which gives "
            f'this model other tokens. Load it with transformers.PreTrainedTokenizerFast.from_pretrained("{out}").'
        )
    return Exported(out, family, difference)


def _foreign(opened: LoadedModel) -> ForeignModel:
    return ForeignModel(
        family=opened.config.family,
        config=opened.config.model,
        tensors=opened.weights.tensors,
        tokenizer=opened.tokenizer.to_str(),
        special=opened.tokenizer.special,
        chat_template=opened.config.tokenizer.chat_template,
    )


def _check_free(out: Path, source: Path, to: str, force: bool) -> None:
    """Raise UsageError if an export may not be written to `out`."""
    same = resolve_links(out) == resolve_links(source)
    require(not same, f"{out} is the model to export, which is never overwritten; choose another `out`.")
    if to == "gguf":
        _check_gguf_free(out, force)
    else:
        check_folder_free(out, FOLDER_FILES, force)


def _check_gguf_free(out: Path, force: bool) -> None:
    """Raise UsageError unless `out` ends in .gguf, and neither the file nor its Modelfile exists.

    With `force`, a GGUF file and a Modelfile for it may exist.
    """
    check_name(out)
    if out.suffix != ".gguf":
        raise UsageError(f"{out} does not end in .gguf, as the name of such a file does; add that to `out`.")
    contents = {out: MAGIC, modelfile_path(out): from_line(out).encode()}
    for file, content in contents.items():
        if not os.path.lexists(file):
            continue
        try:
            with open_regular(file) as opened:
                is_export = content in opened.read(4096)
        except OSError as error:
            raise UsageError(f"{file} is not an earlier export: {error.strerror}; choose another `out`.") from error
        if not is_export:
            raise UsageError(f"{file} is not an earlier export; choose another `out`.")
        if not force:
            raise UsageError(f"{file} exists; choose another `out`, or replace it with `force`.")


@torch.no_grad()
def _compare(original: LoadedModel, written: LoadedModel, out: Path) -> float:
    """The largest difference between the logits of an export and of the original model.

    Raises TinyLMError if the logits differ by more than TOLERANCE from those of the original model with the exported
    weights, if a tensor, the tokens of a text or a special token differ, or if a logit is not finite.
    """
    for name, tensor in original.weights.tensors.items():
        found = written.weights.tensors.get(name)
        _require_same(found is not None and torch.equal(found, tensor.to(found.dtype)), out, f"the tensor {name}")
    _require_same(_special_ids(written.tokenizer) == _special_ids(original.tokenizer), out, "a special token")
    for text in SAMPLES:
        if not original.tokenizer.unknown_characters(text):
            _require_same(
                _ids(original.tokenizer, text) == _ids(written.tokenizer, text), out, f"the tokens of {text!r}"
            )
    rounded = {name: tensor.float() for name, tensor in written.weights.tensors.items()}
    rounded_original = restore_model(original.config, rounded, out).eval()
    ids = torch.randint(
        original.tokenizer.vocab_size,
        (2, min(64, rounded_original.context)),
        generator=torch.Generator().manual_seed(0),
    )  # (2, T)
    exported = written.network.float()
    logits, expected, unrounded = (  # (2, T, V) each
        network.logits(network.probe(ids).hidden) for network in (exported, rounded_original, original.network.float())
    )
    if not expected.isfinite().all():
        raise TinyLMError("The logits of the model are not finite numbers; nothing was exported.")
    difference = _largest(logits - expected)
    _require_same(difference <= TOLERANCE * max(1.0, _largest(expected)), out, f"a logit, by {difference:.1e},")
    return _largest(logits - unrounded)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(i) for i in tokenizer.encode(text)]


def _special_ids(tokenizer: Tokenizer) -> tuple[object, ...]:
    return tokenizer.end_of_text_id, tokenizer.stop_ids, tokenizer.bos_id


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


def _require_same(same: bool, out: Path, what: str) -> None:
    if not same:
        raise TinyLMError(f"{what[0].upper()}{what[1:]} of {out} differs from the model's; nothing was exported.")
