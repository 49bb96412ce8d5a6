"""Going on with a run that was interrupted, or that has a longer budget now."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.checks import RANGES
from tinylm.commands.model import find_run
from tinylm.commands.new_run import chosen_budget
from tinylm.commands.options import LearningOptions
from tinylm.commands.reading import encode_corpus_again
from tinylm.commands.session import process_start, run_session
from tinylm.config import TrainingConfig
from tinylm.console import duration
from tinylm.errors import UsageError

EXIT_SECONDS = 0.2  # for the process to end

if TYPE_CHECKING:
    from tinylm.training.state import TrainerState


def resume_run(
    path: Path, corpus: Sequence[str] | None, options: LearningOptions, command: str, base: Path | None = None
) -> None:
    """Go on with a run from its last save, with what was decided when it began; budget and rhythm may change.

    `corpus` is the text that the run was trained on, if the user named it again. `command` is the tinylm command that
    resumes; `base` is where an adapter's base is now, if it was moved.
    """
    started = process_start()
    from tinylm.adapters.adapter import load_adapter_tensors
    from tinylm.adapters.load import adapters_of, add_adapter, load_base
    from tinylm.checkpoint import RunFolder, read_config, read_tokenizer, restore_model
    from tinylm.device import choose_device, describe_device
    from tinylm.place import only_user, resume_command
    from tinylm.tasks import make_task
    from tinylm.text.prepare import reopen_tokens
    from tinylm.training.state import TrainerState

    console = options.output.console()
    path = find_run(console, path)
    base = base and find_run(console, base)
    config = read_config(path)
    if config.training is None or config.runtime is None or config.data is None:
        raise UsageError(
            f"{path} was not trained but merged; begin a run from it with tinylm train --init-from {path}."
        )
    if not resume_command(path).startswith(f"{command} --resume "):
        raise UsageError(f"{path} is not what {command} makes; go on with it by {resume_command(path)}.")
    device = choose_device(config.runtime.device).value
    console.note(f"On {describe_device(device)} in {config.runtime.dtype}, as when {path} began.")
    if config.adapter is None and (adapters := adapters_of(path)):
        console.warn(
            f"{', '.join(run.name for run in adapters[:3])} was trained on the weights of {path}, and no longer fits "
            "when better ones replace them; copy the run first to keep both."
        )
    with only_user(path.absolute()):
        run = RunFolder(path)
        save = run.load_last(config)
        tokenizer = read_tokenizer(path, config)
        if corpus:
            tokens = encode_corpus_again(console, path, config.data, tokenizer, corpus, options.validation.val_data)
        else:
            tokens = reopen_tokens(path, config.data, tokenizer)
        budget = chosen_budget(options.budget) or config.training.budget
        training = dataclasses.replace(config.training, budget=budget, **options.changeable())
        config = dataclasses.replace(config, training=training)
        total_steps = training.budget.total_steps(make_task(tokens, tokenizer, config.model, training).steps_per_epoch)
        state = TrainerState.from_json(save.state)
        if finished := _finished(training, state, total_steps, time.monotonic() - started):
            reason, option = finished
            message = f"{path} is finished: {reason}. Go on with it by {resume_command(path)} {option}."
            if training.budget.time is not None and option.startswith("--time"):
                raise UsageError(message)
            console.warn(message)
        if config.adapter is None:
            model = restore_model(config, save.weights, path)
        else:
            model, _, _ = load_base(path, config.adapter, base, "cpu")
            load_adapter_tensors(add_adapter(model, config.adapter), save.weights, path)
        console.note(f"Going on with {path} at step {save.state['step']}.")
        run_session(console, run, config, model, tokens, tokenizer, command=command, started=started, resume_from=save)


def _finished(
    training: TrainingConfig, state: "TrainerState", total_steps: int | None, starting: float
) -> tuple[str, str] | None:
    """Why a run has nothing left to do, and the option that gives it more; `None` when it has.

    `starting` is the seconds that this process has taken so far, which count as well.
    """
    budget = training.budget
    if training.patience is not None and state.stale >= training.patience:
        more = 2 * max(training.patience, state.stale)
        return f"the last {state.stale} evaluations brought no improvement", f"--patience {more}"
    if budget.time is not None:
        # Without the time for one more step, an evaluation and a save, training would end where it began.
        step = state.stepping_seconds / max(state.step, 1)
        needed = step + 1.1 * (state.evaluation_seconds + state.save_seconds) + EXIT_SECONDS
        used = state.seconds + starting + needed
        if used < budget.time or (state.seconds < budget.time and state.evaluated != state.step):
            return None
        more_seconds = min(2 * max(budget.time, math.ceil(used)), RANGES["time"].most)
        return (
            f"it was trained for {duration(state.seconds)}, and its --time of {_typed_time(budget.time)} is the total "
            "of all its parts",
            f"--time {_typed_time(more_seconds)}",
        )
    if total_steps is None or state.step < total_steps or state.evaluated != state.step:
        return None
    if budget.epochs is not None:
        more_epochs = max(2 * budget.epochs, budget.epochs * math.ceil(1 + state.step / total_steps))
        return f"all {total_steps} steps of --epochs {budget.epochs:g} are done", f"--epochs {more_epochs:g}"
    return f"all {total_steps} steps are done", f"--steps {2 * max(total_steps, state.step)}"


def _typed_time(seconds: float) -> str:
    """Seconds as --time takes them: 90s, 5m or 2h."""
    if seconds < 1:
        return f"{seconds:.9f}".rstrip("0") + "s"
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size:.0f}{unit}"
    return f"{math.ceil(seconds)}s"
