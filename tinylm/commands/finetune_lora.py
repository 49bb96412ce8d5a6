"""tinylm finetune-lora: bend a model to a second text, and leave the model as it is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from tinylm.commands.finetuning import ADAPTER, AdapterRunOptions, Base, Corpus, Resume, finetune
from tinylm.commands.groups import with_groups
from tinylm.commands.model import ModelPath
from tinylm.commands.options import LearningOptions, option
from tinylm.config import AdapterConfig
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.stack import Transformer

DEFAULT_RANK = 8


@dataclass(frozen=True)
class LoRAOptions:
    suffix: ClassVar[str] = "-lora"

    rank: Annotated[
        int | None, option("Rank of the update (default: 8, or the largest that fits).", ADAPTER, "N", "--rank", "-r")
    ] = None
    alpha: Annotated[
        float | None,
        option("LoRA alpha: the update is scaled by alpha / rank (default: twice the rank).", ADAPTER, "X"),
    ] = None
    rank_stabilised: Annotated[
        bool, option("rsLoRA: scale by alpha / sqrt(rank) instead.", ADAPTER, None, "--rank-stabilised")
    ] = False
    share_b: Annotated[
        bool, option("Share one B among all matrices of the same name; each has its own A.", ADAPTER, None, "--share-b")
    ] = False
    dropout: Annotated[float, option("Dropout of the adapter inputs (default: 0).", ADAPTER, "X")] = 0.0
    target: Annotated[
        list[str] | None,
        option(
            "Weight matrices to adapt; may be given several times (default: attention).",
            ADAPTER,
            "attention|query|key|value|output|mlp|experts|router|embedding|all",
        ),
    ] = None

    def config(self, model: "Transformer", base: Base) -> AdapterConfig:
        from tinylm.adapters.lora import TARGETS, largest_rank, module_names

        targets = module_names(self.target or ["attention"], model)
        if targets == TARGETS["embedding"] and (self.dropout or self.share_b):
            raise UsageError(
                "--dropout and --share-b are for linear layers, and the embedding is looked up; leave them out."
            )
        rank = min(DEFAULT_RANK, largest_rank(model, targets)) if self.rank is None else self.rank
        return AdapterConfig(
            **base,
            rank=rank,
            alpha=2.0 * rank if self.alpha is None else self.alpha,
            dropout=self.dropout,
            targets=targets,
            rank_stabilised=self.rank_stabilised,
            share_b=self.share_b,
        )

    def peft_config(self, adapter: AdapterConfig, architecture: str) -> dict[str, Any]:
        from tinylm.adapters.lora import peft_config

        return peft_config(adapter, architecture)


@with_groups
def finetune_lora(
    invocation: typer.Context,
    corpus: Corpus = None,
    model: ModelPath = None,
    resume: Resume = None,
    *,
    run: AdapterRunOptions,
    lora: LoRAOptions,
    learning: LearningOptions,
) -> None:
    """Fine-tune a model on another text with LoRA. The base model itself is not changed."""
    finetune(invocation, corpus, model, resume, run, lora, learning, "tinylm finetune-lora")
