"""The options of tinylm sample, and the settings of one prompt that are made of them; shared by all kinds of models."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tinylm.checks import check_numbers, flag, require
from tinylm.commands.options import MACHINE, option
from tinylm.config import DataConfig
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.inference.sampler import Sampling
    from tinylm.inference.translate import Search
    from tinylm.text.tokenizer import Tokenizer

PROMPT, CHOICE, TARGETS, TEXT = "Prompt", "Sampling", "Encoder-decoder", "Text"
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


@dataclass(frozen=True)
class PromptOptions:
    prompt: Annotated[
        str | None, option("Text to continue; - reads standard input.", PROMPT, "TEXT", "--prompt", "-p")
    ] = None
    prompt_file: Annotated[
        Path | None,
        option("File with the prompt or, as JSONL, many; - is standard input.", PROMPT, "FILE", "--prompt-file", "-f"),
    ] = None
    format: Annotated[
        str | None,
        option(
            "One prompt (text), or one per line (lines, jsonl); default: by suffix, else text.",
            PROMPT,
            "text|jsonl|lines",
            "--format",
        ),
    ] = None
    unknown: Annotated[
        str, option("Characters missing from the vocabulary: report an error, or skip them.", PROMPT, "error|skip")
    ] = "error"
    strict: Annotated[
        bool,
        option(
            "Refuse a prompt longer than the context (default: keep what fits, with a warning).",
            PROMPT,
            None,
            "--strict",
        ),
    ] = False


@dataclass(frozen=True)
class ChoiceOptions:
    temperature: Annotated[
        float | None,
        option(
            "Softmax temperature: lower is more conservative, higher more random; 0 is greedy (default: 0.8).",
            CHOICE,
            "X",
            "--temperature",
            "-t",
        ),
    ] = None
    top_k: Annotated[
        int, option("Sample from the K most likely tokens only (default: 0, all).", CHOICE, "K", "--top-k", "-k")
    ] = 0
    top_p: Annotated[
        float,
        option(
            "Nucleus sampling: the most likely tokens with total probability P (default: 1).", CHOICE, "P", "--top-p"
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        option("Drop tokens less than P times as likely as the most likely one (default: 0).", CHOICE, "P", "--min-p"),
    ] = 0.0
    repeat_penalty: Annotated[
        float,
        option("Above 1, tokens already in the text become less likely (default: 1).", CHOICE, "X", "--repeat-penalty"),
    ] = 1.0


@dataclass(frozen=True)
class SearchOptions:
    """Beam search for the target of a source; shared by sample and eval."""

    beams: Annotated[int, option("Beam width (default: 5).", TARGETS, "N")] = 5
    length_penalty: Annotated[
        float, option("Exponent of the length normalisation; higher prefers longer targets (default: 1).", TARGETS, "X")
    ] = 1.0

    def search(self) -> "Search":
        from tinylm.inference.translate import Search

        return Search(self.beams, self.length_penalty)


@dataclass(frozen=True)
class LengthOptions:
    max_tokens: Annotated[
        int, option("Tokens to generate per sample, at most (default: 256).", TEXT, "N", "--max-tokens", "-n")
    ] = 256
    num_samples: Annotated[
        int, option("Samples per prompt, generated as one batch (default: 1).", TEXT, "N", "--num-samples")
    ] = 1
    stop: Annotated[
        list[str] | None,
        option(
            r"Stop sequence, not printed; \n, \t and \\ are escapes. May be given several times.",
            TEXT,
            "TEXT",
            "--stop",
        ),
    ] = None


@dataclass(frozen=True)
class PrintOptions:
    separator: Annotated[
        str,
        option(r"Text between two samples, with the same escapes (default: \n---\n).", TEXT, "TEXT", "--separator"),
    ] = r"\n---\n"
    stream: Annotated[
        bool | None, option("Print tokens as they are generated (default: yes, for a single sample).", TEXT)
    ] = None
    echo: Annotated[
        bool | None, option("Print the prompt before the text (default: yes; no for encoder-decoder models).", TEXT)
    ] = None

    def between(self) -> str:
        """The separator with its escapes replaced. Raises UsageError for an unknown escape."""
        return unescaped("separator", self.separator)


@dataclass(frozen=True)
class SpeedOptions:
    quantize: Annotated[
        str, option("int8 weights: smaller, and faster on a CPU (default: none).", MACHINE, "none|int8")
    ] = "none"
    draft: Annotated[
        str,
        option(
            "Speculative decoding with n-grams of the training text; the output stays the same (default: auto).",
            MACHINE,
            "auto|ngram|none",
        ),
    ] = "auto"
    compile: Annotated[
        str,
        option(
            "Compile single-token steps on a CPU, in about 30 s; the code is cached (default: auto).",
            MACHINE,
            "auto|on|off",
        ),
    ] = "auto"
    cache: Annotated[
        bool, option("Use the KV cache; --no-cache is for comparison.", MACHINE, None, "--cache/--no-cache")
    ] = True


@dataclass(frozen=True)
class SampleSeedOptions:
    seed: Annotated[
        int | None, option("Random seed (default: a random one, printed on stderr and with --json).", MACHINE, "N")
    ] = None


@dataclass(frozen=True)
class SampleOptions:
    """All options of tinylm sample but model, device and output."""

    prompt: PromptOptions
    choice: ChoiceOptions
    search: SearchOptions
    length: LengthOptions
    printing: PrintOptions
    speed: SpeedOptions
    seed: SampleSeedOptions

    def settings(self, seed: int) -> "Settings":
        """The settings of a prompt that has none of its own. Raises UsageError for a value that cannot be used."""
        length = self.length
        require("" not in (length.stop or []), "--stop is empty; give the text to stop at, or leave it out.")
        stop = tuple(unescaped("stop", text) for text in length.stop or [])
        return Settings(length.max_tokens, length.num_samples, stop=stop, seed=seed, **vars(self.choice))


@dataclass(frozen=True)
class Settings:
    """How one prompt is answered: the options, or what the prompt's own line of JSONL replaced of them.

    A temperature of None is the default of the model's kind. Raises UsageError for a value out of range.
    """

    max_tokens: int
    num_samples: int
    temperature: float | None
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    stop: tuple[str, ...]
    seed: int

    def __post_init__(self) -> None:
        check_numbers(vars(self))

    def sampling(self, temperature: float) -> "Sampling":
        """`temperature` is the default."""
        from tinylm.inference.sampler import Sampling

        chosen = temperature if self.temperature is None else self.temperature
        return Sampling(chosen, self.top_k, self.top_p, self.min_p, self.repeat_penalty)


@dataclass(frozen=True)
class Prompt:
    """A prompt with its settings. `place` is the file and line that it stands in, if it is one of several.

    `keys` are the settings that its line of JSONL has; `adapter` is the line's adapter, written as for --adapter.
    """

    text: str
    settings: Settings
    place: str | None = None
    keys: frozenset[str] = frozenset()
    adapter: str | None = None

    @property
    def name(self) -> str:
        """For messages."""
        return self.place or "The prompt"


@dataclass(frozen=True)
class Request:
    """A prompt, and what the command line says of all prompts.

    Samples are numbered from `first`; `data` is the text that the answering weights were trained on; `typed` maps the
    names of options that were typed to their flags.
    """

    prompt: Prompt
    options: SampleOptions
    first: int
    data: DataConfig | None
    typed: Mapping[str, str]

    @property
    def settings(self) -> Settings:
        return self.prompt.settings

    def refuse(self, *names: str, because: str) -> None:
        """Raises UsageError for options that were typed, or are keys of the prompt's line, and would have no effect."""
        found = [self.typed[name] for name in names if name in self.typed]
        keys = [repr(name) for name in names if name in self.prompt.keys]
        if keys:
            found.append(f"{', '.join(keys)} of {self.prompt.name}")
        if found:
            raise UsageError(f"{because}: leave out {', '.join(found)}.")

    def record(self, **values: Any) -> dict[str, Any]:
        """An answer for --json."""
        return {**values, **({} if self.prompt.adapter is None else {"adapter": self.prompt.adapter})}


def unescaped(name: str, text: str) -> str:
    r"""The text of an option with its escapes (\n, \t and \\) replaced. Raises UsageError for any other escape."""

    def replacement(escape: re.Match[str]) -> str:
        if escape[0] not in ESCAPES:
            where = f"before {escape[0][1]!r}" if len(escape[0]) == 2 else "at its end"
            known = r"\n (line feed), \t (tab) or \\ (backslash)"
            raise UsageError(f"{flag(name)} has a backslash {where}; write {known}.")
        return ESCAPES[escape[0]]

    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"{flag(name)} has half of a surrogate pair, which is no character; leave it out.") from None
    return re.sub(r"\\.?", replacement, text, flags=re.DOTALL)


def known_part(console: Console, text: str, tokenizer: "Tokenizer", unknown: str, name: str = "The prompt") -> str:
    """The prompt without characters that are not in the vocabulary, or UsageError for those, as `unknown` says."""
    from tinylm.text.tokenizer import describe_characters

    unseen = tokenizer.unknown(text)
    if not unseen:
        return text
    if unknown == "error":
        raise UsageError(
            f"{name} has a character that the model never saw: {describe_characters(unseen[0])} at offset "
            f"{text.index(unseen[0])}. Write it another way, or leave such characters out with --unknown skip."
        )
    console.warn(f"{name}: skipped characters that the model never saw: {describe_characters(unseen)}.")
    return "".join(character for character in text if character not in unseen)
