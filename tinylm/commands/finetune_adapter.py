"""tinylm finetune-adapter: bend a model to a second text with small layers between its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from tinylm.commands.finetuning import ADAPTER, AdapterRunOptions, Base, Corpus, Resume, finetune
from tinylm.commands.groups import with_groups
from tinylm.commands.model import ModelPath
from tinylm.commands.options import LearningOptions, option
from tinylm.config import AdapterConfig
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.stack import Transformer


@dataclass(frozen=True)
class BottleneckOptions:
    suffix: ClassVar[str] = "-adapter"

    bottleneck: Annotated[int, option("Hidden size of each bottleneck adapter (default: 16).", ADAPTER, "N")] = 16
    dropout: Annotated[float, option("Dropout of the adapter inputs (default: 0).", ADAPTER, "X")] = 0.0

    def config(self, model: "Transformer", base: Base) -> AdapterConfig:
        from tinylm.adapters.bottleneck import sublayers

        width = model.embedding.weight.shape[1]
        if not 1 <= self.bottleneck <= width:
            raise UsageError(f"--bottleneck is {self.bottleneck}; it must be from 1 to the model's width, {width}.")
        return AdapterConfig(
            **base, kind="bottleneck", rank=self.bottleneck, dropout=self.dropout, targets=sublayers(model)
        )

    def peft_config(self, adapter: AdapterConfig, architecture: str) -> None:
        return None


@with_groups
def finetune_adapter(
    invocation: typer.Context,
    corpus: Corpus = None,
    model: ModelPath = None,
    resume: Resume = None,
    *,
    run: AdapterRunOptions,
    bottleneck: BottleneckOptions,
    learning: LearningOptions,
) -> None:
    """Fine-tune a model on another text with bottleneck adapters after each sublayer (Houlsby et al. 2019)."""
    finetune(invocation, corpus, model, resume, run, bottleneck, learning, "tinylm finetune-adapter")
