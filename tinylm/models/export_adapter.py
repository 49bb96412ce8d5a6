"""A LoRA adapter in PEFT's format, with the module names that its base model has in transformers."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinylm.adapters.adapter import adapter_tensors
from tinylm.config.run import AdapterConfig, RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.formats.export_folder import check_folder_free, replacing_folder
from tinylm.formats.peft import ADAPTER_WEIGHTS, EMBEDDING_PARTS, LINEAR_PARTS, is_adapter_folder
from tinylm.formats.peft_config import ADAPTER_CONFIG
from tinylm.formats.peft_writer import Factors, convert_adapter, write_adapter
from tinylm.models.adapter import AdapterSpec, load_adapter, load_base_model, set_adapter_scale
from tinylm.models.open import find_model
from tinylm.models.peft_adapter import family_of
from tinylm.reporter import Reporter
from tinylm.run_directory.find_run import find_run
from tinylm.run_directory.loading import read_config
from tinylm.transformer.stack import Transformer

TOLERANCE = 1e-4  # relative to the largest absolute logit, or to 1 if that is larger
_HUB_SNAPSHOT = re.compile(r".*[/\\]models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+")


@dataclass(frozen=True)
class ExportedAdapter:
    """An adapter that was exported in PEFT's format.

    path: its folder.
    family: the model type of its base in transformers.
    difference: the largest difference between the logits of the base with the adapter and with its export.
    change: the largest difference between the logits of the base with and without the adapter.
    """

    path: Path
    family: str
    difference: float
    change: float


def export_adapter(
    adapter: Path,
    out: Path,
    model: Path | None,
    reporter: Reporter,
    *,
    force: bool = False,
    base_name: str | None = None,
) -> ExportedAdapter:
    """Write a LoRA adapter of tinylm as a folder that `PeftModel.from_pretrained(base, out)` of PEFT loads.

    adapter: run directory or name. model: the base model; default: the one that `find_base_model`
        finds.
    out: folder to write. force: replace an exported adapter there, and nothing else.
    base_name: name of the base for PEFT: a name on the Hugging Face hub, or the folder of an exported model. Default:
        the folder, or the name on the hub, of the model that the adapter was trained on.

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
    check_folder_free(out, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), force)
    base = load_base_model(adapter, config, model and find_model(model, reporter), "cpu")
    family = family_of(base.config)
    network = base.network.float()
    logits_without_adapter = _logits(network)
    loaded = load_adapter(network, AdapterSpec(adapter), base.config)
    converted = convert_adapter(family, base.config.model, config, _factors(adapter_tensors(loaded.layers)))
    expected = _logits(network)
    set_adapter_scale(loaded.layers, 0.0)
    with replacing_folder(out) as folder:
        write_adapter(folder, family, converted, base_name or _recorded_name(config))
        load_adapter(network, AdapterSpec(folder), base.config)
        difference = (_logits(network) - expected).abs().max().item()
        if not difference <= TOLERANCE * max(1.0, expected.abs().max().item()):
            raise TinyLMError(f"The logits of the exported adapter differ by {difference:.2e}; nothing was exported.")
    change = (expected - logits_without_adapter).abs().max().item()
    return ExportedAdapter(out, family.name, difference, change)


def write_peft_copy(folder: Path, config: RunConfig, tensors: dict[str, Tensor]) -> None:
    """Write the adapter of a run in PEFT's format, unless PEFT or transformers cannot represent it.

    config: of the adapter's run. tensors: by the names of `adapter_tensors`. Raises OSError.
    """
    assert config.adapter is not None
    if config.adapter.kind != "lora":
        return
    try:
        family = family_of(config)
        converted = convert_adapter(family, config.model, config.adapter, _factors(tensors))
    except UsageError:  # a base of no family of Hugging Face, or a module that PEFT cannot adapt
        return
    write_adapter(folder, family, converted, _recorded_name(config.adapter))


def _factors(tensors: dict[str, Tensor]) -> Factors:
    """The low-rank matrices A and B of the adapted modules, by module name, from `adapter_tensors`."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part = next(part for part in (*LINEAR_PARTS, *EMBEDDING_PARTS) if name.endswith(f".{part}"))
        modules.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
    pairs = {}
    for module, parts in modules.items():
        a, b = (parts[name] for name in (EMBEDDING_PARTS if EMBEDDING_PARTS[0] in parts else LINEAR_PARTS))
        pairs[module] = (a, b)
    return pairs


@torch.inference_mode()
def _logits(model: Transformer) -> Tensor:
    """The logits (2, T, V) of fixed random tokens. Switches the model to evaluation mode."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (2, min(64, model.context)), generator=generator)
    return model.logits(model(ids).hidden)


def _recorded_name(config: AdapterConfig) -> str:
    """The path of the model that the adapter was trained on, or its name on the hub if it is in the hub's cache."""
    match = _HUB_SNAPSHOT.fullmatch(config.base)
    return f"{match[1]}/{match[2]}" if match else config.base
