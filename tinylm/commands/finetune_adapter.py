"""tinylm finetune-adapter: train bottleneck adapters on a frozen base model."""

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
class BottleneckOptions:
    """The shape of the bottleneck adapters."""

    bottleneck: Annotated[int, option("Hidden size of each bottleneck adapter (default: 16).", Panel.ADAPTER, "N")] = 16
    dropout: Annotated[float, option("Dropout on the input of the adapter (default: 0).", Panel.ADAPTER, "X")] = 0.0


@with_option_groups
def finetune_adapter(
    ctx: typer.Context,
    corpus: CorpusArgument = None,
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
    given = TrainingArguments.of(ctx, corpus, resume, run, bottleneck, training)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, bottleneck_request

    request: TrainingRequest | ResumeRequest
    if given.resume is not None:
        request = given.resume_request("bottleneck", base=model)
    else:
        request = bottleneck_request(given.files, model, given.out, given.settings, given.ignorable)
    run_training(output.console(), request, given, started=started)
