"""What tinylm sample does with an encoder-decoder: a target for each source."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tinylm.commands.model import OpenModel
from tinylm.commands.sampling import ChoiceOptions, Request, known_part
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.inference.translate import Found
    from tinylm.model.encoder_decoder import EncoderDecoder

BEAMS = 5
SOURCES_AT_ONCE = 32
LARGEST_PENALTY = 10
DRAWING = ("top_k", "top_p", "min_p", "repeat_penalty", "num_samples")


def write_targets(console: Console, network: "EncoderDecoder", opened: OpenModel, request: Request) -> int:
    """Print a target a line for each line of the prompt, in order; returns how many tokens they have.

    The best that a search finds, or with a temperature one drawn at random.
    """
    if request.prompt_options.prompt is None and request.prompt_options.prompt_file is None:
        raise UsageError("There is no source; give one with --prompt, or one a line with --prompt-file.")
    choice, length, seed, tokenizer = request.choice, request.length, request.seed, opened.tokenizer
    drawn = choice.temperature is not None and choice.temperature > 0
    stream = ("stream",) if length.stream else ()
    request.refuse(*stream, "cache", because="A target is found with a cache, and printed once it is whole")
    if drawn:
        request.refuse(
            "beams", "length_penalty", because="With a --temperature, targets are drawn and not searched for"
        )
    else:
        request.refuse(*DRAWING, because="A search finds the same target every time, unless there is a --temperature")
    lines = [
        known_part(console, line.strip(), tokenizer, request.prompt_options.unknown, f"Source {number}").strip()
        for number, line in enumerate(request.prompt.text.split("\n"), start=1)
    ]
    sources = [[int(i) for i in tokenizer.encode(line)] for line in lines]
    _check_lengths(console, sources, network.context, request.prompt_options.strict)
    sources = [source[: network.context - 1] for source in sources]
    most = min(length.max_tokens, network.context)
    check_search(BEAMS if choice.beams is None else choice.beams, choice.length_penalty)
    if drawn:
        console.note(f"Seed {seed}.")
    written = 0
    for line, found in zip(
        (line for line in lines for _ in range(length.num_samples)),
        draw_targets(network, sources, tokenizer.end_of_text, choice, length.num_samples, most, seed, request.first)
        if drawn
        else find_targets(network, sources, tokenizer.end_of_text, choice.beams or BEAMS, choice.length_penalty, most),
        strict=True,
    ):
        target = tokenizer.decode(found.tokens)
        stops = [place for stop in length.stop or [] if stop and (place := target.find(stop)) >= 0]
        target = target[: min(stops)] if stops else target
        written += len(found.tokens)
        if console.as_json:
            reason = "stop" if stops else "end" if found.ended else "length"
            console.record(request.record(**_record(line, target, found, seed, reason)))
        else:
            console.result((f"{line}\t" if length.echo else "") + target.replace("\n", " "))
    return written


def check_search(beams: int, length_penalty: float) -> None:
    """Raises UsageError for a search that cannot be made."""
    if beams < 1:
        raise UsageError(f"--beams is {beams}; it must be 1 or more.")
    if not abs(length_penalty) <= LARGEST_PENALTY:
        raise UsageError(
            f"--length-penalty is {length_penalty}; it must be from -{LARGEST_PENALTY} to {LARGEST_PENALTY}."
        )


def _check_lengths(console: Console, sources: list[list[int]], context: int, strict: bool) -> None:
    for number, source in enumerate(sources, start=1):
        if len(source) + 1 > context:
            message = f"Source {number} has {len(source)} tokens, and the model reads {context - 1}"
            if strict:
                raise UsageError(f"{message}; shorten it, or leave out --strict to read its beginning.")
            console.warn(f"{message}: the rest is left out.")


def find_targets(
    network: "EncoderDecoder", sources: list[list[int]], end: int, beams: int, length_penalty: float, most: int
) -> "Iterator[Found]":
    """The best target of each source, in order. An empty source has an empty target."""
    from tinylm.inference.translate import Found, beam_search

    for first in range(0, len(sources), SOURCES_AT_ONCE):
        part = sources[first : first + SOURCES_AT_ONCE]
        full = [source for source in part if source]
        found = iter(
            beam_search(network, full, end, beams=beams, length_penalty=length_penalty, max_tokens=most) if full else []
        )
        for source in part:
            yield next(found) if source else Found([], 0.0, ended=True)


def draw_targets(
    network: "EncoderDecoder",
    sources: list[list[int]],
    end: int,
    choice: ChoiceOptions,
    num_samples: int,
    most: int,
    seed: int,
    first: int,
) -> "Iterator[Found]":
    """Targets drawn token by token, `num_samples` of each source, without a score.

    Target i, counted from `first`, draws from (seed, i).
    """
    from tinylm.inference.generator import generate
    from tinylm.inference.sampler import Sampler
    from tinylm.inference.translate import Found, condition

    device = network.device
    for number, source in enumerate(sources):
        row = first + number * num_samples
        sampler = Sampler(choice.sampling(0.0), seed, num_samples, device, network.vocab_size, row)
        rows: list[list[int]] = [[] for _ in range(num_samples)]
        ended = [not source] * num_samples
        for tokens in generate(condition(network, [source], end, num_samples), [[end]] * num_samples, sampler, most):
            for row, token in enumerate(tokens):
                ended[row] = ended[row] or token == end
                if not ended[row]:
                    rows[row].append(token)
            if all(ended):
                break
        for tokens, done in zip(rows, ended, strict=True):
            yield Found(tokens, math.nan, done)


def _record(line: str, target: str, found: "Found", seed: int, reason: str) -> dict[str, Any]:
    return {
        "prompt": line,
        "text": target,
        "tokens": len(found.tokens),
        "seed": seed,
        "finish_reason": reason,
        **({} if math.isnan(found.score) else {"score": found.score}),
    }
