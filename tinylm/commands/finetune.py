"""tinylm finetune-lora and finetune-adapter: train an adapter on a frozen base model."""

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import ModelOption, OutputOptions, ResumeAdapterOption
from tinylm.commands.train import CorpusArgument, NewRunOptions, ReportOptions, run_training
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
    run: NewRunOptions,
    settings: LoRASettings,
    reporting: ReportOptions,
    output: OutputOptions,
) -> None:
    """Fine-tune a model with a LoRA adapter (Hu et al. 2021). The base model is not changed."""
    run_training(ctx, corpus, resume, model, run, settings, reporting, output)


@with_option_groups
def finetune_adapter(
    ctx: typer.Context,
    corpus: CorpusArgument = None,
    model: ModelOption = None,
    resume: ResumeAdapterOption = None,
    *,
    run: NewRunOptions,
    settings: AdapterSettings,
    reporting: ReportOptions,
    output: OutputOptions,
) -> None:
    """Fine-tune a model with bottleneck adapters after each sublayer (Houlsby et al. 2019).

    The base model is not changed.
    """
    run_training(ctx, corpus, resume, model, run, settings, reporting, output)
