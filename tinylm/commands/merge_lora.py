"""tinylm merge-lora: an adapter and its base into one plain model."""

from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.model import ModelPath
from tinylm.commands.options import WHERE, OutputOptions, option, with_groups
from tinylm.commands.session import new_run_at, new_run_config


@with_groups
def merge(
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.", show_default=False)],
    out: Annotated[Path, option("The new run's folder.", WHERE, "DIR", "--out", "-o")],
    model: ModelPath = None,
    force: Annotated[bool, option("Replace a run that is there.", WHERE, None, "--force")] = False,
    *,
    output: OutputOptions,
) -> None:
    """Write an adapter and its base as one plain model, after checking that it predicts what the two together did."""
    from tinylm.adapters.load import load_adapted, load_base, read_adapter_config
    from tinylm.adapters.lora import check_merged, merge_lora
    from tinylm.checkpoint import RunFolder, read_weights

    console = output.console()
    with new_run_at(out, force):
        adapter_config, settings = read_adapter_config(adapter)
        base, _, _ = load_base(adapter, settings, model, "cpu")
        adapted, base_config, tokenizer = load_adapted(adapter, model, "cpu")
        merged, _, _ = load_adapted(adapter, model, "cpu")
        merge_lora(merged)
        difference, change = check_merged(base, adapted, merged)
        console.note(
            f"Checked: merged and unmerged logits differ by {difference:.1e}; the base's differ by {change:.1e}."
        )
        saved = read_weights(adapter, adapter_config)
        config = new_run_config(model=base_config.model, tokenizer=base_config.tokenizer, data=adapter_config.data)
        run = RunFolder.create(out, config, tokenizer)
        run.save_best(dict(merged.state_dict()), config, saved.step, saved.val_loss)
        run.publish()
    if console.as_json:
        console.record({"run": str(out), "difference": difference, "change": change})
    else:
        console.result(str(out))
