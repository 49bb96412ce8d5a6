"""tinylm finetune-lora and finetune-adapter: train an adapter on a frozen base model."""

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import ModelOption, OutputOptions, ResumeAdapterOption
from tinylm.commands.training import (
    CorpusArgument,
    NewAdapterOptions,
    ReportOptions,
    TrainingArguments,
    process_start,
    run_training,
)
from tinylm.config.settings import AdapterSettings, LoRASettings

FIRST_OPTIONS = """
model out force resume dry_run format val_data train_on time epochs steps rank alpha target bottleneck dropout lr
batch_size seed device report
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
    arguments = TrainingArguments.of(ctx, corpus, resume, run, reporting, settings, model)
    run_training(output.console(), arguments, started=started)


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
    arguments = TrainingArguments.of(ctx, corpus, resume, run, reporting, settings, model)
    run_training(output.console(), arguments, started=started)
