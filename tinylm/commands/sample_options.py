"""Options of tinylm sample, some of which tinylm chat shares, and their conversion to library settings."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tinylm.commands.options import Panel, option
from tinylm.commands.trained_model_options import BeamSearchOptions
from tinylm.config.validation import require
from tinylm.errors import UsageError
from tinylm.system.files import read_json

if TYPE_CHECKING:
    from tinylm.generation.generation_config import GenerationConfig

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompts come from."""

    prompt: Annotated[
        str | None, option("Prompt text; - reads standard input.", Panel.PROMPT, "TEXT", "--prompt", "-p")
    ] = None
    prompt_file: Annotated[
        Path | None,
        option(
            "File with a prompt, or with one prompt per line (see --format); - is standard input.",
            Panel.PROMPT,
            "FILE",
            "--prompt-file",
            "-f",
        ),
    ] = None
    format: Annotated[
        str | None,
        option(
            "A single prompt (text), or one per line (lines, jsonl) (default: by file name, else text).",
            Panel.PROMPT,
            "text|jsonl|lines",
            "--format",
        ),
    ] = None
    chat: Annotated[
        bool,
        option(
            "Answer each prompt, or the 'messages' of each line of JSONL, through the chat template.",
            Panel.PROMPT,
            None,
            "--chat",
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        option(
            "Chat template: chatml, or a file with a Jinja template (default: the model's).",
            Panel.PROMPT,
            "chatml|FILE",
        ),
    ] = None


@dataclass(frozen=True)
class PromptPolicyOptions:
    """The fields of PromptPolicy."""

    unknown: Annotated[
        str,
        option("Characters outside the vocabulary: an error, or skipped (default: error).", Panel.PROMPT, "error|skip"),
    ] = "error"
    strict: Annotated[
        bool,
        option(
            "Fail if a prompt is longer than the context (default: truncate it, with a warning).",
            Panel.PROMPT,
            None,
            "--strict",
        ),
    ] = False


@dataclass(frozen=True)
class SamplingOptions:
    """The fields of SamplingConfig."""

    temperature: Annotated[
        float | None,
        option(
            "Softmax temperature: lower is more conservative, 0 is greedy (default: 0.8; pairs: beam search).",
            Panel.SAMPLING,
            "X",
            "--temperature",
            "-t",
        ),
    ] = None
    top_k: Annotated[
        int,
        option("Sample from the K most likely tokens only (default: 0, all).", Panel.SAMPLING, "K", "--top-k", "-k"),
    ] = 0
    top_p: Annotated[
        float,
        option(
            "Nucleus sampling: the most likely tokens with total probability P (default: 1).",
            Panel.SAMPLING,
            "P",
            "--top-p",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        option(
            "Drop tokens less than P times as likely as the most likely one (default: 0).",
            Panel.SAMPLING,
            "P",
            "--min-p",
        ),
    ] = 0.0
    repeat_penalty: Annotated[
        float,
        option(
            "Above 1, tokens already in the text become less likely (default: 1).",
            Panel.SAMPLING,
            "X",
            "--repeat-penalty",
        ),
    ] = 1.0


@dataclass(frozen=True)
class TextLengthOptions:
    """How much text is generated, and where it ends."""

    max_tokens: Annotated[
        int,
        option(
            "Length of each sample: at most N tokens (default: 256). For the number of samples, see -N.",
            Panel.TEXT,
            "N",
            "--max-tokens",
            "-n",
        ),
    ] = 256
    num_samples: Annotated[
        int,
        option("Samples per prompt, generated as one batch (default: 1).", Panel.TEXT, "N", "--num-samples", "-N"),
    ] = 1
    stop: Annotated[
        list[str] | None,
        option(
            r"End the text before this stop sequence (escapes: \n, \t, \\). May be given several times.",
            Panel.TEXT,
            "TEXT",
            "--stop",
        ),
    ] = None


@dataclass(frozen=True)
class PrintOptions:
    """How prompts and samples are printed."""

    separator: Annotated[
        str | None,
        option(
            r"Text between samples; escapes as in --stop (default: \n---\n; \n if trained with --format lines).",
            Panel.TEXT,
            "TEXT",
            "--separator",
        ),
    ] = None
    stream: Annotated[
        bool | None, option("Print tokens as they are generated (default: yes, for a single sample).", Panel.TEXT)
    ] = None
    echo: Annotated[
        bool | None,
        option("Print the prompt before the text (default: yes; no with --chat and for encoder-decoders).", Panel.TEXT),
    ] = None


@dataclass(frozen=True)
class StructureOptions:
    """The structure of the output, and what is recorded of it."""

    logprobs: Annotated[
        int,
        option(
            "With --json, record each token's log-probability and those of the N likeliest (default: 0, none).",
            Panel.TEXT,
            "N",
        ),
    ] = 0
    json_schema: Annotated[
        Path | None,
        option("File with a JSON Schema: the text is JSON that it admits, generated by torch.", Panel.TEXT, "FILE"),
    ] = None


@dataclass(frozen=True)
class QuantizeOptions:
    """Quantization of the weights."""

    quantize: Annotated[
        str,
        option(
            "Quantize the weights to int8: less memory, faster on a CPU (default: none).", Panel.MACHINE, "none|int8"
        ),
    ] = "none"


@dataclass(frozen=True)
class EngineOptions:
    """The field `engine` of SpeedConfig."""

    engine: Annotated[
        str,
        option(
            "Inference engine (default: auto, llama.cpp on a CPU wherever it can run the model, else torch).",
            Panel.MACHINE,
            "auto|torch|llama.cpp",
        ),
    ] = "auto"


@dataclass(frozen=True)
class SpeedOptions:
    """The fields of SpeedConfig except `engine`."""

    cache: Annotated[
        bool,
        option(
            "Use the KV cache (default: yes); --no-cache is slow, for comparison.",
            Panel.MACHINE,
            None,
            "--cache/--no-cache",
        ),
    ] = True


@dataclass(frozen=True)
class SampleSeedOptions:
    """The random seed."""

    seed: Annotated[
        int | None,
        option("Random seed (default: a random one, printed on stderr).", Panel.SAMPLING, "N"),
    ] = None


@dataclass(frozen=True)
class SampleOptions:
    """All options of tinylm sample except model, adapter, device, dtype and output."""

    prompt: PromptOptions
    policy: PromptPolicyOptions
    sampling: SamplingOptions
    beam_search: BeamSearchOptions
    length: TextLengthOptions
    structure: StructureOptions
    printing: PrintOptions
    quantize: QuantizeOptions
    engine: EngineOptions
    speed: SpeedOptions
    seed: SampleSeedOptions

    def generation_config(self, seed: int) -> "GenerationConfig":
        """The default settings of all prompts, with `seed`. Raises UsageError for an invalid value."""
        from tinylm.generation.generation_config import GenerationConfig

        length = self.length
        require("" not in (length.stop or []), "--stop is empty; give the text to stop at, or leave it out.")
        stop = tuple(unescape("stop", text) for text in length.stop or [])
        return GenerationConfig(
            length.max_tokens,
            length.num_samples,
            stop=stop,
            logprobs=self.structure.logprobs,
            json_schema=None if self.structure.json_schema is None else _read_schema(self.structure.json_schema),
            seed=seed,
            **vars(self.sampling),
        )


def _read_schema(file: Path) -> dict[str, Any]:
    """The JSON Schema in a file. Raises UsageError for a file that cannot be read or is not a JSON object."""
    try:
        schema = read_json(file)
    except OSError as error:
        raise UsageError(f"Cannot read --json-schema {file}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"--json-schema {file} is not JSON: {error}.") from error
    require(isinstance(schema, dict), f"--json-schema {file} is not a JSON object.")
    return cast("dict[str, Any]", schema)


def unescape(name: str, text: str) -> str:
    r"""Replace the escapes \n, \t and \\ in the value of the setting `name`.

    Raises UsageError for any other escape and for a lone surrogate.
    """

    def replacement(escape: re.Match[str]) -> str:
        if escape[0] not in ESCAPES:
            where = f"before {escape[0][1]!r}" if len(escape[0]) == 2 else "at its end"
            valid = r"\n (line feed), \t (tab) or \\ (backslash)"
            raise UsageError(f"`{name}` has a backslash {where}; write {valid}.")
        return ESCAPES[escape[0]]

    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError(f"`{name}` contains a lone surrogate, which is not a character; leave it out.") from None
    return re.sub(r"\\.?", replacement, text, flags=re.DOTALL)
