"""tinylm finetune-lora: bend a model to a second text, and leave the model as it is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.model import ModelPath, newest_run
from tinylm.commands.options import WHERE, LearningOptions, option, refuse_with, with_groups
from tinylm.commands.reading import encode_text, read_text
from tinylm.commands.resume import resume_run
from tinylm.commands.session import (
    chosen_budget,
    new_run_at,
    new_run_config,
    process_start,
    run_session,
    show_plan,
)
from tinylm.config import AdapterConfig, TokenizerConfig
from tinylm.errors import UsageError

COMMAND = "tinylm finetune-lora"
ADAPTER = "Adapter"


@dataclass(frozen=True)
class AdapterRunOptions:
    out: Annotated[
        Path | None, option("The adapter's folder (default: <model>-lora).", WHERE, "DIR", "--out", "-o")
    ] = None
    force: Annotated[bool, option("Replace an adapter that is there.", WHERE, None, "--force")] = False
    dry_run: Annotated[bool, option("Print the plan and stop.", WHERE, None, "--dry-run")] = False


@dataclass(frozen=True)
class LoRAOptions:
    rank: Annotated[int, option("Rank of the update (default: 8).", ADAPTER, "N", "--rank", "-r")] = 8
    alpha: Annotated[
        float | None, option("The update is scaled by alpha / rank (default: twice the rank).", ADAPTER, "X")
    ] = None
    dropout: Annotated[
        float, option("Share of an adapter's inputs dropped in training (default: 0).", ADAPTER, "X")
    ] = 0.0
    target: Annotated[
        list[str] | None,
        option("Matrices to adapt (default: attention).", ADAPTER, "attention|query|key|value|output|mlp"),
    ] = None


@with_groups
def finetune_lora(
    invocation: typer.Context,
    corpus: Annotated[
        list[str] | None,
        typer.Argument(help="Text files, folders, JSONL, or - for standard input.", show_default=False),
    ] = None,
    model: ModelPath = None,
    resume: Annotated[
        Path | None, option("Go on with this adapter; only budget and rhythm may change.", WHERE, "RUN")
    ] = None,
    *,
    run: AdapterRunOptions,
    lora: LoRAOptions,
    learning: LearningOptions,
) -> None:
    """Train a low-rank adapter on a second text. The base model is read, and never written to."""
    if resume is not None:
        if corpus:
            raise UsageError("--resume goes on with the adapter's own corpus; leave the text out, or begin a new one.")
        refuse_with(invocation, "--resume", run, lora, *learning.fixed_by_resuming)
        resume_run(resume, learning, COMMAND, model)
        return
    if not corpus:
        raise UsageError(f"Name a text to learn from, as in {COMMAND} other.txt; - is standard input.")

    started = process_start()
    from tinylm.adapters.lora import add_lora, module_names, peft_config
    from tinylm.checkpoint import RunFolder, load_model
    from tinylm.plan import plan_training, probe_machine
    from tinylm.text.prepare import require_known

    console = learning.output.console()
    targets = module_names(lora.target or ["attention"])
    budget = chosen_budget(learning.budget)
    machine = probe_machine(learning.machine.device, learning.machine.dtype)
    console.note(f"On {machine.reasons}.")
    base_path = model or newest_run(console)
    if not base_path.name:  # the folder one stands in
        base_path = base_path.absolute()
    path = run.out or base_path.with_name(base_path.name + "-lora")
    if path.resolve() == base_path.resolve():
        raise UsageError(f"{path} is the base model, which is never written to; choose another folder with --out.")
    with new_run_at(path, run.force) as preparation:
        network, base, tokenizer, weights = load_model(base_path)
        adapter = AdapterConfig(
            base=str(base_path.resolve()),
            base_digest=weights.digest,
            rank=lora.rank,
            alpha=2.0 * lora.rank if lora.alpha is None else lora.alpha,
            dropout=lora.dropout,
            targets=targets,
        )
        add_lora(network, adapter, learning.seed.seed or 0)
        reading = read_text(console, corpus, learning.text, learning.validation, preparation)
        require_known(tokenizer, reading.alphabet, f"The model {base_path}")
        tokens, data = encode_text(console, reading, tokenizer, preparation)
        plan = plan_training(
            machine,
            data,
            tokenizer.vocab_size,
            recipe="lora",
            model={},
            training=learning.training(),
            budget=budget,
            compile=learning.compiling.compile,
            base=base.model,
        )
        config = new_run_config(
            model=plan.model,
            tokenizer=TokenizerConfig(kind=tokenizer.kind, sha256=tokenizer.sha256),
            data=data,
            training=plan.training,
            runtime=plan.runtime,
            adapter=adapter,
        )
        trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        show_plan(console, plan, config, trained, as_result=run.dry_run)
        if run.dry_run:
            return
        folder = RunFolder.create(path, config, tokenizer, peft_config(adapter))
        run_session(console, folder, config, network, tokens, tokenizer, command=COMMAND, started=started)
