"""tinylm finetune-lora: bend a model to a second text, and leave the model as it is."""

from dataclasses import dataclass
from typing import Annotated

import typer

from tinylm.commands.finetuning import ADAPTER, AdapterRunOptions, Corpus, Resume, Settings, finetune
from tinylm.commands.model import ModelPath
from tinylm.commands.options import LearningOptions, option, with_groups


@dataclass(frozen=True)
class LoRAOptions:
    rank: Annotated[int, option("Rank of the update (default: 8).", ADAPTER, "N", "--rank", "-r")] = 8
    alpha: Annotated[
        float | None, option("The update is scaled by alpha / rank (default: twice the rank).", ADAPTER, "X")
    ] = None
    rank_stabilised: Annotated[
        bool, option("Scale by alpha / sqrt(rank) instead.", ADAPTER, None, "--rank-stabilised")
    ] = False
    share_b: Annotated[
        bool, option("One B for all matrices of a name; each has its own A.", ADAPTER, None, "--share-b")
    ] = False
    dropout: Annotated[
        float, option("Share of an adapter's inputs dropped in training (default: 0).", ADAPTER, "X")
    ] = 0.0
    target: Annotated[
        list[str] | None,
        option(
            "Matrices to adapt (default: attention).",
            ADAPTER,
            "attention|query|key|value|output|mlp|experts|router|embedding|all",
        ),
    ] = None

    def settings(self) -> Settings:
        from tinylm.adapters.lora import check_targets, module_names, peft_config

        targets = self.target or ["attention"]
        fields = {
            "rank": self.rank,
            "alpha": 2.0 * self.rank if self.alpha is None else self.alpha,
            "dropout": self.dropout,
            "targets": module_names(targets),
            "rank_stabilised": self.rank_stabilised,
            "share_b": self.share_b,
        }
        return Settings("-lora", fields, lambda model: check_targets(targets, model), peft_config)


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
    """Train a low-rank adapter on a second text. The base model is read, and never written to."""
    finetune(invocation, corpus, model, resume, run, lora, learning, lora.settings, "tinylm finetune-lora")
