"""Chat templates: Jinja programs that turn a conversation into the text that a chat model was trained on.

A template is untrusted, so it runs in a process of its own (`tinylm.text.template_worker`), which has limits of time
and memory.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinylm.config.run import MAX_TEMPLATE
from tinylm.errors import TinyLMError, UsageError

Message = Mapping[str, Any]  # role, content, and other keys that the template uses

# Limits of the renderings of a conversation. The processor time is enough for hundreds of messages with published
# templates that nest two loops over all messages; with all others, for 10,000 messages, and for the beginnings before
# and after each answer of 6,000 messages. The slowest ones take 13 µs for each message (AMD EPYC, 2026-11-30).
SECONDS = 10.0  # of processor time
SECONDS_PER_BYTE = 5e-6  # added for each byte of the conversation as JSON
SECONDS_PER_PREFIX, SECONDS_PER_MESSAGE = 0.01, 3e-5  # added for each rendering, and for each message in it
MAX_SECONDS_OF_PREFIXES = 600.0  # the most that is added for these, since their messages grow with a square
DEADLINE = 6  # elapsed time relative to the processor time; the only limit on Windows
MAX_TEXT = 1 << 23  # characters of the texts
TEXT_PER_BYTE = 64  # characters added for each byte of the conversation as JSON

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration -%}
{%- else -%}
{{ message.content + '<|im_end|>' }}
{%- endif -%}
{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""

# Unicode noncharacters that mark the scored spans in the output of a template; no conversation may contain them.
BEGIN, END = "\ufdd0", "\ufdd1"
_INVALID = re.compile(f"[{BEGIN}{END}\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_JSON_PER_CHARACTER = 12  # bytes: two escapes of six

_WORKER = "import sys; sys.path += sys.argv[1:]; from tinylm.text.template_worker import main; main()"
_CREATE_NEW_PROCESS_GROUP = 0x200  # Windows


class RenderJob(NamedTuple):
    """What to render of a conversation: prefixes, each a number of the first messages and `add_generation_prompt`.

    If there are several prefixes, the first has all messages.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    prefixes: Sequence[tuple[int, bool]]


# A rendering: its text, with BEGIN and END around answers; its length, if it is a prefix of the first rendering of the
# job; or why there is none, after which there are no others if it is the first.
Rendering = str | int | TinyLMError


def text_of(rendering: Rendering, first: str = "") -> str:
    """The text of a rendering. first: the first one of its job. Raises the error if there is none."""
    if isinstance(rendering, TinyLMError):
        raise rendering
    return first[:rendering] if isinstance(rendering, int) else rendering


class ChatTemplate:
    """A chat template. It is compiled, and its process started, when it is first rendered.

    special: texts of the tokenizer's special tokens by their names in templates: bos_token, eos_token, pad_token.
    seconds: limit of the processor time, to which more is added by the size of a conversation.
    marks_answers: whether the source has `{% generation %}` blocks.

    Raises TinyLMError for a source of more than MAX_TEMPLATE characters.
    """

    def __init__(self, source: str, special: Mapping[str, str] | None = None, seconds: float = SECONDS) -> None:
        if len(source) > MAX_TEMPLATE:
            raise TinyLMError(f"The chat template has {len(source)} characters; it can have at most {MAX_TEMPLATE}.")
        self.source = source
        self.special = dict(special or {})
        self.marks_answers = "endgeneration" in source
        self._seconds = seconds
        self._process: _Process | None = None
        self._lock = threading.Lock()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation; with `add_generation_prompt`, up to where the next answer begins.

        Raises UsageError for a conversation that the template refuses or that has invalid characters, and TinyLMError
        for a template that fails or is not a Jinja template.
        """
        ((rendering,),) = self.render_each([RenderJob(messages, tools, [(len(messages), add_generation_prompt)])])
        return unmarked(text_of(rendering))[0]

    def render_each(self, jobs: Sequence[RenderJob]) -> list[list[Rendering]]:
        """The renderings of each job, in the order of its prefixes.

        Raises TinyLMError if the source is not a Jinja template, or if its process cannot be started.
        """
        requests = [self._request(job) for job in jobs]
        answers = iter(self._answers([request for request in requests if isinstance(request, _WorkerRequest)]))
        return [
            [request] if isinstance(request, TinyLMError) else [self._rendering(value) for value in next(answers)]
            for request in requests
        ]

    def compile(self) -> None:
        """Compile the template before it is first rendered. Raises the errors of `render_each`."""
        with self._lock:
            self._running()

    def _running(self) -> "_Process":
        if self._process is None or not self._process.usable:
            self._process = _Process(self.source, self._seconds)
        return self._process

    def _request(self, job: RenderJob) -> "_WorkerRequest | TinyLMError":
        """The job as JSON with its limits, or why it cannot be rendered."""
        values = {**self.special, "messages": job.messages, "tools": job.tools, "documents": None}
        try:
            text = json.dumps(values, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
        except RecursionError:
            return UsageError("The conversation is nested too deeply.")
        if not text.isascii() and (found := _INVALID.search(text)):
            return UsageError(f"The conversation contains U+{ord(found[0]):04X}, which is not a character; remove it.")
        size = len(text.encode())
        added = sum(SECONDS_PER_PREFIX + SECONDS_PER_MESSAGE * count for count, _ in job.prefixes)
        seconds = self._seconds + SECONDS_PER_BYTE * size + min(added, MAX_SECONDS_OF_PREFIXES)
        characters = MAX_TEXT + TEXT_PER_BYTE * size
        limits = {"prefixes": job.prefixes, "seconds": seconds, "characters": characters}
        return _WorkerRequest(f'{json.dumps(limits)[:-1]}, "values": {text}}}', seconds, characters)

    def _answers(self, requests: Sequence["_WorkerRequest"]) -> list[list[Any]]:
        """The answer to each request. If the process ends, they are sent again one by one."""
        if not requests:
            return []
        seconds = max(request.seconds for request in requests)
        text = f"[{','.join(request.text for request in requests)}]"
        try:
            with self._lock:
                answers = self._running().ask(text, seconds, sum(request.characters for request in requests))
            if isinstance(answers, list) and len(answers) == len(requests) and all(answers):
                return answers
            raise _EndedError("its process answers nonsense")
        except _EndedError as error:
            if len(requests) == 1:
                return [[["failed", str(error)]]]
        return [answer for request in requests for answer in self._answers([request])]

    def _rendering(self, value: Any) -> Rendering:
        match value:
            case ["refused", str(reason)]:
                return UsageError(f"The chat template refuses the conversation: {_one_line(reason)}.")
            case ["failed", str(reason)]:
                return TinyLMError(f"The chat template fails on the conversation ({_one_line(reason)}).")
            case str():
                invalid = _SURROGATE if self.marks_answers else _INVALID
                if not value.isascii() and (found := invalid.search(value)):
                    return TinyLMError(f"The chat template writes U+{ord(found[0]):04X}, which is not a character.")
        return value


class _WorkerRequest(NamedTuple):
    """A job as JSON, its limit of processor time, and that of the characters of all its renderings."""

    text: str
    seconds: float
    characters: int


class _EndedError(Exception):
    """The process has ended; the text says why."""


class _Process:
    """The process of a template, which ends with this object and with this process, even after SIGKILL.

    Raises TinyLMError if it cannot be started, or if `source` is not a Jinja template.
    """

    def __init__(self, source: str, seconds: float) -> None:
        own_group: dict[str, Any] = {"start_new_session": True}  # Ctrl-C in a terminal does not reach it
        if os.name == "nt":
            own_group = {"creationflags": _CREATE_NEW_PROCESS_GROUP}
        path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-W", "ignore", "-c", _WORKER, *path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                **own_group,
            )
        except OSError as error:
            raise TinyLMError(f"Cannot start a process that renders the chat template: {error.strerror}.") from error
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._child, self._owner)
        first = json.dumps({"source": source, "marks": (BEGIN, END), "seconds": seconds})
        try:
            problem = self.ask(first, seconds, MAX_TEXT)
        except _EndedError as error:
            problem = ["failed", str(error)]
        if problem is not None:
            self._end()
            raise TinyLMError(f"The chat template is not a Jinja template ({_one_line(problem[1])}).")

    @property
    def usable(self) -> bool:
        """Whether the process runs, and belongs to this process, not to one that has forked it."""
        return self._end.alive and self._owner == os.getpid() and self._child.poll() is None

    def ask(self, request: str, seconds: float, characters: int) -> Any:
        """The answer to a line of JSON. `seconds`: limit of its processor time. `characters`: limit of the answer.

        Raises _EndedError, also for an answer that is too long.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        start = time.monotonic()
        timer = threading.Timer(DEADLINE * seconds, self._child.kill)
        timer.daemon = True
        answer = b""
        try:
            timer.start()
            with contextlib.suppress(OSError):  # the process has ended
                self._child.stdin.write(request.encode("utf-8", "surrogatepass") + b"\n")
                self._child.stdin.flush()
                answer = self._child.stdout.readline(_MAX_JSON_PER_CHARACTER * characters)
        except BaseException:  # an interrupt: the answer would be taken for that to the next line
            self._end()
            raise
        finally:
            timer.cancel()
        if answer.endswith(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(answer)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1)
        self._end()
        if time.monotonic() - start > DEADLINE * seconds or self._child.returncode == -getattr(signal, "SIGPROF", 0):
            raise _EndedError(f"it computes for more than {seconds:.0f} s")
        raise _EndedError("its process ended; it may need too much memory")


def _end(child: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner != os.getpid():  # a copy of the owner, made by fork
        return
    child.kill()
    for stream in filter(None, (child.stdin, child.stdout)):
        with contextlib.suppress(OSError):  # what was not yet sent
            stream.close()
    child.wait()


def unmarked(text: str) -> tuple[str, list[range]]:
    """A text without BEGIN and END, and the ranges of the characters that were between them."""
    plain, spans, length = [], [], 0
    for number, part in enumerate(text.split(BEGIN)):
        answer, _, rest = part.partition(END) if number else ("", "", part)
        rest = rest.replace(END, "")
        if number:
            spans.append(range(length, length + len(answer)))
        plain += [answer, rest]
        length += len(answer) + len(rest)
    return "".join(plain), spans


def _one_line(text: str) -> str:
    """A message of the template's process in one line of printable characters."""
    line = " ".join(text.split())[:200].rstrip(".")
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in line)
