"""tinylm finetune-lora: train a LoRA adapter on a frozen base model."""

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
class LoRAOptions:
    """The shape of the LoRA update, and the matrices that get one."""

    rank: Annotated[
        int | None,
        option("Rank of the update (default: 8, or the largest that fits).", Panel.ADAPTER, "N", "--rank", "-r"),
    ] = None
    alpha: Annotated[
        float | None,
        option("LoRA alpha: the update is scaled by alpha / rank (default: twice the rank).", Panel.ADAPTER, "X"),
    ] = None
    rank_stabilised: Annotated[
        bool, option("rsLoRA: scale by alpha / sqrt(rank) instead.", Panel.ADAPTER, None, "--rank-stabilised")
    ] = False
    share_b: Annotated[
        bool,
        option(
            "Share one B among all matrices of the same name; each has its own A.", Panel.ADAPTER, None, "--share-b"
        ),
    ] = False
    dropout: Annotated[float, option("Dropout on the input of the adapter (default: 0).", Panel.ADAPTER, "X")] = 0.0
    target: Annotated[
        list[str] | None,
        option(
            "Weight matrices to adapt; may be given several times (default: attention).",
            Panel.ADAPTER,
            "attention|query|key|value|output|mlp|experts|router|embedding|all",
        ),
    ] = None


@with_option_groups
def finetune_lora(
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
    lora: LoRAOptions,
    training: TrainingOptions,
    output: OutputOptions,
) -> None:
    """Fine-tune a model with a LoRA adapter (Hu et al. 2021). The base model is not changed."""
    started = process_start()
    command = "tinylm finetune-lora"
    if not corpus and resume is None:
        raise UsageError(f"Name a text to train on, as in {command} other.txt; - is standard input.")
    if resume is not None:
        reject_fixed_options(ctx, "--resume", run)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, lora_request, resume_request

    options = (run, lora, training)
    settings, optional = non_default_options(*options), options_from_env_or_file(ctx, *options)
    out, dry_run = settings.pop("out", None), settings.pop("dry_run", False)
    request: TrainingRequest | ResumeRequest
    if resume is not None:
        request = resume_request(resume, corpus or (), settings, optional, adapter_kind="lora", base=model)
    else:
        request = lora_request(corpus or (), model, out, settings, optional)
    run_training(output.console(), request, command, started=started, dry_run=dry_run)
