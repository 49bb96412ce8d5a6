"""Merge a LoRA adapter into its base model, or undo a merge. Both write a run without adapters."""

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tinylm.adapters.adapter import Replacement
from tinylm.adapters.lora import merge_lora
from tinylm.config.run import RunConfig
from tinylm.config.validation import check_choice
from tinylm.errors import NotMergeableError, TinyLMError, UsageError, concerning
from tinylm.formats.peft import adapter_digest, is_adapter_folder
from tinylm.machine.device import DTYPES
from tinylm.models.find_base import find_base_model
from tinylm.models.load_adapter import (
    AdapterSpec,
    load_adapted_model,
    load_adapter,
    load_base_model,
    read_adapter_config,
)
from tinylm.models.logits import logit_difference, probe_logits, require_equal_logits
from tinylm.models.open import find_model, open_model
from tinylm.reporter import Reporter
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import find_run, replaces
from tinylm.run_directory.loading import load_model, read_weights
from tinylm.run_directory.lock_and_commit import reserve
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Transformer

MAX_LOSS = 0.1  # share of an adapter's effect that rounding may take without a warning
MAX_WRITTEN_LOSS = 0.9  # above which nothing is written; of an effect that is lost, fp32 computes nearly 1


@dataclass(frozen=True)
class Merge:
    """A run that was written by merging.

    difference: largest difference between the logits of the model that was written and of the base with the adapter
    change: largest difference between the logits of the base with and without the adapter
    """

    run: Path
    difference: float
    change: float


@concerning("model")
def merge_adapter(
    adapter: Path,
    out: Path,
    model: Path | None,
    reporter: Reporter,
    *,
    dtype: str = "auto",
    force: bool = False,
    undo: bool = False,
) -> Merge:
    """Write a run with the adapter merged into its base; with `undo`, one with the adapter subtracted from `model`.

    adapter: a LoRA of tinylm or PEFT
    model: the base; with `undo`, the merged model. Required with `undo` and for an adapter of PEFT; otherwise by
        default the base that `find_base_model` finds
    dtype: number format of the weights to write: auto, that of the base, or fp32
    force: replace an existing run at `out`

    Raises NotMergeableError for an adapter that is not a LoRA; UsageError if `out` is also an input, a required `model`
    is missing, no base model is found, or `model` was not made by merging the adapter; TinyLMError for damaged files,
    and if the merged model computes other logits or 16 bits cannot hold the effect of the adapter.
    """
    # The adapter, and the model to merge it into or take it out of
    check_choice("dtype", dtype, ("auto", "fp32"))
    adapter = find_run(adapter, reporter)
    model = model and find_model(model, reporter)
    config = None if is_adapter_folder(adapter) else read_adapter_config(adapter)[1]
    model = model if model or undo or config is None else find_base_model(adapter, config.base, config.base_digest)
    if any(replaces(out, source) for source in (adapter, model) if source is not None):
        raise UsageError(f"{out} is one of the models to merge, which are never overwritten; choose another `out`.")
    with reserve(out, force) as staging:
        # The merged weights
        source = _Source.of(adapter)
        merged = _subtract(source, model) if undo else _add(source, model)
        tensors, dtypes = merged.tensors, merged.base_dtypes
        if dtype == "auto":  # an untied output layer has the dtype of the embedding
            tensors = {name: t.to(dtypes.get(name, dtypes["embedding.weight"])) for name, t in tensors.items()}
        if undo and not merged.config.merged_steps:
            reporter.note("The merged model does not record the step of its base, so step 0 is recorded.")

        # A run with them, which is read again and compared before it appears
        run = RunDirectory.create(out, merged.config, merged.tokenizer)
        run.save_for_inference(tensors, merged.config, merged.step, merged.val_loss)
        written = load_model(staging).network.float()
        if undo:
            load_adapter(written, AdapterSpec(adapter), merged.config)
        difference = logit_difference(probe_logits(written), merged.expected)
        _check_rounding(tensors, difference, merged.change, reporter)
        run.commit()
    reporter.note(
        f"Checked: merged and unmerged logits differ by {difference:.1e}; the adapter changes the base's by "
        f"{merged.change:.1e}."
    )
    return Merge(out, difference, merged.change)


def _check_rounding(tensors: dict[str, Tensor], difference: float, change: float, reporter: Reporter) -> None:
    """Warn if the rounding of 16-bit weights takes more than MAX_LOSS of an adapter's effect.

    difference, change: as in Merge. Raises TinyLMError if it takes more than MAX_WRITTEN_LOSS.
    """
    dtypes = {tensor.dtype for tensor in tensors.values()}
    names = " and ".join(name for name, dtype in DTYPES.items() if dtype in dtypes and name != "fp32")
    if not names or difference <= MAX_LOSS * change:
        return
    effect = f"that changes the logits by {change:.1e}, and rounding changes them by {difference:.1e}"
    if not difference <= MAX_WRITTEN_LOSS * change:
        raise TinyLMError(
            f"Rounding the weights to {names} loses nearly all of the adapter's effect: {effect}. Nothing was written; "
            '`dtype="fp32"` keeps the effect.'
        )
    reporter.warn(
        f'Rounding the weights to {names} loses a part of the adapter\'s effect: {effect}. `dtype="fp32"` keeps it.'
    )


@dataclass(frozen=True)
class _Source:
    """An adapter to merge. config: of its run; `None` for a PEFT adapter, which records no step and no loss."""

    path: Path
    config: RunConfig | None
    digest: str
    step: int | None = None
    val_loss: float | None = None

    @classmethod
    def of(cls, path: Path) -> Self:
        """The adapter at a path, with its digest. Raises NotMergeableError for an adapter that is not a LoRA."""
        if is_adapter_folder(path):
            return cls(path, None, adapter_digest(path))
        config, adapter = read_adapter_config(path)
        if adapter.kind != "lora":
            raise NotMergeableError(path, adapter.kind)
        saved = read_weights(path, config)
        return cls(path, config, saved.digest, saved.step, saved.val_loss)


@dataclass(frozen=True)
class _Merged:
    """The model to write.

    tensors: in fp32. base_dtypes: of the base's tensors. config: of the new run, with its merges
    expected: `probe_logits` of the base with the adapter; with `undo`, those of the model from which it was subtracted.
    change: as in Merge.
    """

    tensors: dict[str, Tensor]
    base_dtypes: dict[str, torch.dtype]
    config: RunConfig
    tokenizer: Tokenizer
    step: int
    val_loss: float | None
    expected: Tensor
    change: float


def check_merged(base: Transformer, adapted: Transformer, merged: Transformer) -> tuple[float, float]:
    """The `logit_difference` of the merged and the adapted model, and that of the adapted model and the base.

    Raises TinyLMError if the logits of the merged and the adapted model are not equal up to rounding or not finite, and
    if the adapter has no effect.
    """
    base_logits, adapted_logits, merged_logits = map(probe_logits, (base, adapted, merged))
    if base_logits.shape != adapted_logits.shape:  # the adapter has a new output layer
        base_logits = torch.zeros_like(adapted_logits)
    change = logit_difference(adapted_logits, base_logits)
    if not math.isfinite(change):
        raise TinyLMError("The logits of the model with its adapter are not finite numbers, so it cannot be merged.")
    difference = require_equal_logits(merged_logits, adapted_logits, "the merged and the adapted model", "written")
    if change == 0.0:
        raise TinyLMError("The adapter has no effect on the model, so there is nothing to merge; train it for longer.")
    return difference, change


def _add(source: _Source, model: Path | None) -> _Merged:
    # The base, and two copies of it with the adapter, of which one is merged
    spec, adapter = [AdapterSpec(source.path)], None if source.config is None else source.config.adapter
    base, base_config, tokenizer, weights = load_base_model(source.path, adapter, model, "cpu")
    adapted, config, _, (loaded,) = load_adapted_model(spec, model, "cpu")
    merged, _, _, _ = load_adapted_model(spec, model, "cpu")
    for network in (base, adapted, merged):  # 16-bit weights are merged in fp32, and rounded once
        network.float()
    merge_lora(merged)
    _, change = check_merged(base, adapted, merged)

    # What is recorded of the merges
    step = weights.step if source.step is None else source.step
    digests: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    unmerged_digest = None
    replaces = any(isinstance(layer, Replacement) for layer in loaded.layers.values())
    if not replaces and config.model == base_config.model:  # else the merge cannot be undone
        digests, steps = (*base_config.merged, source.digest), _merged_steps(base_config, weights.step)
        steps = (*steps, step) if steps else ()
        base_digest = weights.digest if adapter is None else adapter.base_digest
        unmerged_digest = base_config.unmerged_digest or (None if base_config.merged else base_digest)
    if loaded.chat_template is not None:
        config = replace(config, tokenizer=replace(config.tokenizer, chat_template=loaded.chat_template))
    return _Merged(
        tensors=merged.state_dict(),
        base_dtypes=weights.dtypes,
        config=_new_config(
            config,
            source,
            data=None if source.config is None else source.config.data,
            merged=digests,
            merged_steps=steps,
            unmerged_digest=unmerged_digest,
        ),
        tokenizer=tokenizer,
        step=step,
        val_loss=source.val_loss,
        expected=probe_logits(adapted),
        change=change,
    )


def _subtract(source: _Source, model: Path | None) -> _Merged:
    """Subtract the adapter from `model`, and check that the result with the adapter has the logits of `model`."""
    if model is None:
        raise UsageError("`undo` takes the adapter out of a merged model; name that with `model`.")
    merged, config, tokenizer, weights = open_model(model)
    if source.config is not None and source.config.labels:
        raise UsageError(f"{source.path} replaced the output layer of its base, so its merge cannot be undone.")
    if source.digest not in config.merged:
        raise UsageError(
            f"{model} was not made by merging {source.path}, or in a way that cannot be undone (if it replaced "
            "parameters, or untied the output layer); name another adapter."
        )
    base, _, _, _ = open_model(model)
    for network in (base, merged):  # as in `_add`
        network.float()
    load_adapter(base, AdapterSpec(source.path), config, is_merged=True)
    merge_lora(base, sign=-1.0)
    adapted = copy.deepcopy(base)
    load_adapter(adapted, AdapterSpec(source.path), config)
    _, change = check_merged(base, adapted, merged)
    index, steps = config.merged.index(source.digest), _merged_steps(config, weights.step)
    digests, steps = config.merged[:index] + config.merged[index + 1 :], steps[: index + 1] + steps[index + 2 :]
    return _Merged(
        tensors=base.state_dict(),
        base_dtypes=weights.dtypes,
        config=_new_config(config, source, merged=digests, merged_steps=steps, unmerged_digest=config.unmerged_digest),
        tokenizer=tokenizer,
        step=steps[-1] if steps else 0,
        val_loss=None,
        expected=probe_logits(merged),
        change=change,
    )


def _merged_steps(config: RunConfig, step: int) -> tuple[int, ...]:
    """The steps of the base of a model and of each adapter merged into it; empty if one was not recorded.

    step: of the weights, used if nothing was merged into them
    """
    steps = config.merged_steps or (() if config.merged or config.unmerged_digest else (step,))
    return steps if len(steps) == len(config.merged) + 1 else ()


def _new_config(base: RunConfig, source: _Source, **merges: Any) -> RunConfig:
    """The configuration of the new run. merges: its fields about merges, and `data`"""
    runtime = base.runtime if source.config is None else source.config.runtime or base.runtime
    return RunConfig.new(model=base.model, tokenizer=base.tokenizer, family=base.family, runtime=runtime, **merges)
