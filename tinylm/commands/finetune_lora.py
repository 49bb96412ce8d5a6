"""tinylm finetune-lora: train a LoRA adapter on a frozen base model."""

from dataclasses import dataclass
from typing import Annotated

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions, Panel, option
from tinylm.commands.trained_model_options import ModelOption, ResumeAdapterOption
from tinylm.commands.training_arguments import CorpusArgument, TrainingArguments
from tinylm.commands.training_display import process_start, run_training
from tinylm.commands.training_options import NewAdapterOptions, TrainingOptions


@dataclass(frozen=True)
class LoRAOptions:
    """The rank, scale and dropout of the LoRA update, and the matrices that it adapts."""

    rank: Annotated[
        int | None,
        option(
            "Rank of the update (default: 8, or the most that the matrices allow).",
            Panel.ADAPTER,
            "N",
            "--rank",
            "-r",
        ),
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
            "Share one B among matrices of one name and output size; each has its own A.",
            Panel.ADAPTER,
            None,
            "--share-b",
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
    corpus: CorpusArgument = None,
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
    given = TrainingArguments.of(ctx, corpus, resume, run, lora, training)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, lora_request

    request: TrainingRequest | ResumeRequest
    if given.resume is not None:
        request = given.resume_request("lora", base=model)
    else:
        request = lora_request(given.files, model, given.out, given.settings, given.ignorable)
    run_training(output.console(), request, given, started=started)
