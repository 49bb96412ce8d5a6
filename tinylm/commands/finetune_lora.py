"""tinylm finetune-lora: train a LoRA adapter on a frozen base model."""

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import ModelOption, OutputOptions, ResumeAdapterOption
from tinylm.commands.training_arguments import CorpusArgument, NewAdapterOptions, ReportOptions, TrainingArguments
from tinylm.commands.training_display import process_start, run_training
from tinylm.config.settings import LoRASettings

FIRST_OPTIONS = """
model out force resume dry_run format val_data train_on time epochs steps rank alpha target lr batch_size seed device
report
"""  # shown by -h


@with_option_groups
def finetune_lora(
    ctx: typer.Context,
    corpus: CorpusArgument = None,
    model: ModelOption = None,
    resume: ResumeAdapterOption = None,
    *,
    run: NewAdapterOptions,
    settings: LoRASettings,
    reporting: ReportOptions,
    output: OutputOptions,
) -> None:
    """Fine-tune a model with a LoRA adapter (Hu et al. 2021). The base model is not changed."""
    started = process_start()
    given = TrainingArguments.of(ctx, corpus, resume, run, reporting, settings)

    from tinylm.training.training_request import ResumeRequest, TrainingRequest, lora_request

    request: TrainingRequest | ResumeRequest
    if given.resume is not None:
        request = given.resume_request("lora", base=model)
    else:
        request = lora_request(given.files, model, given.out, settings, given.ignorable)
    run_training(output.console(), request, given, started=started)
