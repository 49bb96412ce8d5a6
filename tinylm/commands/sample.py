"""tinylm sample: generate text with a model."""

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tinylm.commands.console import Console
from tinylm.commands.option_groups import command_line_flags, with_option_groups
from tinylm.commands.options import AdapterOption, ModelOption, OutputOptions
from tinylm.commands.sample_options import PromptOptions, QuantizeOption, SeedOption, StopOptions, TextOptions, unescape
from tinylm.commands.streams import has_piped_input, read_stdin
from tinylm.config.jobs import rows_on
from tinylm.config.settings import DeviceSettings
from tinylm.config.validation import require
from tinylm.errors import UsageError
from tinylm.generation.generation_config import GenerationConfig, is_sampled, settings_without_effect
from tinylm.reporter import counted
from tinylm.run_directory.layout import path_exists

if TYPE_CHECKING:
    from tinylm.generation.prompts import Prompt
    from tinylm.generation.text_generator import Continuation, Sample
    from tinylm.jobs.masked.job import FilledPrompt
    from tinylm.models.model import Model

STANDARD_INPUT = "-"
WAITING_SECONDS = 2.0  # for standard input, before a note says so
# By architecture: the TextOptions without effect. Encoder-decoders accept --no-stream, which is their default.
TEXT_OPTIONS_WITHOUT_EFFECT = {
    "decoder": (),
    "encoder": ("separator", "stream", "echo"),
    "encoder-decoder": ("separator", "stream"),
}

FIRST_OPTIONS = """
model adapter prompt_file chat format temperature top_k top_p repeat_penalty max_tokens num_samples stop json_schema
stream echo seed quantize engine device quiet json
"""  # shown by -h

EXAMPLES = r"""Examples:

tinylm sample "Once upon a time" -n 400
    Continue a text with the newest model.

tinylm sample -m checkpoints/book -t 0.5 --seed 1
    Choose the model; the same seed gives the same text.

tinylm sample -f prompts.jsonl --json
    Many prompts, one JSON object per line, such as
    {"prompt": "The sea", "max_tokens": 50}.

tinylm sample -N 9 --no-echo --stop '\n' --separator '\n'
    Nine samples, one per line, as a model of --format lines gives.
"""


@with_option_groups
def sample(
    ctx: typer.Context,
    words: Annotated[
        str | None,
        typer.Argument(
            help="Prompt text, like --prompt; - reads standard input, as does no prompt at all in a pipe.",
            metavar="PROMPT",
            show_default=False,
        ),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    *,
    prompt_options: PromptOptions,
    generation: GenerationConfig,
    stop: StopOptions,
    text: TextOptions,
    quantize: QuantizeOption = "none",
    seed: SeedOption = None,
    machine: DeviceSettings,
    output: OutputOptions,
) -> None:
    """Generate text with a model: continue a prompt, fill its masks (encoders) or translate it (encoder-decoders)."""
    from tinylm.models.load import open_generator

    console = output.console()
    separator = None if text.separator is None else unescape("separator", text.separator)

    # Prompts and their settings
    chosen = secrets.randbits(32) if seed is None else seed
    config = replace(generation, stop=stop.sequences(), json_schema=text.schema(), seed=chosen)
    prompts = read_prompts(words, prompt_options, config, console)
    has_schema = any(prompt.config.json_schema is not None for prompt in prompts)
    prompt_adapters = list(dict.fromkeys(prompt.adapter for prompt in prompts if prompt.adapter is not None))
    if prompt_adapters and adapter:
        raise UsageError("`adapter` is for all prompts, but some lines name their own; leave `adapter` out.")

    # The model, with the engine that generates all texts
    loaded = open_generator(
        model,
        next((prompt.config.speed for prompt in prompts if prompt.config.json_schema), generation.speed),
        adapters=adapter or prompt_adapters,
        switches_adapters=bool(prompt_adapters),
        quantize=quantize,
        **vars(machine),
        reporter=console,
    )
    ctx.call_on_close(loaded.close)
    is_chat = prompt_options.chat
    require(is_chat or prompt_options.chat_template is None, "`chat_template` needs `chat`.")
    chat_format = loaded.chat_format(prompt_options.chat_template) if is_chat else None
    data = loaded.data
    if chat_format is None and data is not None and any(row.command == "chat" for row in rows_on(data.kind)):
        console.note(
            "This model was trained on conversations; --chat answers prompts, and without it they are continued."
        )
    if separator is None:
        is_lines = loaded.data is not None and loaded.data.format == "lines"
        separator = "\n" if is_lines or has_schema else "\n---\n"

    # Texts, one prompt after the other
    printer = _Printer(console, replace(text, echo=bool(text.echo)) if is_chat else text, separator)
    flags = command_line_flags(ctx, prompt_options, generation, stop, text)
    start = time.monotonic()
    next_stream = 0  # number of the random stream of the next sample
    for number, prompt in enumerate(prompts):
        if prompt_adapters:
            cast("Model", loaded).select_adapter(
                None if prompt.adapter is None else prompt_adapters.index(prompt.adapter)
            )
        reject_settings_without_effect(prompt, flags, loaded.architecture)
        has_seed = "seed" in prompt.keys  # its text must not depend on the prompts before it
        stream = 0 if has_seed else next_stream
        match loaded.architecture:
            case "decoder":
                if chat_format is None:
                    require(
                        prompt.conversation is None, f"{prompt.name} has 'messages', which are for `chat`; add that."
                    )
                    continuation = loaded.continue_prompt(prompt, stream)
                else:
                    continuation = loaded.answer(prompt, chat_format, stream)
                printer.print_continuation(prompt, continuation, separate=number > 0)
            case "encoder":
                printer.print_filled(prompt, cast("Model", loaded).fill_mask(prompt))
            case _:
                given = (words, prompt_options.prompt, prompt_options.prompt_file)
                if not prompt.text and given == (None, None, None):
                    raise UsageError(
                        "There is no source text; give it with `prompt`, or one per line with `prompt_file`."
                    )
                for target in cast("Model", loaded).translate(prompt, stream):
                    printer.print_target(prompt, target)
        if not has_seed:
            # An encoder-decoder takes each line of a prompt as a source, with num_samples targets.
            next_stream += prompt.config.num_samples * (1 + prompt.text.count("\n"))
    if loaded.architecture == "decoder" and not console.as_json:
        console.result("")
    if chat_format is None and loaded.chat_template is not None and not printer.has_text:
        console.note("The model ended the text before its first word. It has a chat template: --chat answers prompts.")
    seconds = time.monotonic() - start
    rate = printer.tokens / max(seconds, 1e-9)
    console.note(f"{counted(printer.tokens, 'token')} in {seconds:.2f} s, {rate:.0f} per second.")


def read_prompts(
    words: str | None, options: PromptOptions, config: GenerationConfig, console: Console
) -> "list[Prompt]":
    """The prompts from the argument `words`, --prompt, --prompt-file or standard input; without any of them, one empty
    prompt.

    config: the default settings of all prompts.

    Raises UsageError for a file that cannot be read or is invalid, and for a file or standard input that looks like
    JSONL without --format.
    """
    from tinylm.generation.prompts import parse_prompts, require_plain_text
    from tinylm.text.readers import JSONL_SUFFIXES

    sources = {"The argument PROMPT": words, "--prompt": options.prompt, "--prompt-file": options.prompt_file}
    given = [name for name, source in sources.items() if source is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} contradict each other; give one of them.")
    if words and words != STANDARD_INPUT and path_exists(Path(words)):
        console.warn(
            f"The prompt is the text {words!r}, which is also a path. To read a prompt from a file, use `prompt_file`; "
            "to choose a model, use `model`."
        )
    name, text = _read_text(options.prompt if words is None else words, options.prompt_file, console)
    if options.format is not None:
        return parse_prompts(text, options.format, config, name or "The prompt")
    if options.prompt_file is not None and options.prompt_file.suffix.lower() in JSONL_SUFFIXES:
        return parse_prompts(text, "jsonl", config, name or "The prompt")
    if name is not None:
        require_plain_text(text, name)
    return parse_prompts(text, "text", config)


def _read_text(prompt: str | None, file: Path | None, console: Console) -> tuple[str | None, str]:
    """The name and the text of the file or of standard input; for a given text and without a prompt, `None` and the
    text.

    A byte-order mark at the start of a file and one line break at its end are dropped. Raises UsageError for a file
    that cannot be read and for text that is not UTF-8.
    """
    from tinylm.generation.prompts import decode_utf8

    name = "Standard input"
    if STANDARD_INPUT in (prompt, str(file)):
        data = read_stdin()
    elif file is not None:
        try:
            name, data = str(file), file.read_bytes()
        except OSError as error:
            raise UsageError(f"Cannot read `prompt_file` {file}: {error.strerror}.") from error
    elif prompt is not None:
        try:
            return None, decode_utf8(prompt.encode("utf-8", "surrogateescape"), "The prompt")
        except UnicodeEncodeError as error:  # Windows allows lone surrogates in arguments
            message = f"The prompt contains a lone surrogate at offset {error.start}; leave it out."
            raise UsageError(message) from None
    elif has_piped_input():
        note = 'Waiting for the end of standard input, which has the prompt; with --prompt "", there is none.'
        timer = threading.Timer(WAITING_SECONDS, console.note, [note])
        timer.daemon = True
        timer.start()
        try:
            data = read_stdin()
        except OSError:  # opened for writing only, as by nohup
            data = b""
        finally:
            timer.cancel()
        if not data:
            return None, ""
        console.note('The prompt comes from standard input; with --prompt "", there is none.')
    else:
        return None, ""
    return name, decode_utf8(data, name).removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


def reject_settings_without_effect(prompt: "Prompt", flags: Mapping[str, str], architecture: str) -> None:
    """Raise UsageError for settings that the architecture ignores, on the command line or in the prompt's JSONL line.

    flags: the flags on the command line, by option name.
    """
    text_options = TEXT_OPTIONS_WITHOUT_EFFECT[architecture]
    for names, reason in settings_without_effect(architecture, is_sampled(prompt.config)):
        ignored = (*names, *text_options)
        found = [
            flag
            for name, flag in flags.items()
            if name in ignored and not (flag == "--no-stream" and architecture == "encoder-decoder")
        ]
        if keys := [repr(name) for name in names if name in prompt.keys]:
            found.append(f"{', '.join(keys)} of {prompt.name}")
        if found:
            raise UsageError(f"{reason}: leave out {', '.join(found)}.")


@dataclass
class _Printer:
    """Prints generated texts, as text or JSON records, and counts the generated tokens.

    separator: the text between two samples. tokens: number of generated tokens, or of filled masks. has_text: whether
    anything but white space was generated.
    """

    console: Console
    options: TextOptions
    separator: str
    tokens: int = 0
    has_text: bool = False

    def print_continuation(self, prompt: "Prompt", continuation: "Continuation", separate: bool) -> None:
        """Generate and print the samples of a prompt, with the separator between them and no line break at the end.

        separate: whether to print the separator first, as for every prompt but the first.
        """
        console, is_json = self.console, prompt.config.json_schema is not None  # which is printed when it is complete
        echo = not is_json if self.options.echo is None else self.options.echo
        has_one_text = prompt.config.num_samples == 1 and not is_json
        streaming = self.options.stream is not False and has_one_text and not console.as_json
        if separate and not console.as_json:
            console.result(self.separator, end="")
        if streaming and echo:
            console.result(continuation.prompt, end="")
        for chunk in continuation:
            if streaming:
                console.result(chunk.text, end="")
        samples = continuation.samples
        self.tokens += sum(sample.tokens for sample in samples)
        self.has_text |= any(sample.text.strip() for sample in samples)
        if console.as_json:
            for sample in samples:
                self._record(prompt, _sample_fields(sample))
        elif not streaming:
            start = continuation.prompt if echo else ""
            console.result(self.separator.join(start + sample.text for sample in samples), end="")

    def print_filled(self, prompt: "Prompt", filled: "FilledPrompt") -> None:
        """Print the prompt with its masks filled; with --json, also the candidates for each mask."""
        self.tokens += len(filled.masks)
        if not self.console.as_json:
            self.console.result(filled.text)
            return
        masks = [[candidate._asdict() for candidate in mask] for mask in filled.masks]
        self._record(prompt, {"prompt": prompt.text, "text": filled.text, "masks": masks})

    def print_target(self, prompt: "Prompt", target: "Sample") -> None:
        """Print a target as one line; with --echo, the source and a tab come before it."""
        self.tokens += target.tokens
        if self.console.as_json:
            self._record(prompt, _sample_fields(target))
        else:
            source = f"{target.prompt}\t" if self.options.echo else ""
            self.console.result(source + target.text.replace("\n", " "))

    def _record(self, prompt: "Prompt", values: dict[str, Any]) -> None:
        adapter = {} if prompt.adapter is None else {"adapter": prompt.adapter}
        self.console.record({**values, **adapter})


def _sample_fields(sample: "Sample") -> dict[str, Any]:
    return {name: value for name, value in vars(sample).items() if value is not None}
