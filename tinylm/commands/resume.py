"""Going on with a run that was interrupted, or that has a longer budget now."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tinylm.commands.new_run import chosen_budget
from tinylm.commands.options import LearningOptions
from tinylm.commands.reading import encode_corpus_again
from tinylm.commands.session import process_start, run_session
from tinylm.errors import UsageError


def resume_run(
    path: Path, corpus: Sequence[str] | None, options: LearningOptions, command: str, base: Path | None = None
) -> None:
    """Go on with a run from its last save, with what was decided when it began; budget and rhythm may change.

    `corpus` is the text that the run was trained on, if the user named it again. `command` is the tinylm command that
    resumes; `base` is where an adapter's base is now, if it was moved.
    """
    started = process_start()
    from tinylm.adapters.adapter import load_adapter_tensors
    from tinylm.adapters.load import add_adapter, load_base
    from tinylm.checkpoint import RunFolder, read_config, read_tokenizer, restore_model
    from tinylm.device import choose_device, describe_device
    from tinylm.place import only_user, resume_command
    from tinylm.text.prepare import reopen_tokens

    console = options.output.console()
    config = read_config(path)
    if config.training is None or config.runtime is None or config.data is None:
        raise UsageError(
            f"{path} was not trained but merged; begin a run from it with tinylm train --init-from {path}."
        )
    if not resume_command(path).startswith(f"{command} --resume "):
        raise UsageError(f"{path} is not what {command} makes; go on with it by {resume_command(path)}.")
    device = choose_device(config.runtime.device).value
    console.note(f"On {describe_device(device)} in {config.runtime.dtype}, as when {path} began.")
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
        if config.adapter is None:
            model = restore_model(config, save.weights, path)
        else:
            model, _, _ = load_base(path, config.adapter, base, "cpu")
            load_adapter_tensors(add_adapter(model, config.adapter), save.weights, path)
        console.note(f"Going on with {path} at step {save.state['step']}.")
        run_session(console, run, config, model, tokens, tokenizer, command=command, started=started, resume_from=save)
