"""tinylm finetune-adapter: train bottleneck adapters on a frozen base model."""

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import ModelOption, OutputOptions, ResumeAdapterOption
from tinylm.commands.training_arguments import CorpusArgument, NewAdapterOptions, ReportOptions, TrainingArguments
from tinylm.commands.training_display import process_start, run_training
from tinylm.config.settings import AdapterSettings

FIRST_OPTIONS = """
model out force resume dry_run format val_data train_on time epochs steps bottleneck dropout lr batch_size seed device
report
"""  # shown by -h


@with_option_groups
def finetune_adapter(
    ctx: typer.Context,
    corpus: CorpusArgument = None,
    model: ModelOption = None,
    resume: ResumeAdapterOption = None,
    *,
    run: NewAdapterOptions,
    settings: AdapterSettings,
    reporting: ReportOptions,
    output: OutputOptions,
) -> None:
    """Fine-tune a model with bottleneck adapters after each sublayer (Houlsby et al. 2019).

    The base model is not changed.
    """
    started = process_start()
    given = TrainingArguments.of(ctx, corpus, resume, run, reporting, settings)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, bottleneck_request

    request: TrainingRequest | ResumeRequest
    if given.resume is not None:
        request = given.resume_request("bottleneck", base=model)
    else:
        request = bottleneck_request(given.files, model, given.out, settings, given.ignorable)
    run_training(output.console(), request, given, started=started)
