"""tinylm train: a text into a model."""

import glob
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinylm.commands.groups import refuse_with, typed, with_groups
from tinylm.commands.model import complete_model, complete_run, find_run
from tinylm.commands.new_run import chosen_budget, dry_run_at, new_run_at, plan_run, show_plan
from tinylm.commands.options import DATA, WHERE, LearningOptions, ModelOptions, option
from tinylm.commands.reading import known_text, read_text
from tinylm.commands.resume import resume_run
from tinylm.commands.session import process_start, run_session
from tinylm.console import Console
from tinylm.errors import UsageError
from tinylm.place import CHECKPOINTS

if TYPE_CHECKING:
    from tinylm.config import RunConfig
    from tinylm.model.stack import Transformer
    from tinylm.text.tokenizer import Tokenizer

COMMAND = "tinylm train"
EXAMPLES = """Examples:

tinylm train book.txt
    Choose everything from the text.

tinylm train book.txt --size small --epochs 3
    Three passes with a model of 6 layers.

tinylm train texts/ --tokenizer bpe --time 30m
    All texts of a folder, for half an hour.

tinylm train --resume checkpoints/book --epochs 5
    Continue a run, up to five passes in all.
"""


@dataclass(frozen=True)
class RunOptions:
    out: Annotated[
        Path | None, option("Run directory to write (default: checkpoints/<corpus name>).", WHERE, "DIR", "--out", "-o")
    ] = None
    force: Annotated[bool, option("Replace an existing run.", WHERE, None, "--force")] = False
    init_from: Annotated[
        Path | None,
        option(
            "Start from the weights, architecture and tokenizer of this run.",
            WHERE,
            "MODEL",
            autocompletion=complete_model,
        ),
    ] = None
    extend_vocab: Annotated[
        bool,
        option("With --init-from: add new characters of the text to the vocabulary.", WHERE, None, "--extend-vocab"),
    ] = False
    dry_run: Annotated[bool, option("Print the plan and stop.", WHERE, None, "--dry-run")] = False


@dataclass(frozen=True)
class TokenizerOptions:
    tokenizer: Annotated[
        str | None,
        option(
            "Tokenizer: characters, byte-level BPE, or a tokenizer.json (default: auto).", DATA, "auto|char|bpe|PATH"
        ),
    ] = None
    vocab_size: Annotated[int | None, option("Vocabulary size of a BPE tokenizer.", DATA, "N")] = None


@with_groups
def train(
    invocation: typer.Context,
    corpus: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files, folders, patterns, JSONL, compressed or not, or - for standard input.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        option(
            "Continue this run with its text and settings; only length and intervals may change.",
            WHERE,
            "RUN",
            autocompletion=complete_run,
        ),
    ] = None,
    *,
    run: RunOptions,
    tokenizer: TokenizerOptions,
    model: ModelOptions,
    learning: LearningOptions,
) -> None:
    """Train a language model on a text.

    Without options, tokenizer, model size, batch size and learning rate are chosen from the text and the machine, and
    training stops when the validation loss no longer improves, or after ten minutes.
    """
    if resume is not None:
        refuse_with(invocation, "--resume", run, tokenizer, model, *learning.fixed_by_resuming(bool(corpus)))
        resume_run(resume, corpus, learning, COMMAND)
        return
    if not corpus:
        raise UsageError("Name a text to train on, as in tinylm train corpus.txt; - is standard input.")
    if run.init_from is not None:
        refuse_with(invocation, "--init-from", tokenizer, model)
    elif run.extend_vocab:
        raise UsageError("--extend-vocab is for a model that has a vocabulary; name it with --init-from.")
    _check_unknown(invocation, run, tokenizer, learning)

    started = process_start()
    from tinylm.checkpoint import RunFolder, load_model
    from tinylm.cost import choose_machine
    from tinylm.model.build import build_model
    from tinylm.text.prepare import choose_tokenizer

    console = learning.output.console()
    budget = chosen_budget(learning.budget)
    init_from = run.init_from and find_run(console, run.init_from)
    path = run.out or CHECKPOINTS / run_name(corpus[0])
    if init_from is not None and path.resolve() == init_from.resolve():
        raise UsageError(
            f"{path} is the run to begin from, which is never written to; choose another folder with --out."
        )
    with dry_run_at(console, path, run.force) if run.dry_run else new_run_at(path, run.force) as preparation:
        machine = choose_machine(learning.machine.device, learning.machine.dtype, console)
        console.note(f"On {machine.reasons}.")
        start, base, tokens_of, _ = load_model(init_from) if init_from else (None, None, None, None)
        architecture = base.model.architecture if base else model.architecture or "decoder"
        kind = "pairs" if architecture == "encoder-decoder" else "text"
        reading = read_text(invocation, console, corpus, learning.text, learning.validation, preparation, kind)
        if start is not None and base is not None and tokens_of is not None and run.extend_vocab:
            tokens_of, base = _extend(console, start, base, tokens_of, reading.alphabet)
        if tokens_of is not None:
            extend = "let the model learn them with --extend-vocab" if tokens_of.kind == "char" else None
            who = f"The tokenizer of {init_from}"
        else:
            tokens_of = choose_tokenizer(reading, tokenizer.tokenizer or "auto", tokenizer.vocab_size)
            tokens_of = tokens_of.with_mask() if architecture == "encoder" else tokens_of
            extend, who = None, f"The tokenizer {tokenizer.tokenizer}"
        reading = known_text(console, reading, tokens_of, learning.unknown, who, extend)
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


def _check_unknown(
    invocation: typer.Context, run: RunOptions, tokenizer: TokenizerOptions, learning: LearningOptions
) -> None:
    """Raises UsageError where --unknown means nothing: a tokenizer that is trained on the text knows all of it."""
    if not learning.unknown.skip or not typed(invocation, learning.unknown):
        return
    if run.extend_vocab:
        raise UsageError("--extend-vocab and --unknown skip contradict each other; give one of them.")
    if run.init_from is None and tokenizer.tokenizer in (None, "auto", "char", "bpe"):
        raise UsageError("--unknown is for a given vocabulary, by --init-from or --tokenizer PATH; leave it out.")


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
    """The corpus's name without its suffixes; stdin for standard input, the folder's name for a pattern in it."""
    from tinylm.text.compression import content_stem

    if corpus == "-":
        return "stdin"
    path = Path(corpus)
    while glob.has_magic(path.name) and not path.exists():
        path = path.parent
    return content_stem(path.resolve().name) or "run"
