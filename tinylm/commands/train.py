"""tinylm train: a text into a model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinylm.commands.groups import refuse_with, with_groups
from tinylm.commands.model import CHECKPOINTS
from tinylm.commands.new_run import chosen_budget, new_run_at, plan_run, show_plan
from tinylm.commands.options import DATA, WHERE, LearningOptions, ModelOptions, option
from tinylm.commands.reading import read_text
from tinylm.commands.resume import resume_run
from tinylm.commands.session import process_start, run_session
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.config import RunConfig
    from tinylm.model.stack import Transformer
    from tinylm.text.tokenizer import Tokenizer

COMMAND = "tinylm train"


@dataclass(frozen=True)
class RunOptions:
    out: Annotated[
        Path | None, option("The run's folder (default: checkpoints/<corpus name>).", WHERE, "DIR", "--out", "-o")
    ] = None
    force: Annotated[bool, option("Replace a run that is there.", WHERE, None, "--force")] = False
    init_from: Annotated[Path | None, option("Begin with this run's weights, shape and tokenizer.", WHERE, "MODEL")] = (
        None
    )
    extend_vocab: Annotated[
        bool, option("Let that run's model learn characters it never saw.", WHERE, None, "--extend-vocab")
    ] = False
    dry_run: Annotated[bool, option("Print the plan and stop.", WHERE, None, "--dry-run")] = False


@dataclass(frozen=True)
class TokenizerOptions:
    tokenizer: Annotated[str | None, option("Kind of tokenizer, or a tokenizer.json.", DATA, "auto|char|bpe|PATH")] = (
        None
    )
    vocab_size: Annotated[int | None, option("Ids of a BPE tokenizer.", DATA, "N")] = None


@with_groups
def train(
    invocation: typer.Context,
    corpus: Annotated[
        list[str] | None,
        typer.Argument(help="Text files, folders, JSONL, or - for standard input.", show_default=False),
    ] = None,
    resume: Annotated[
        Path | None,
        option("Go on with this run, its corpus and settings; only budget and rhythm may change.", WHERE, "RUN"),
    ] = None,
    *,
    run: RunOptions,
    tokenizer: TokenizerOptions,
    model: ModelOptions,
    learning: LearningOptions,
) -> None:
    """Train a language model on a text.

    With no options it chooses tokenizer, model, batch and length from the text and the machine, and trains until the
    validation loss stops improving or ten minutes are up.
    """
    if resume is not None:
        if corpus:
            raise UsageError("--resume goes on with the run's own corpus; leave the text out, or begin a new run.")
        refuse_with(invocation, "--resume", run, tokenizer, model, *learning.fixed_by_resuming)
        resume_run(resume, learning, COMMAND)
        return
    if not corpus:
        raise UsageError("Name a text to train on, as in tinylm train corpus.txt; - is standard input.")
    if run.init_from is not None:
        refuse_with(invocation, "--init-from", tokenizer, model)
    elif run.extend_vocab:
        raise UsageError("--extend-vocab is for a model that has a vocabulary; name it with --init-from.")

    started = process_start()
    from tinylm.checkpoint import RunFolder, load_model
    from tinylm.cost import choose_machine
    from tinylm.model.build import build_model
    from tinylm.text.prepare import choose_tokenizer, require_known

    console = learning.output.console()
    budget = chosen_budget(learning.budget)
    path = run.out or CHECKPOINTS / run_name(corpus[0])
    with new_run_at(path, run.force) as preparation:
        machine = choose_machine(learning.machine.device, learning.machine.dtype, console)
        console.note(f"On {machine.reasons}.")
        start, base, tokens_of, _ = load_model(run.init_from) if run.init_from else (None, None, None, None)
        architecture = base.model.architecture if base else model.architecture or "decoder"
        kind = "pairs" if architecture == "encoder-decoder" else "text"
        reading = read_text(console, corpus, learning.text, learning.validation, preparation, kind)
        if start is not None and base is not None and tokens_of is not None and run.extend_vocab:
            tokens_of, base = _extend(console, start, base, tokens_of, reading.alphabet)
        if tokens_of is not None:
            require_known(tokens_of, reading.alphabet, f"The tokenizer of {run.init_from}", "let it --extend-vocab")
        else:
            tokens_of = choose_tokenizer(reading, tokenizer.tokenizer or "auto", tokenizer.vocab_size)
            tokens_of = tokens_of.with_mask() if architecture == "encoder" else tokens_of
        tokens, plan, config = plan_run(
            console,
            machine,
            reading,
            tokens_of,
            preparation,
            learning,
            budget,
            model={} if base else model.choices(),
            base=base.model if base else None,
        )
        show_plan(console, plan, config, plan.parameters, as_result=run.dry_run)
        if run.dry_run:
            return
        folder = RunFolder.create(path, config, tokens_of)
        network = start.train() if start else build_model(plan.model, plan.training.seed)
        run_session(console, folder, config, network, tokens, tokens_of, command=COMMAND, started=started)


def _extend(
    console: Console, network: "Transformer", config: "RunConfig", tokenizer: "Tokenizer", alphabet: str
) -> "tuple[Tokenizer, RunConfig]":
    """Give the characters that the model never saw an id each; the network is changed in place."""
    from tinylm.model.build import extend_vocabulary
    from tinylm.text.tokenizer import describe_characters

    unknown = tokenizer.unknown(alphabet)
    if not unknown:
        return tokenizer, config
    if tokenizer.kind != "char":
        raise UsageError(
            "--extend-vocab is for models of characters, and this one's tokenizer is of another make; train a model of "
            "your own on the text."
        )
    tokenizer = tokenizer.extended(unknown)
    extend_vocabulary(network, tokenizer.vocab_size)
    console.note(f"New to the model: {describe_characters(unknown)}.")
    return tokenizer, replace(config, model=replace(config.model, vocab_size=tokenizer.vocab_size))


def run_name(corpus: str) -> str:
    """The corpus's name without its suffix; stdin for standard input."""
    return "stdin" if corpus == "-" else Path(corpus).resolve().stem or "run"
