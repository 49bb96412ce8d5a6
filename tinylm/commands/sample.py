"""tinylm sample: text from a model."""

import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tinylm.commands.model import AdapterPath, ModelPath, choose_where, open_model
from tinylm.commands.options import MachineOptions, OutputOptions, SeedOptions, option, with_groups
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.inference.text import TextStream
    from tinylm.text.tokenizer import Tokenizer

PROMPT, CHOICE, TEXT = "Prompt", "Choice of tokens", "Text"
BETWEEN_SAMPLES = "\n---\n"


@dataclass(frozen=True)
class PromptOptions:
    prompt: Annotated[
        str | None, option("Text to go on from; - is standard input.", PROMPT, "TEXT", "--prompt", "-p")
    ] = None
    prompt_file: Annotated[Path | None, option("A file with that text.", PROMPT, "FILE", "--prompt-file", "-f")] = None
    unknown: Annotated[str, option("What to do with characters the model never saw.", PROMPT, "error|skip")] = "error"
    strict: Annotated[
        bool, option("Refuse a prompt longer than the context, instead of keeping its tail.", PROMPT, None, "--strict")
    ] = False


@dataclass(frozen=True)
class ChoiceOptions:
    temperature: Annotated[
        float,
        option(
            "Below 1 is bolder, above 1 wilder; 0 takes the likeliest token (default: 0.8).",
            CHOICE,
            "X",
            "--temperature",
            "-t",
        ),
    ] = 0.8
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


@dataclass(frozen=True)
class LengthOptions:
    max_tokens: Annotated[int, option("Tokens a sample (default: 256).", TEXT, "N", "--max-tokens", "-n")] = 256
    num_samples: Annotated[int, option("Samples, drawn together.", TEXT, "N", "--num-samples")] = 1
    stop: Annotated[
        list[str] | None, option("Stop before this text; may be given several times.", TEXT, "TEXT", "--stop")
    ] = None
    stream: Annotated[bool, option("Print text as it comes.", TEXT, None, "--stream/--no-stream")] = True
    echo: Annotated[bool, option("Print the prompt before the text.", TEXT, None, "--echo/--no-echo")] = True


@with_groups
def sample(
    model: ModelPath = None,
    adapter: AdapterPath = None,
    quantize: Annotated[
        str, option("Weights in eight bits: smaller, and faster on a CPU.", "Machine", "none|int8")
    ] = "none",
    cache: Annotated[
        bool, option("Remember keys and values; --no-cache is for comparison.", "Machine", None, "--cache/--no-cache")
    ] = True,
    *,
    prompt: PromptOptions,
    choice: ChoiceOptions,
    length: LengthOptions,
    seed: SeedOptions,
    machine: MachineOptions,
    output: OutputOptions,
) -> None:
    """Write text with a model, beginning from a prompt."""
    console = output.console()
    if length.max_tokens < 1 or length.num_samples < 1:
        raise UsageError("--max-tokens and --num-samples must be 1 or more.")
    if quantize not in ("none", "int8"):
        raise UsageError(f"--quantize is {quantize!r}; it must be one of: none, int8.")
    text = _read_prompt(prompt)

    from tinylm.device import DTYPES
    from tinylm.inference.generator import generate
    from tinylm.inference.quantize import quantize_int8
    from tinylm.inference.sampler import Sampler, Sampling
    from tinylm.inference.text import TextStream, start_tokens
    from tinylm.model.decoder import Decoder

    sampling = Sampling(**vars(choice))
    device, dtype = choose_where(console, machine)
    opened = open_model(console, model, adapter, device)
    network, config, tokenizer = opened.network, opened.config, opened.tokenizer
    assert isinstance(network, Decoder)
    network.to(DTYPES[dtype])
    if quantize == "int8":
        quantize_int8(network)
    text = _known_part(console, text, tokenizer, prompt.unknown)
    ids = [int(i) for i in tokenizer.encode(text)] if text else []
    if len(ids) > config.model.context:
        message = f"The prompt has {len(ids)} tokens, and the model sees {config.model.context} at a time"
        if prompt.strict:
            raise UsageError(f"{message}; shorten it, or leave out --strict to keep its tail.")
        console.warn(f"{message}: it goes on from the tail.")
    chosen_seed = secrets.randbits(32) if seed.seed is None else seed.seed
    console.note(f"Seed {chosen_seed}.")

    begun = time.monotonic()
    start = start_tokens(tokenizer, config.data, ids)
    sampler = Sampler(sampling, chosen_seed, length.num_samples, network.embedding.weight.device, tokenizer.vocab_size)
    for row in range(length.num_samples):
        sampler.observe(row, ids)
    streams = [TextStream(tokenizer, length.stop or []) for _ in range(length.num_samples)]
    texts = [""] * length.num_samples
    streaming = length.stream and length.num_samples == 1 and not console.as_json
    if streaming and length.echo:
        console.result(text, end="")
    for tokens in generate(network, [start] * length.num_samples, sampler, length.max_tokens, cache):
        for row, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
            if not stream.finished:
                piece = stream.push(token)
                texts[row] += piece
                if streaming and piece:
                    console.result(piece, end="")
        if all(stream.finished for stream in streams):
            break
    for row, stream in enumerate(streams):
        rest = stream.finish()
        texts[row] += rest
        if streaming:
            console.result(rest)
    if console.as_json:
        _print_records(console, text, texts, streams, chosen_seed)
    elif not streaming:
        console.result(BETWEEN_SAMPLES.join((text if length.echo else "") + written for written in texts))
    seconds = time.monotonic() - begun
    written_tokens = sum(stream.tokens for stream in streams)
    console.note(f"{written_tokens} tokens in {seconds:.2f} s, {written_tokens / max(seconds, 1e-9):.0f} a second.")


def _print_records(console: Console, prompt: str, texts: list[str], streams: "list[TextStream]", seed: int) -> None:
    for written, stream in zip(texts, streams, strict=True):
        console.record(
            {
                "prompt": prompt,
                "text": written,
                "tokens": stream.tokens,
                "seed": seed,
                "finish_reason": stream.finish_reason,
            }
        )


def _read_prompt(options: PromptOptions) -> str:
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


def _known_part(console: Console, text: str, tokenizer: "Tokenizer", unknown: str) -> str:
    from tinylm.text.tokenizer import describe_characters

    strangers = tokenizer.unknown(text)
    if not strangers:
        return text
    if unknown == "error":
        raise UsageError(
            f"The prompt has a character that the model never saw: {describe_characters(strangers[0])} at offset "
            f"{text.index(strangers[0])}. Write it another way, or leave such characters out with --unknown skip."
        )
    console.warn(f"Left out of the prompt, since the model never saw them: {describe_characters(strangers)}.")
    return "".join(character for character in text if character not in strangers)
