"""tinylm merge-lora: an adapter and its base into one plain model."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinylm.commands.groups import with_groups
from tinylm.commands.model import ModelPath, complete_adapter, find_run
from tinylm.commands.new_run import new_run_at, new_run_config
from tinylm.commands.options import WHERE, OutputOptions, option
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.config import AdapterConfig, DataConfig, RunConfig
    from tinylm.model.stack import Transformer
    from tinylm.text.tokenizer import Tokenizer


@with_groups
def merge(
    adapter: Annotated[
        Path, typer.Argument(help="Adapter directory.", show_default=False, autocompletion=complete_adapter)
    ],
    out: Annotated[Path, option("Run directory to write.", WHERE, "DIR", "--out", "-o")],
    model: ModelPath = None,
    force: Annotated[bool, option("Replace an existing run.", WHERE, None, "--force")] = False,
    undo: Annotated[
        bool, option("Subtract the adapter from the merged model named by --model.", WHERE, None, "--undo")
    ] = False,
    *,
    output: OutputOptions,
) -> None:
    """Merge a LoRA adapter into its base model, and check that the merged model computes the same logits."""
    from tinylm.adapters.load import find_base, read_adapter_config
    from tinylm.checkpoint import RunFolder, read_weights

    console = output.console()
    adapter = find_run(console, adapter)
    model = model and find_run(console, model)
    adapter_config, settings = read_adapter_config(adapter)
    model = model if model or undo else find_base(adapter, settings)
    if any(out.resolve() == given.resolve() for given in (adapter, model) if given is not None):
        raise UsageError(f"{out} is read by this command and never overwritten; choose another folder with --out.")
    with new_run_at(out, force):
        if settings.kind != "lora":
            raise UsageError(
                f"{adapter} is a {settings.kind} adapter, which is no change of a matrix and cannot be merged; sample "
                "and eval take it with --adapter."
            )
        saved = read_weights(adapter, adapter_config)
        if undo:
            result = _unmerged(adapter, settings, saved.digest, model)
            history = result.history.without(saved.digest)
            step, val_loss = history.step, None
            if not history.steps:
                console.note("The merged model does not record the step of its base, so step 0 is recorded.")
        else:
            result = _merged(adapter, settings, model)
            history = result.history.plus(saved.digest, saved.step)
            step, val_loss = saved.step, saved.val_loss
        console.note(
            f"Checked: merged and unmerged logits differ by {result.difference:.1e}; the base's differ by "
            f"{result.change:.1e}."
        )
        base = result.config
        config = new_run_config(
            model=base.model,
            tokenizer=base.tokenizer,
            data=result.data,
            merged=history.merged,
            merged_steps=history.steps,
            unmerged_digest=base.unmerged_digest or (None if base.merged else settings.base_digest),
        )
        run = RunFolder.create(out, config, result.tokenizer)
        run.save_best(dict(result.network.state_dict()), config, step, val_loss)
        run.publish()
    if console.as_json:
        console.record({"run": str(out), "difference": result.difference, "change": result.change})
    else:
        console.result(str(out))


@dataclass(frozen=True)
class _History:
    """The adapters merged into some weights, in order, by digest, and the steps of the base and of each of them.

    `steps` is empty where nothing recorded them.
    """

    merged: tuple[str, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, config: "RunConfig", step: int) -> "_History":
        """`step` is that of the weights, which is the base's where nothing was merged."""
        steps = config.merged_steps or (() if config.merged or config.unmerged_digest else (step,))
        return cls(config.merged, steps if len(steps) == len(config.merged) + 1 else ())

    def plus(self, digest: str, step: int) -> "_History":
        return _History((*self.merged, digest), (*self.steps, step) if self.steps else ())

    def without(self, digest: str) -> "_History":
        place = self.merged.index(digest)
        steps = self.steps and (*self.steps[: place + 1], *self.steps[place + 2 :])
        return _History((*self.merged[:place], *self.merged[place + 1 :]), steps)

    @property
    def step(self) -> int:
        """Of the weights: that of the last adapter, or of the base."""
        return self.steps[-1] if self.steps else 0


@dataclass(frozen=True)
class _Result:
    """A plain model, what was merged into it before this command, and how it was checked."""

    network: "Transformer"
    config: "RunConfig"
    history: _History
    data: "DataConfig | None"
    tokenizer: "Tokenizer"
    difference: float
    change: float


def _merged(adapter: Path, settings: "AdapterConfig", model: Path | None) -> _Result:
    from tinylm.adapters.load import WantedAdapter, load_adapted, load_base
    from tinylm.adapters.lora import check_merged, merge_lora
    from tinylm.place import MODEL_FILE
    from tinylm.weights import read_header

    wanted = [WantedAdapter(adapter)]
    base, _, _ = load_base(adapter, settings, model, "cpu")
    adapted, config, tokenizer, (loaded,) = load_adapted(wanted, model, "cpu")
    merged, _, _, _ = load_adapted(wanted, model, "cpu")
    merge_lora(merged)
    assert model is not None  # else there was no base to load
    history = _History.of(config, read_header(model / MODEL_FILE).step)
    return _Result(merged, config, history, loaded.data, tokenizer, *check_merged(base, adapted, merged))


def _unmerged(adapter: Path, settings: "AdapterConfig", digest: str, model: Path | None) -> _Result:
    """The base again, up to rounding: with the adapter on it, it predicts what the merged model does."""
    from tinylm.adapters.load import WantedAdapter, put_on
    from tinylm.adapters.lora import check_merged, merge_lora
    from tinylm.checkpoint import load_model

    if model is None:
        raise UsageError("--undo takes the adapter out of a merged model; name that with --model.")
    merged, config, tokenizer, weights = load_model(model)
    if digest not in config.merged:
        raise UsageError(f"{model} was not made by merging {adapter}; name the adapter that it was made with.")
    undone, _, _, _ = load_model(model)
    put_on(undone, WantedAdapter(adapter))
    merge_lora(undone, sign=-1.0)
    adapted = copy.deepcopy(undone)
    put_on(adapted, WantedAdapter(adapter))
    history = _History.of(config, weights.step)
    return _Result(undone, config, history, None, tokenizer, *check_merged(undone, adapted.eval(), merged))
