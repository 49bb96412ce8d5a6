"""Export a model, trained by tinylm or imported, as a Hugging Face folder, a GGUF file or a web page, and adapters for
PEFT.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinylm.adapters.adapter import adapter_tensors
from tinylm.config.run import AdapterConfig, RunConfig, run_of
from tinylm.config.validation import check_choice, require
from tinylm.errors import TinyLMError, UsageError, concerning
from tinylm.formats.families import resolve
from tinylm.formats.family import ForeignModel
from tinylm.formats.gguf_file import MAGIC
from tinylm.formats.gguf_model import (
    QUANTIZED,
    SAMPLES,
    check_name,
    from_line,
    make_modelfile,
    modelfile_path,
    write_gguf,
)
from tinylm.formats.huggingface import (
    FOLDER_FILES,
    check_folder_free,
    rebuilds_tokenizer,
    replacing_folder,
    write_folder,
)
from tinylm.formats.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, EMBEDDING_PARTS, LINEAR_PARTS, is_adapter_folder
from tinylm.formats.peft_writer import convert_adapter, write_adapter
from tinylm.machine.torch_settings import usual_settings
from tinylm.models import web_page
from tinylm.models.load_adapter import AdapterSpec, family_of, load_adapter, load_base_model, set_adapter_scale
from tinylm.models.logits import logit_difference, probe_logits, require_equal_logits
from tinylm.models.open import find_model, open_model
from tinylm.reporter import LogReporter, Reporter
from tinylm.run_directory import tensor_file
from tinylm.run_directory.layout import find_run, newest_model
from tinylm.run_directory.loading import LoadedModel, read_config, restore_model
from tinylm.system.files import open_regular, resolve_links, write_text
from tinylm.text.chat_format import chat_format
from tinylm.text.tokenizer import Tokenizer

_HUB_SNAPSHOT = re.compile(r".*[/\\]models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+")

FORMATS = ("hf", "gguf", "html", "peft")
DTYPES = {name.lower(): dtype for name, dtype in tensor_file.DTYPES.items()}
DEFAULT_DTYPES = {"gguf": "f16", "html": "int8"}


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


def export_adapter(
    adapter: Path, out: Path, model: Path | None, reporter: Reporter, *, force: bool = False
) -> Exported:
    """Write a LoRA adapter of tinylm as a folder that `PeftModel.from_pretrained(base, out)` of PEFT loads.

    adapter: run directory or name. model: the base model; default: the one that `find_base_model` finds.
    out: folder to write. force: replace an exported adapter there, and nothing else.

    The export is loaded again and its logits are compared before it appears at `out`.

    Raises UsageError, before anything is written, for an adapter that PEFT cannot represent, for a path that is not
    free, and if no base model is found; TinyLMError for damaged files, and if the logits differ.
    """
    adapter = find_run(adapter, reporter)
    if is_adapter_folder(adapter):
        raise UsageError(f"{adapter} is in PEFT's format already.")
    config = read_config(adapter).adapter
    if config is None:
        raise UsageError(f"{adapter} is a model, and PEFT's format is for LoRA adapters; choose another `to`.")
    if config.kind != "lora":
        raise UsageError(f"{adapter} is a {config.kind} adapter; PEFT has LoRA, but not this kind.")
    if config.labels:
        raise UsageError(f"{adapter} makes a classifier of its base; merge both, and export the model.")
    check_folder_free(out, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), force)
    base = load_base_model(adapter, config, model and find_model(model, reporter), "cpu")
    network = base.network.float()
    loaded = load_adapter(network, AdapterSpec(adapter), base.config)
    family, lora, fields = _in_peft(base.config, config, adapter_tensors(loaded.layers))
    expected = probe_logits(network)
    set_adapter_scale(loaded.layers, 0.0)
    with replacing_folder(out) as folder:
        write_adapter(folder, lora, fields)
        load_adapter(network, AdapterSpec(folder), base.config)
        difference = require_equal_logits(probe_logits(network), expected, "the exported adapter", "exported")
    return Exported(out, family, difference)


def write_peft_copy(folder: Path, config: RunConfig, adapter: AdapterConfig, tensors: dict[str, Tensor]) -> None:
    """Write a LoRA of a run in PEFT's format, unless PEFT or transformers cannot represent it.

    config: of the adapter's run. tensors: by the names of `adapter_tensors`. Raises OSError.
    """
    if adapter.labels:
        return
    try:
        _, lora, fields = _in_peft(config, adapter, tensors)
    except UsageError:  # a base of no family of Hugging Face, or a module that PEFT cannot adapt
        return
    write_adapter(folder, lora, fields)


def _in_peft(
    config: RunConfig, adapter: AdapterConfig, tensors: dict[str, Tensor]
) -> tuple[str, dict[str, Tensor], dict[str, Any]]:
    """The name of the base's family, and a LoRA as `convert_adapter` returns it.

    config: of the base model. tensors: by the names of `adapter_tensors`.
    """
    family = family_of(config)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part = next(part for part in (*LINEAR_PARTS, *EMBEDDING_PARTS) if name.endswith(f".{part}"))
        modules.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
    factors = {}
    for module, parts in modules.items():
        a, b = (parts[name] for name in (EMBEDDING_PARTS if EMBEDDING_PARTS[0] in parts else LINEAR_PARTS))
        factors[module] = a, b
    # The path of the model that the adapter was trained on, or its name on the hub if it is in the hub's cache
    match = _HUB_SNAPSHOT.fullmatch(adapter.base)
    base = f"{match[1]}/{match[2]}" if match else adapter.base
    return family.name, *convert_adapter(family, config.model, adapter, factors, base)


@concerning("model", "base")
@usual_settings()
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
    to: hf, a folder for transformers and vLLM; gguf, a file for llama.cpp and ollama, with a Modelfile beside it; html,
        a page that generates text in a browser; or peft, a folder for PEFT.
    dtype: of the weights: f32, f16 or bf16, and for GGUF one of QUANTIZED; of a page int8, f16 or f32. Default: their
        own; for GGUF f16, for a page int8.
    base: for peft, the base model of the adapter. Default: the one that `find_base_model` finds.
    force: replace an earlier export at `out`.

    Raises UsageError for a model that the format cannot represent and for a path that cannot be used; TinyLMError for
    damaged files, if writing fails, and if the export differs from the model. An earlier export at `out` is then
    unchanged, unless only the Modelfile cannot be written.
    """
    check_choice("to", to, FORMATS)
    dtypes = {"gguf": (*DTYPES, *QUANTIZED), "html": web_page.DTYPES}.get(to, tuple(DTYPES))
    check_choice("dtype", dtype or "f32", dtypes)
    reporter = reporter or LogReporter()
    require(base is None or to == "peft", '`base` is for `to="peft"`; leave it out.')
    if to == "peft":
        require(model is not None, "Name the adapter to export.")
        require(dtype is None, '`dtype` has no effect with `to="peft"`, which stores adapters in fp32; leave it out.')
        return export_adapter(Path(str(model)), Path(out), None if base is None else Path(base), reporter, force=force)

    # The model, and a path that is free for it
    path = newest_model(reporter) if model is None else find_model(Path(model), reporter)
    out = Path(out)
    same = resolve_links(out) == resolve_links(path)
    require(not same, f"{out} is the model to export, which is never overwritten; choose another `out`.")
    if to == "gguf":
        check_name(out)
        _check_free({out: MAGIC, modelfile_path(out): from_line(out).encode()}, force)
    elif to == "html":
        _check_free({out: web_page.MARK}, force)
    else:
        check_folder_free(out, FOLDER_FILES, force)
    opened = open_model(path)

    # A file, which is compared with the model as it is written
    if to == "gguf":
        is_decoder = opened.config.model.architecture == "decoder"
        advice = 'choose `to="hf"`' if is_decoder else 'for `to="hf"`, train a decoder on the same texts'
        require(not opened.config.labels, f"{path} is a classifier, which GGUF cannot represent; {advice}.")
        exported = _foreign(opened)
        architecture = write_gguf(out, exported, dtype or DEFAULT_DTYPES[to], name=run_of(path).stem)
        try:
            write_text(modelfile_path(out), make_modelfile(out, exported))
        except OSError as error:
            raise TinyLMError(f"Cannot write {modelfile_path(out)}: {error.strerror or error}.") from error
        return Exported(out, architecture, None)

    # A page, whose rounded weights are compared
    if to == "html":
        return _write_web_page(opened, out, dtype or DEFAULT_DTYPES[to], run_of(path).stem)

    # A folder, which is opened again and compared before it appears
    with replacing_folder(out) as folder:
        family = write_folder(folder, _foreign(opened), DTYPES[dtype] if dtype else None)
        difference = check_export(opened, open_model(folder), out)
    if rebuilds_tokenizer(family, opened.tokenizer.to_str()):
        reporter.warn(
            "AutoTokenizer of transformers 5 makes Qwen's own tokenizer for every model of the type qwen2, which gives "
            f'this model other tokens. Load it with transformers.PreTrainedTokenizerFast.from_pretrained("{out}").'
        )
    return Exported(out, family, difference)


def _write_web_page(opened: LoadedModel, out: Path, dtype: str, name: str) -> Exported:
    config, tokenizer = opened.config, opened.tokenizer
    web_page.require_representable(config.model, tokenizer, name)
    weights = web_page.round_weights(opened.weights.tensors, config.model, dtype)
    template = config.tokenizer.chat_template
    format = None if template is None else chat_format(template, tokenizer)
    page = web_page.render_web_page(name, resolve(config.model), tokenizer, config.data, weights, format)
    expected = probe_logits(opened.network.float())
    rounded = web_page.rounded_tensors(weights, config.model)
    difference = logit_difference(probe_logits(restore_model(config, rounded, out)), expected)
    try:
        write_text(out, page)
    except OSError as error:
        raise TinyLMError(f"Cannot write {out}: {error.strerror or error}.") from error
    return Exported(out, config.model.architecture, difference)


def _foreign(opened: LoadedModel) -> ForeignModel:
    return ForeignModel(
        family=opened.config.family,
        config=opened.config.model,
        tensors=opened.weights.tensors,
        tokenizer=opened.tokenizer.to_str(),
        special=opened.tokenizer.special,
        chat_template=opened.config.tokenizer.chat_template,
    )


@concerning("out")
def _check_free(contents: Mapping[Path, bytes], force: bool) -> None:
    """Raise UsageError unless the first file has the ending of its format, and none of the files exists.

    With `force`, files with these contents near their beginnings, earlier exports, may exist.
    """
    out, *_ = contents
    ending = ".html" if contents[out] == web_page.MARK else ".gguf"
    require(
        out.suffix == ending, f"{out} does not end in {ending}, as the name of such a file does; add that to `out`."
    )
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


def check_export(original: LoadedModel, written: LoadedModel, out: Path) -> float:
    """The largest difference between the logits of an export and of the original model.

    Raises TinyLMError if the logits differ by more than rounding from those of the original model with the exported
    weights, if a tensor, the tokens of a text or a special token differ, or if a logit is not finite.
    """
    for name, tensor in original.weights.tensors.items():
        found = written.weights.tensors.get(name)
        _require_same(found is not None and torch.equal(found, tensor.to(found.dtype)), out, f"the tensor {name}")
    _require_same(_special_ids(written.tokenizer) == _special_ids(original.tokenizer), out, "a special token")
    for text in SAMPLES:
        if not original.tokenizer.unknown_characters(text):
            before, after = (model.tokenizer.encode(text).tolist() for model in (original, written))
            _require_same(before == after, out, f"the tokens of {text!r}")
    logits = probe_logits(written.network.float())
    expected = unrounded = probe_logits(original.network.float())
    if written.weights.dtypes != original.weights.dtypes:
        rounded = {name: tensor.float() for name, tensor in written.weights.tensors.items()}
        expected = probe_logits(restore_model(original.config, rounded, out))
    if not expected.isfinite().all():
        raise TinyLMError("The logits of the model are not finite numbers; nothing was exported.")
    require_equal_logits(logits, expected, f"{out} and of the model", "exported")
    return logit_difference(logits, unrounded)


def _special_ids(tokenizer: Tokenizer) -> tuple[object, ...]:
    return tokenizer.end_of_text_id, tokenizer.stop_ids, tokenizer.bos_id


def _require_same(same: bool, out: Path, what: str) -> None:
    if not same:
        raise TinyLMError(f"{what[0].upper()}{what[1:]} of {out} differs from the model's; nothing was exported.")
