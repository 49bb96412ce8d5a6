"""tinylm finetune-adapter: train bottleneck adapters on a frozen base model."""

from dataclasses import dataclass
from typing import Annotated

import typer

from tinylm.commands.option_groups import (
    non_default_options,
    options_from_env_or_file,
    reject_fixed_options,
    with_option_groups,
)
from tinylm.commands.options import OutputOptions, Panel, option
from tinylm.commands.trained_model_options import ModelOption, ResumeAdapterOption
from tinylm.commands.training_display import process_start, run_training
from tinylm.commands.training_options import NewAdapterOptions, TrainingOptions
from tinylm.errors import UsageError


@dataclass(frozen=True)
class BottleneckOptions:
    """The shape of the bottleneck adapters."""

    bottleneck: Annotated[int, option("Hidden size of each bottleneck adapter (default: 16).", Panel.ADAPTER, "N")] = 16
    dropout: Annotated[float, option("Dropout on the input of the adapter (default: 0).", Panel.ADAPTER, "X")] = 0.0


@with_option_groups
def finetune_adapter(
    ctx: typer.Context,
    corpus: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files, folders, globs or JSONL (or pairs), also compressed; - is standard input.",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    resume: ResumeAdapterOption = None,
    *,
    run: NewAdapterOptions,
    bottleneck: BottleneckOptions,
    training: TrainingOptions,
    output: OutputOptions,
) -> None:
    """Fine-tune a model with bottleneck adapters after each sublayer (Houlsby et al. 2019).

    The base model is not changed.
    """
    started = process_start()
    command = "tinylm finetune-adapter"
    if not corpus and resume is None:
        raise UsageError(f"Name a text to train on, as in {command} other.txt; - is standard input.")
    if resume is not None:
        reject_fixed_options(ctx, "--resume", run)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, bottleneck_request, resume_request

    options = (run, bottleneck, training)
    settings, optional = non_default_options(*options), options_from_env_or_file(ctx, *options)
    out, dry_run = settings.pop("out", None), settings.pop("dry_run", False)
    request: TrainingRequest | ResumeRequest
    if resume is not None:
        request = resume_request(resume, corpus or (), settings, optional, adapter_kind="bottleneck", base=model)
    else:
        request = bottleneck_request(corpus or (), model, out, settings, optional)
    run_training(output.console(), request, command, started=started, dry_run=dry_run)
