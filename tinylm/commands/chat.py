"""tinylm chat: talk to a chat model in the terminal."""

import contextlib
import errno
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tinylm.commands.console import Console
from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import AdapterOption, ModelOption, OutputOptions
from tinylm.commands.sample_options import ChatTemplateOption, QuantizeOption, SeedOption, StopOptions
from tinylm.commands.streams import arriving_lines
from tinylm.config.settings import DeviceSettings
from tinylm.config.validation import Panel, Setting
from tinylm.errors import UsageError, concerning, first_line
from tinylm.generation.generation_config import (
    MAX_TOKENS,
    EngineSettings,
    GenerationConfig,
    SamplingSettings,
)
from tinylm.reporter import counted
from tinylm.system.files import open_regular, parse_json

if TYPE_CHECKING:
    from tinylm.generation.text_generator import ChatSession
    from tinylm.text.chat import Conversation

FIRST_OPTIONS = """
model adapter system resume temperature top_k top_p repeat_penalty max_tokens stop seed quantize engine device quiet
json
"""  # shown by -h

HELP = """\
/system TEXT   set the system message (without TEXT: the template's own), and begin a new conversation
/reset         begin a new conversation
/again         another answer to the last question, in place of the last one
/save FILE     append the conversation to FILE, as a line of JSONL for fine-tuning; --resume FILE continues it
/exit          end, as Ctrl-D does
A line that ends in \\ continues on the next line. Ctrl-C stops an answer; at the prompt, the second in a row ends."""

EXAMPLES = """Examples:

tinylm chat -m model.gguf
    Talk to the model of a GGUF file.

tinylm chat -m checkpoints/helper --system "Be brief." -t 0
    Give a system message, and decode greedily.

tinylm chat -m hf-folder --quiet < questions.txt
    One question per line, the answers on stdout.
"""


@dataclass(frozen=True)
class ChatSessionOptions:
    """Options for the conversation and its answers."""

    system: Annotated[
        str | None,
        Setting("System message (default: that of the chat template, if it has one).", Panel.PROMPT, metavar="TEXT"),
    ] = None
    resume: Annotated[
        Path | None,
        Setting("Continue the last conversation of a file that /save has written.", Panel.PROMPT, metavar="FILE"),
    ] = None
    chat_template: ChatTemplateOption = None
    max_tokens: Annotated[
        int,
        Setting("Maximum number of tokens per answer.", Panel.TEXT, MAX_TOKENS, flags=("--max-tokens", "-n")),
    ] = 512


@with_option_groups
def chat(
    ctx: typer.Context,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    *,
    options: ChatSessionOptions,
    sampling: SamplingSettings,
    stop: StopOptions,
    seed: SeedOption = None,
    quantize: QuantizeOption = "none",
    engine: EngineSettings,
    machine: DeviceSettings,
    output: OutputOptions,
) -> None:
    """Talk to a chat model in the terminal: questions from standard input, answers on standard output."""
    from tinylm.generation.text_generator import ChatSession
    from tinylm.models.load import open_generator

    console = output.console()
    config = GenerationConfig(
        max_tokens=options.max_tokens,
        stop=stop.sequences(),
        seed=secrets.randbits(32) if seed is None else seed,
        engine=engine.engine,
        **vars(sampling),
    )
    loaded = open_generator(
        model,
        config.speed,
        adapters=adapter or (),
        quantize=quantize,
        **vars(machine),
        reporter=console,
    )
    ctx.call_on_close(loaded.close)
    format = loaded.chat_format(options.chat_template)
    session = ChatSession(loaded, format, config, system=options.system)
    if options.resume is not None:
        session.restore(_last_conversation(options.resume))
        count = counted(len(session.messages), "message")
        console.note(f"Continuing a conversation of {count}; the last answer: {session.messages[-1]['content']}")
    console.note(f"Seed {config.seed}. /help lists the commands, Ctrl-D ends.")
    talk(session, console)


@concerning("resume")
def _last_conversation(path: Path) -> "Conversation":
    """The conversation in the last line of a file. Raises UsageError if there is none, or it cannot be read."""
    from tinylm.text.chat import parse_conversation

    number, last = 0, ""
    try:
        with open_regular(path) as file:
            for count, line in enumerate(chain.from_iterable(arriving_lines(file, str(path))), start=1):
                number, last = (count, line) if line.strip() else (number, last)
        return parse_conversation(parse_json(last), f"{path}, line {number}")
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from error
    except ValueError as error:
        raise UsageError(f"{path} has no conversation in its last line: {first_line(error)}.") from error


def talk(session: "ChatSession", console: Console) -> None:
    """Answer each line of standard input, or execute it if it is a command, until the end or /exit.

    Empty lines are skipped. If a question raises UsageError, the error is printed, and the next line is read. Without a
    terminal, raises typer.Exit(2) at the end in that case.
    """
    failed = False
    for line in _read_lines(console):
        if line.startswith("/"):
            command, _, argument = line.partition(" ")
            if command in ("/exit", "/quit"):
                break
            if command != "/again":
                _execute(command, argument.strip(), session, console)
                continue
        elif not line.strip():
            continue
        try:
            _print_answer(session, session.ask_again() if line.startswith("/") else session.ask(line), console)
        except UsageError as error:
            console.error(str(error))
            failed = True
    if failed and not sys.stdin.isatty():
        raise typer.Exit(2)


def _read_lines(console: Console) -> Iterator[str]:
    """Yield the lines of standard input, each joined with its continuation lines.

    A prompt is shown if standard input and output are terminals and the output is not JSON. A line that is not UTF-8 is
    then an error message, and otherwise raises UsageError. Ctrl-C at the prompt discards the line; the second in a row
    raises KeyboardInterrupt.
    """
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not console.as_json
    if terminal:
        with contextlib.suppress(ImportError):  # raised on Windows; readline adds line editing and history
            import readline  # noqa: F401
    line, interrupted = "", False
    while True:
        try:
            if terminal:
                with _handling_ctrl_c(signal.default_int_handler):
                    added = input("> " if not line else "")
            elif not (added := sys.stdin.readline()):
                raise EOFError
            added = added.removesuffix("\n").removesuffix("\r")
            added.encode()  # Python reads invalid bytes as surrogates in some locales
            interrupted = False
        except KeyboardInterrupt:
            console.result("")
            if interrupted:
                raise
            console.note("Press Ctrl-D, or Ctrl-C again, to leave; /save FILE keeps the conversation.")
            line, interrupted = "", True
            continue
        except EOFError:
            if line:
                yield line
            if terminal:
                console.result("")
            return
        except (UnicodeDecodeError, UnicodeEncodeError) as error:
            invalid = error.object[error.start]
            byte = ord(invalid) & 0xFF if isinstance(invalid, str) else invalid
            problem = f"Standard input is not valid UTF-8 (byte 0x{byte:02X}); convert it."
            if not terminal:
                raise UsageError(problem) from None
            console.error(problem)
            line = ""
            continue
        line += added
        if line.endswith("\\"):
            line = line[:-1] + "\n"
            continue
        yield line
        line = ""


@contextlib.contextmanager
def _handling_ctrl_c(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Context manager: Ctrl-C calls the handler. An ignored SIGINT stays ignored."""
    previous = signal.getsignal(signal.SIGINT)
    if previous in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _print_answer(session: "ChatSession", answer: Generator[str], console: Console) -> None:
    dropped = session.dropped
    parts: list[str] = []
    held, shown = "", False  # line breaks around an answer are not shown, since one follows each
    stopped: list[int] = []  # signal numbers
    previous: Any = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: FrameType | None) -> None:
        """Stop the answer; the second Ctrl-C ends the process."""
        if stopped:
            previous(number, frame)
        stopped.append(number)

    with _handling_ctrl_c(stop), contextlib.closing(answer):
        for chunk in answer:
            parts.append(chunk)
            if not console.as_json:
                text = held + chunk if shown else chunk.lstrip("\r\n")
                visible = text.rstrip("\r\n")
                console.result(visible, end="")
                held, shown = text[len(visible) :], shown or bool(visible)
            if stopped:
                break
    if console.as_json:
        console.record({"role": "assistant", "content": "".join(parts), "finish_reason": session.finish_reason})
    else:
        console.result("")
    if session.dropped > dropped:
        console.note(f"The context is full: the oldest {counted(session.dropped, 'message')} left out.")
    if session.finish_reason == "length" and not stopped:
        length = counted(session.config.max_tokens, "token")
        console.note(f"The answer was cut off after {length}; --max-tokens allows more.")


def _execute(command: str, argument: str, session: "ChatSession", console: Console) -> None:
    match command:
        case "/help":
            for line in HELP.splitlines():
                console.note(line, indent=15 if line.startswith("/") else 2)
        case "/reset":
            session.reset()
            console.note("A new conversation.")
        case "/system":
            session.system = argument or None
            session.reset()
            kept = "with this system message" if argument else "with the template's own system message, if it has one"
            console.note(f"A new conversation, {kept}.")
        case "/save":
            _save(argument, session, console)
        case _:
            console.error(
                f"{command[:60]} is not a command; /help lists them. Put a space before a question that begins with /."
            )


def _save(name: str, session: "ChatSession", console: Console) -> None:
    if not name:
        console.error("Name the file: /save FILE.")
        return
    messages = session.transcript()
    line = (json.dumps({"messages": messages}, ensure_ascii=False) + "\n").encode()
    try:
        with Path(name).open("a+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 1))
            if size and file.read(1) != b"\n":
                line = b"\n" + line
            written = file.write(line)
            if written < len(line):  # the disk has no room for all of it
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        console.error(f"Cannot write {name}: {reason}.")
        return
    console.note(f"Appended to {name}: {counted(len(messages), 'message')}.")
