"""What tinylm sample is told: prompt, choice of tokens, and text; shared by what each kind of model does with it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tinylm.commands.options import MACHINE, option
from tinylm.config import DataConfig
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.inference.sampler import Sampling
    from tinylm.inference.translate import Search
    from tinylm.text.tokenizer import Tokenizer

PROMPT, CHOICE, TARGETS, TEXT = "Prompt", "Choice of tokens", "Targets", "Text"


@dataclass(frozen=True)
class PromptOptions:
    prompt: Annotated[
        str | None, option("Text to go on from; - is standard input.", PROMPT, "TEXT", "--prompt", "-p")
    ] = None
    prompt_file: Annotated[Path | None, option("A file with that text.", PROMPT, "FILE", "--prompt-file", "-f")] = None
    unknown: Annotated[str, option("What to do with characters the model never saw.", PROMPT, "error|skip")] = "error"
    strict: Annotated[
        bool, option("Refuse a prompt longer than the context, instead of reading what fits.", PROMPT, None, "--strict")
    ] = False


@dataclass(frozen=True)
class ChoiceOptions:
    temperature: Annotated[
        float | None,
        option(
            "Below 1 is bolder, above 1 wilder; 0 takes the likeliest token (default: 0.8; 0 for targets).",
            CHOICE,
            "X",
            "--temperature",
            "-t",
        ),
    ] = None
    top_k: Annotated[int, option("Choose among the K likeliest tokens.", CHOICE, "K", "--top-k", "-k")] = 0
    top_p: Annotated[
        float, option("Choose among the likeliest tokens that have probability P together.", CHOICE, "P", "--top-p")
    ] = 1.0
    min_p: Annotated[
        float, option("Leave out tokens less than P times as likely as the likeliest.", CHOICE, "P", "--min-p")
    ] = 0.0
    repeat_penalty: Annotated[
        float, option("Above 1, make tokens that were there already less likely.", CHOICE, "X", "--repeat-penalty")
    ] = 1.0

    def sampling(self, temperature: float) -> "Sampling":
        """`temperature` is for when the user gave none."""
        from tinylm.inference.sampler import Sampling

        chosen = temperature if self.temperature is None else self.temperature
        return Sampling(chosen, self.top_k, self.top_p, self.min_p, self.repeat_penalty)


@dataclass(frozen=True)
class SearchOptions:
    """How the best target of a source is searched for; shared by sample and eval."""

    beams: Annotated[int, option("Hypotheses searched at a time (default: 5).", TARGETS, "N")] = 5
    length_penalty: Annotated[float, option("Above 0, longer targets are preferred (default: 1).", TARGETS, "X")] = 1.0

    def search(self) -> "Search":
        from tinylm.inference.translate import Search

        return Search(self.beams, self.length_penalty)


@dataclass(frozen=True)
class LengthOptions:
    max_tokens: Annotated[int, option("Tokens a sample (default: 256).", TEXT, "N", "--max-tokens", "-n")] = 256
    num_samples: Annotated[int, option("Samples, drawn together.", TEXT, "N", "--num-samples")] = 1
    stop: Annotated[
        list[str] | None, option("Stop before this text; may be given several times.", TEXT, "TEXT", "--stop")
    ] = None
    stream: Annotated[bool | None, option("Print text as it comes (default: yes, where it can).", TEXT)] = None
    echo: Annotated[bool | None, option("Print the prompt before the text (default: yes, but for targets).", TEXT)] = (
        None
    )


@dataclass(frozen=True)
class SpeedOptions:
    quantize: Annotated[str, option("Weights in eight bits: smaller, and faster on a CPU.", MACHINE, "none|int8")] = (
        "none"
    )
    draft: Annotated[
        str,
        option(
            "Guess tokens ahead by what the training text goes on with; the model checks several at once, and what it "
            "writes stays as it is (default: auto, where it pays).",
            MACHINE,
            "auto|ngram|none",
        ),
    ] = "auto"
    compile: Annotated[
        str,
        option(
            "Compile the writing of one sample on a CPU, in half a minute; the code is kept (default: auto, where it "
            "pays, or was done before).",
            MACHINE,
            "auto|on|off",
        ),
    ] = "auto"
    cache: Annotated[
        bool, option("Remember keys and values; --no-cache is for comparison.", MACHINE, None, "--cache/--no-cache")
    ] = True


def read_prompt(options: PromptOptions) -> str:
    """The prompt from wherever it was given; one line end at the end of a file or of standard input is dropped."""
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file contradict each other; give one of them.")
    if options.unknown not in ("error", "skip"):
        raise UsageError(f"--unknown is {options.unknown!r}; it must be one of: error, skip.")
    name = "The prompt"
    try:
        if options.prompt == "-" or (options.prompt_file is not None and str(options.prompt_file) == "-"):
            name = "Standard input"
            data = sys.stdin.buffer.read()
        elif options.prompt_file is not None:
            name = str(options.prompt_file)
            data = options.prompt_file.read_bytes()
        else:
            return (options.prompt or "").encode("utf-8", "surrogateescape").decode("utf-8")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not valid utf-8 at byte {error.start}; mend that byte.") from None
    except OSError as error:
        raise UsageError(f"Cannot read --prompt-file {name}: {error.strerror}.") from error
    return text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")


@dataclass(frozen=True)
class Prompt:
    """`adapter` is the one that a line of JSONL names for itself, as --adapter would."""

    text: str
    adapter: str | None = None


def read_prompts(options: PromptOptions) -> list[Prompt]:
    """The prompt; or of a file of JSONL, one for each line, which has a `prompt` and may have an `adapter`."""
    from tinylm.text.readers import JSONL_SUFFIXES, parse_json_line, require_characters

    text = read_prompt(options)
    if options.prompt_file is None or options.prompt_file.suffix.lower() not in JSONL_SUFFIXES:
        return [Prompt(text)]
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{options.prompt_file}, line {number}"
        record = parse_json_line(line, place)
        values = [record.get(name) if isinstance(record, dict) else None for name in ("prompt", "adapter")]
        if not isinstance(values[0], str) or not isinstance(values[1], str | None):
            raise UsageError(f"{place}: expected an object with a text under 'prompt', and maybe one under 'adapter'.")
        prompts.append(Prompt(require_characters(values[0], place), values[1]))
    if not prompts:
        raise UsageError(f"{options.prompt_file} has no prompt in it; write one a line.")
    return prompts


@dataclass(frozen=True)
class Request:
    """A prompt, and all that was said about how to answer it.

    Samples are numbered from `first` on; `data` is the text that the answering weights were trained on; `typed` has the
    flags that were, by their options' names.
    """

    prompt: Prompt
    prompt_options: PromptOptions
    choice: ChoiceOptions
    search: SearchOptions
    length: LengthOptions
    seed: int
    cache: bool
    draft: str
    first: int
    data: DataConfig | None
    typed: Mapping[str, str]

    def refuse(self, *names: str, because: str) -> None:
        """Raises UsageError for options that were typed and that nothing would come of."""
        found = [self.typed[name] for name in names if name in self.typed]
        if found:
            raise UsageError(f"{because}: leave out {', '.join(found)}.")

    def record(self, **values: Any) -> dict[str, Any]:
        """An answer for --json."""
        return {**values, **({} if self.prompt.adapter is None else {"adapter": self.prompt.adapter})}


def known_part(console: Console, text: str, tokenizer: "Tokenizer", unknown: str, name: str = "The prompt") -> str:
    """The prompt, or what is left of it without characters that the model never saw. Raises UsageError for those."""
    from tinylm.text.tokenizer import describe_characters

    strangers = tokenizer.unknown(text)
    if not strangers:
        return text
    if unknown == "error":
        raise UsageError(
            f"{name} has a character that the model never saw: {describe_characters(strangers[0])} at offset "
            f"{text.index(strangers[0])}. Write it another way, or leave such characters out with --unknown skip."
        )
    console.warn(
        f"Left out of {name[0].lower()}{name[1:]}, since the model never saw them: {describe_characters(strangers)}."
    )
    return "".join(character for character in text if character not in strangers)
