"""Training an adapter on a second text: what finetune-lora and finetune-adapter share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, TypedDict

import typer

from tinylm.commands.groups import refuse_with
from tinylm.commands.model import complete_adapter, find_run, newest_run
from tinylm.commands.new_run import chosen_budget, dry_run_at, new_run_at, plan_run, show_plan
from tinylm.commands.options import WHERE, LearningOptions, option
from tinylm.commands.reading import how_to_extend, known_text, read_text
from tinylm.commands.resume import resume_run
from tinylm.commands.session import process_start, run_session
from tinylm.config import AdapterConfig
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.stack import Transformer

ADAPTER = "Adapter"


class Base(TypedDict):
    """The fields of an AdapterConfig that say what it was made for."""

    base: str
    base_digest: str


Corpus = Annotated[
    list[str] | None,
    typer.Argument(help="Text files, folders, JSONL (or pairs), or - for standard input.", show_default=False),
]
Resume = Annotated[
    Path | None,
    option(
        "Continue this adapter; only length and intervals may change.", WHERE, "RUN", autocompletion=complete_adapter
    ),
]


@dataclass(frozen=True)
class AdapterRunOptions:
    out: Annotated[
        Path | None, option("Adapter directory to write (default: <model>-<kind>).", WHERE, "DIR", "--out", "-o")
    ] = None
    force: Annotated[bool, option("Replace an existing adapter.", WHERE, None, "--force")] = False
    dry_run: Annotated[bool, option("Print the plan and stop.", WHERE, None, "--dry-run")] = False


class AdapterOptions(Protocol):
    """A command's own options, for a kind of adapter. `suffix` ends the default folder's name."""

    suffix: ClassVar[str]

    def config(self, model: "Transformer", base: Base) -> AdapterConfig:
        """Raises UsageError for a model that such an adapter does not fit."""
        ...

    def peft_config(self, adapter: AdapterConfig, architecture: str) -> dict[str, Any] | None:
        """What PEFT wants to know of it, or nothing."""
        ...


def finetune(
    invocation: typer.Context,
    corpus: list[str] | None,
    model: Path | None,
    resume: Path | None,
    run: AdapterRunOptions,
    own: AdapterOptions,
    learning: LearningOptions,
    command: str,
) -> None:
    """Train an adapter, or go on with one."""
    if resume is not None:
        refuse_with(invocation, "--resume", run, own, *learning.fixed_by_resuming(bool(corpus)))
        resume_run(resume, corpus, learning, command, model)
        return
    if not corpus:
        raise UsageError(f"Name a text to learn from, as in {command} other.txt; - is standard input.")

    started = process_start()
    from tinylm.adapters.load import add_adapter
    from tinylm.checkpoint import RunFolder, load_model
    from tinylm.cost import choose_machine

    console = learning.output.console()
    budget = chosen_budget(learning.budget)
    machine = choose_machine(learning.machine.device, learning.machine.dtype, console)
    console.note(f"On {machine.reasons}.")
    base_path = find_run(console, model) if model else newest_run(console)
    if not base_path.name:  # the folder one stands in
        base_path = base_path.absolute()
    path = run.out or base_path.with_name(base_path.name + own.suffix)
    if path.resolve() == base_path.resolve():
        raise UsageError(f"{path} is the base model, which is never written to; choose another folder with --out.")
    with dry_run_at(console, path, run.force) if run.dry_run else new_run_at(path, run.force) as preparation:
        network, base, tokenizer, weights = load_model(base_path)
        digest = base.recovered_digest or weights.digest
        adapter = own.config(network, Base(base=str(base_path.resolve()), base_digest=digest))
        add_adapter(network, adapter, learning.seed.seed or 0)
        kind = "pairs" if base.model.architecture == "encoder-decoder" else "text"
        reading = read_text(invocation, console, corpus, learning.text, learning.validation, preparation, kind)
        who, otherwise = f"The model {base_path}", how_to_extend(tokenizer, base_path)
        reading = known_text(console, reading, tokenizer, learning.unknown, who, otherwise)
        tokens, plan, config = plan_run(
            console,
            machine,
            reading,
            tokenizer,
            preparation,
            learning,
            budget,
            model={},
            base=base.model,
            adapter=adapter,
        )
        trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
        show_plan(console, plan, config, trained, as_result=run.dry_run)
        if run.dry_run:
            return
        folder = RunFolder.create(path, config, tokenizer, own.peft_config(adapter, base.model.architecture))
        run_session(console, folder, config, network, tokens, tokenizer, command=command, started=started)
