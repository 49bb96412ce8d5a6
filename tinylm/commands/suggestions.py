"""What a user may have meant by an unknown option or command, or by an address in place of a path."""

import difflib
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from tinylm.commands.console import long_flag
from tinylm.config.similar_names import MAX_SUGGESTIONS, NEARNESS, known_names, suggest_options
from tinylm.errors import UsageError
from tinylm.run_directory.layout import path_exists

# Names of other tools by the argument of tinylm, as in `tinylm.config.similar_names`.
OTHER_ARGUMENTS = {
    "adapter": "adapter adapter-path lora",
    "corpus": "data dataset train-data train-file train input input-file text file",
    "folder": "folder dir path",
    "model": "model model-path run checkpoint input",
    "runs": "run model checkpoint name",
    "source": "model model-path input hf-path",
    "text": "data dataset eval-data test-data test input input-file file corpus",
}
# Commands of other tools, by the command line of tinylm.
OTHER_COMMANDS = {
    "tinylm cache": "clean clear prune",
    "tinylm chat": "talk ask",
    "tinylm compare": "diff",
    "tinylm doctor": "check env benchmark bench",
    "tinylm eval": "evaluate evaluation test perplexity ppl score",
    "tinylm export": "save quantize to-gguf to-hf",
    "tinylm finetune-lora": "finetune fine-tune lora qlora peft sft",
    "tinylm import": "load pull download create from-hf",
    "tinylm import or tinylm export": "convert",
    "tinylm info": "show describe inspect",
    "tinylm merge-lora": "merge fuse merge-adapter",
    "tinylm report": "plot dashboard html curves",
    "tinylm runs": "list ls ps models checkpoints",
    "tinylm sample": "generate gen run infer inference predict complete completion prompt",
    "tinylm train": "pretrain pre-train fit new start",
    "tinylm train --resume RUN": "resume continue",
    "tinylm train-tokenizer": "tokenize tokenizer tokenise bpe",
    "tinylm --help": "help",
    "tinylm --version": "version",
    "tinylm serve": "server api",
    "rm -r checkpoints/NAME": "rm remove delete",
}
_ADDRESS = re.compile(r"(https?|ftp|s3|gs|hf):/{1,2}(.+)", re.IGNORECASE)  # a Path has one slash of two
_HUB_MODEL = re.compile(r"(?:www\.)?huggingface\.co/([\w.-]+/[\w.-]+)/?")
NOT_PATHS = ("words", "prompt", "system", "stop", "separator")  # parameters whose values may be any text


def explain_unknown_option(ctx: typer.Context, name: str) -> str:
    """A sentence that leads from an unknown option to one of the running command or to its argument, or ""."""
    word = name.lstrip("-").replace("_", "-").lower()
    parameters: list[Any] = ctx.command.get_params(ctx)
    for argument in (parameter for parameter in parameters if parameter.param_type_name == "argument"):
        if word in OTHER_ARGUMENTS.get(argument.name, "").split():
            return f"It is an argument without a flag: {ctx.command_path} {argument.metavar or argument.name.upper()}."
    flags = [flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)]
    options = [flag.removeprefix("--") for flag in flags if flag.startswith("--")]
    found = [f"--{option}" for option in suggest_options(name, options)]
    return f"Did you mean {' or '.join(found)}?" if found else ""


def explain_extra_argument(ctx: typer.Context) -> str:
    """A sentence for a command line with more arguments than the command has; "" where none helps."""
    options: list[Any] = [parameter for parameter in ctx.command.params if parameter.param_type_name == "option"]
    flags = {str(option.name): long_flag(option) for option in options}
    if "prompt" in flags and "prompt_file" in flags:
        return f'Quote a prompt of several words: {ctx.command_path} "Once upon a time".'
    if "system" in flags:
        return 'To answer a single question: tinylm sample --chat "QUESTION".'
    return f"The path to write is given with {flags['out']}." if "out" in flags else ""


def explain_unknown_command(name: str, commands: list[str]) -> str:
    """A sentence that leads from an unknown command to one of these; "" without one."""
    if "." in name and path_exists(Path(name)):
        return f"Did you mean: tinylm train {shlex.quote(name)}?"
    name = name.lower().replace("_", "-")
    if known := known_names(OTHER_COMMANDS, name):
        return f"Did you mean: {known[0]}?"
    begun = [command for command in commands if command.startswith(name)]
    near = begun or difflib.get_close_matches(name, commands, MAX_SUGGESTIONS, NEARNESS)
    return f"Did you mean: {' or '.join(f'tinylm {command}' for command in near)}?" if near else ""


def reject_addresses(ctx: typer.Context, values: Mapping[str, Any]) -> None:
    """Raise UsageError for the address of a text or a model on the internet in place of a path.

    values: the parameters of the running command, by name.
    """
    for name, value in values.items():
        for entry in value if isinstance(value, list) else [value]:
            if name in NOT_PATHS or not isinstance(entry, (str, Path)) or not (found := _ADDRESS.fullmatch(str(entry))):
                continue
            address = f"{found[1].lower()}://{found[2]}"
            hub = _HUB_MODEL.fullmatch(found[2]) if found[1].lower() != "hf" else re.fullmatch(r"(.+?)/?", found[2])
            if hub and name not in ("corpus", "text"):
                raise UsageError(f"{address} is an address; a model of the Hugging Face hub is written hf:{hub[1]}.")
            quoted = shlex.quote(address)
            advice = f"fetch it first: curl -fLO {quoted}"
            if name in ("corpus", "text"):
                advice = f"fetch and pipe it: curl -fL {quoted} | {ctx.command_path} -"
            raise UsageError(f"{address} is an address, and {ctx.command_path} reads files; {advice}.")
